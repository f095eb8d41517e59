"""What a node's driver asks of the API server on behalf of a pod: its pull secrets, and events on it.

The driver (`unlade.csi`) knows the Kubernetes API by two small protocols only; these are their
implementations, wired by `unlade.cli`. Both are off unless asked for, because both need rights: events are
harmless, secrets are not. A namespace that does not grant them is no failure: the volume is then fetched
with the other credentials, and the log says so once.

As the kubelet does, a pull secret that is missing is passed over, and secrets of other types are not read.
The pod's UID must be the one that the kubelet named: another pod of the same name has other rights.
"""

import base64
import binascii
import logging
import threading
from typing import Final, Protocol

import msgspec

from unlade.controllers.api import ApiError, ApiServer
from unlade.controllers.recorder import Recorder, Subject
from unlade.errors import InvalidInput
from unlade.registry import (
    ChainCredentials,
    CredentialSource,
    InvalidCredentials,
    NoCredentials,
    PullSecretCredentials,
)

log = logging.getLogger(__name__)

COMPONENT: Final = "unlade-csi"
# Type of a secret → the key that its document is under.
DOCUMENTS: Final = {
    "kubernetes.io/dockerconfigjson": ".dockerconfigjson",
    "kubernetes.io/dockercfg": ".dockercfg",
}
# Namespaces whose refusal was told already; a cluster has hundreds, a bound is a bound.
_TOLD: Final = 10_000


class PodIdentity(Protocol):
    """The pod that a volume is for, as the kubelet names it."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def service_account(self) -> str: ...


class _Named(msgspec.Struct):
    name: str = ""


class _Metadata(msgspec.Struct):
    uid: str = ""


class _Spec(msgspec.Struct, rename="camel"):
    image_pull_secrets: list[_Named] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec


class _Account(msgspec.Struct, rename="camel"):
    image_pull_secrets: list[_Named] | None = None


class _Secret(msgspec.Struct):
    type: str = ""
    data: dict[str, str] | None = None


_POD = msgspec.json.Decoder(_Pod)
_ACCOUNT = msgspec.json.Decoder(_Account)
_SECRET = msgspec.json.Decoder(_Secret)


class PodSecrets:
    """Reads the pull secrets that a pod names, or else its service account; thread-safe, keeps nothing."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def of_pod(self, pod: PodIdentity) -> CredentialSource:
        """The secrets' credentials, none where we may not look. Raises ApiError when nobody answers."""
        try:
            return ChainCredentials(
                [self._read(pod.namespace, name) for name in self._names(pod)] or [NoCredentials()]
            )
        except ApiError as error:
            if error.status not in {401, 403}:
                raise
            self._tell_once(pod.namespace, error)
            return NoCredentials()

    def of_secret(self, namespace: str, name: str) -> CredentialSource:
        """One pull secret that somebody named; raises ApiError, also when we may not look."""
        return self._read(namespace, name)

    def _names(self, pod: PodIdentity) -> list[str]:
        found = _POD.decode(self._get(pod.namespace, "pods", pod.name))
        if pod.uid and found.metadata.uid != pod.uid:
            raise InvalidInput(
                f"pod {pod.namespace}/{pod.name} is another one by now",
                next_step="nothing: the kubelet lets go of the old one",
            )
        named = found.spec.image_pull_secrets
        if not named and pod.service_account:
            # The API server copies them into the pod when it is made; not where that plug-in is off.
            account = self._get(pod.namespace, "serviceaccounts", pod.service_account)
            named = _ACCOUNT.decode(account).image_pull_secrets
        return [one.name for one in named or () if one.name]

    def _read(self, namespace: str, name: str) -> CredentialSource:
        try:
            secret = _SECRET.decode(self._get(namespace, "secrets", name))
        except ApiError as error:
            if error.status != 404:
                raise
            log.info("pull secret %s/%s does not exist", namespace, name)
            return NoCredentials()
        key = DOCUMENTS.get(secret.type, "")
        document = (secret.data or {}).get(key)
        if not key or document is None:
            log.info("secret %s/%s is not a pull secret", namespace, name)
            return NoCredentials()
        try:
            return PullSecretCredentials(base64.b64decode(document), name=f"pull secret {namespace}/{name}")
        except (binascii.Error, InvalidCredentials) as error:
            log.warning("pull secret %s/%s cannot be read: %s", namespace, name, error)
            return NoCredentials()

    def _get(self, namespace: str, resource: str, name: str) -> bytes:
        return self._server.read("GET", f"/api/v1/namespaces/{namespace}/{resource}/{name}")

    def _tell_once(self, namespace: str, error: ApiError) -> None:
        with self._lock:
            if namespace in self._told:
                return
            if len(self._told) >= _TOLD:
                self._told.clear()
            self._told.add(namespace)
        log.warning("pull secrets of namespace %s are not used: %s", namespace, error)


class PodNotes:
    """Events on pods, through a Recorder: never raises, never waits."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def tell(self, pod: PodIdentity, *, reason: str, message: str, warning: bool) -> None:
        """An event of this pod; repetitions are counted, floods are cut."""
        if not pod.name:
            return
        subject = Subject("Pod", pod.namespace, pod.name, pod.uid)
        (self._recorder.warn if warning else self._recorder.inform)(subject, reason, message)
