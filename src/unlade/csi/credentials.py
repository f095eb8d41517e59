"""Whom a volume is fetched for: the credentials of one publish, in the order in which they are tried (V4).

1. `nodePublishSecretRef`: the kubelet read the secret in the pod's own namespace and passes it on. A Docker
   config (`.dockerconfigjson`, `.dockercfg`), or `username` and `password` for the volume's registry.
2. The pull secrets of the pod and its service account, where somebody gave us a way to read them.
3. The kubelet's credential providers, with the pod's service-account token where they want one.
4. The node's own Docker configuration.

Whoever publishes, the registry is asked with these before content that is here already is handed out (V5).
Nothing of it is kept: a Registry remembers tokens for as long as the publish takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from unlade.csi.pods import TOKENS_KEY, Pod, PodCredentials
from unlade.model import Reference
from unlade.registry import (
    ChainCredentials,
    Credential,
    CredentialSource,
    InvalidCredentials,
    KubeletProviderCredentials,
    NoCredentials,
    PullSecretCredentials,
    ServiceAccount,
    StaticCredentials,
)

_DOCUMENTS: Final = (".dockerconfigjson", ".dockercfg")


class _Token(msgspec.Struct):
    token: str


_TOKENS = msgspec.json.Decoder(dict[str, _Token])


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCredentials:
    """What a node's administrator set up; each may be missing."""

    node: CredentialSource = field(default_factory=NoCredentials)
    providers: KubeletProviderCredentials | None = None
    pods: PodCredentials | None = None

    def for_publish(
        self,
        references: Sequence[Reference],
        secrets: Mapping[str, str],
        context: Mapping[str, str],
    ) -> CredentialSource:
        """The chain for one volume; raises InvalidCredentials for what cannot be read."""
        pod = Pod.of(context)
        sources = []
        given = {name: value for name, value in secrets.items() if name != TOKENS_KEY}
        if given:
            sources.append(from_secret(given, references))
        if self.pods is not None and pod.name:
            sources.append(self.pods.of_pod(pod))
        if self.providers is not None:
            tokens = _tokens(secrets.get(TOKENS_KEY) or context.get(TOKENS_KEY, ""))
            account = ServiceAccount(pod.namespace, pod.service_account, pod.uid, tokens)
            sources.append(self.providers.acting_for(account))
        sources.append(self.node)
        return ChainCredentials(sources)


def from_secret(secret: Mapping[str, str], references: Sequence[Reference]) -> CredentialSource:
    """A secret of `nodePublishSecretRef`; raises InvalidCredentials that names keys, never values."""
    for name in _DOCUMENTS:
        if name in secret:
            return PullSecretCredentials(secret[name].encode(), name="the volume's secret")
    username, password = secret.get("username", ""), secret.get("password", "")
    if not username or not password:
        raise InvalidCredentials(
            f"the volume's secret has no credential; its keys are {', '.join(sorted(secret))[:200]}",
            next_step="use a secret of type kubernetes.io/dockerconfigjson, or username and password",
        )
    registries = {reference.registry for reference in references}
    if len(registries) > 1:
        # One password must not be shown to several registries.
        raise InvalidCredentials(
            "the volume's secret has a username for one registry, and the references name several",
            next_step="use a secret of type kubernetes.io/dockerconfigjson",
        )
    credential = Credential(username, password)
    return StaticCredentials(dict.fromkeys(registries, credential))


def _tokens(text: str) -> dict[str, str]:
    """Service-account tokens by audience, as the kubelet writes them."""
    if not text:
        return {}
    try:
        return {audience: token.token for audience, token in _TOKENS.decode(text).items()}
    except (msgspec.DecodeError, RecursionError):
        # Not `from error`: the text is secret.
        raise InvalidCredentials(
            f"{TOKENS_KEY} is not what a kubelet writes", next_step="check the kubelet's version"
        ) from None
