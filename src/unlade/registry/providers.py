"""The kubelet's credential provider plugins as a source of credentials (V4).

Reads the kubelet's own CredentialProviderConfig (kubelet.config.k8s.io/v1) and runs the programs it names
from the plugin directory: a CredentialProviderRequest on stdin, a CredentialProviderResponse on stdout, so
that a node pulls with us what it can pull without us. Answers are cached as they ask to be (per image,
registry, or for all), never longer than a day. Called by `session` through the CredentialSource protocol;
thread-safe. A provider that wants the pod's service-account token (`tokenAttributes`) is asked only by
`acting_for`, and its answers are cached for that token or account alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from unlade.registry.credentials import AuthEntry, Credential, CredentialSource, matching_keys
from unlade.registry.durations import parse_duration
from unlade.registry.errors import InvalidCredentials
from unlade.registry.keyed import KeyedLocks
from unlade.registry.programs import run

_log = logging.getLogger(__name__)
_CONFIG_VERSIONS: Final = frozenset({"v1", "v1beta1", "v1alpha1"})
_API: Final = "credentialprovider.kubelet.k8s.io/"
# The kubelet's own limit.
_SECONDS: Final = 60.0
_MAX_CONFIG: Final = 1 << 20
_MAX_CACHE_SECONDS: Final = 86400.0
_NAME: Final = re.compile(r"[^/\s.][^/\s]*|\.[^/\s.][^/\s]*")


class _Env(msgspec.Struct):
    name: str
    value: str = ""


class _TokenAttributes(msgspec.Struct, rename="camel"):
    service_account_token_audience: str
    cache_type: str = "Token"
    require_service_account: bool = True
    required_service_account_annotation_keys: list[str] | None = None


class _Provider(msgspec.Struct, rename="camel"):
    name: str
    match_images: list[str]
    api_version: str
    default_cache_duration: str = "0s"
    args: list[str] | None = None
    env: list[_Env] | None = None
    token_attributes: _TokenAttributes | None = None


class _Config(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    providers: list[_Provider]


_CONFIG = msgspec.json.Decoder(_Config)


class _Answer(msgspec.Struct, rename="camel"):
    kind: str
    api_version: str
    cache_key_type: str = ""
    cache_duration: str | None = None
    auth: dict[str, AuthEntry] | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class _Cached:
    until: float
    auth: dict[str, AuthEntry]


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """Whom a pod runs as: its tokens by audience. A repr shows none of them."""

    namespace: str
    name: str
    pod_uid: str = ""
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)


_NOBODY: Final = ServiceAccount("", "")


class _Acting:
    """The providers on behalf of one pod's account."""

    def __init__(self, providers: KubeletProviderCredentials, account: ServiceAccount) -> None:
        self._providers = providers
        self._account = account

    def lookup(self, registry: str, repository: str) -> Sequence[Credential]:
        return self._providers.lookup_as(self._account, registry, repository)


class KubeletProviderCredentials:
    """Credentials from the plugins that a kubelet's configuration file names; raises InvalidCredentials."""

    def __init__(self, config_path: str, plugin_dir: str) -> None:
        self._plugin_dir = plugin_dir
        self._path = config_path
        self._providers = _read_config(config_path)
        self._cache: dict[tuple[str, str, str], _Cached] = {}
        self._running = KeyedLocks()
        self._lock = threading.Lock()

    def lookup(self, registry: str, repository: str) -> Sequence[Credential]:
        """What the providers for this image know, the most specific key first."""
        return self.lookup_as(_NOBODY, registry, repository)

    def acting_for(self, account: ServiceAccount) -> CredentialSource:
        """The same providers on behalf of a pod: those that want its token get it."""
        return _Acting(self, account)

    def lookup_as(self, account: ServiceAccount, registry: str, repository: str) -> Sequence[Credential]:
        """What the providers know for this image and account."""
        image = f"{registry}/{repository}"
        found: list[Credential] = []
        for provider in self._providers:
            if not matching_keys(provider.match_images, registry, repository):
                continue
            scope = _scope(provider, account)
            if scope is None:
                continue
            # One run per provider, image and account at a time; the others find its answer in the cache.
            with self._running.held((provider.name, image, scope)):
                auth = self._cached(provider, registry, image, scope)
                if auth is None:
                    auth = self._ask(provider, registry, image, scope, account)
            for key in matching_keys(auth, registry, repository):
                credential = auth[key].credential(f"provider {provider.name}, entry {key!r}")
                if credential is not None:
                    found.append(credential)
        return list(dict.fromkeys(found))

    def _cached(
        self, provider: _Provider, registry: str, image: str, scope: str
    ) -> dict[str, AuthEntry] | None:
        now = time.monotonic()
        with self._lock:
            for key in (image, registry, ""):
                cached = self._cache.get((provider.name, key, scope))
                if cached is not None and cached.until > now:
                    return cached.auth
        return None

    def _ask(
        self, provider: _Provider, registry: str, image: str, scope: str, account: ServiceAccount
    ) -> dict[str, AuthEntry]:
        request = {
            "kind": "CredentialProviderRequest",
            "apiVersion": provider.api_version,
            "image": image,
        }
        if provider.token_attributes is not None and scope:
            audience = provider.token_attributes.service_account_token_audience
            request["serviceAccountToken"] = account.tokens[audience]
        command = [os.path.join(self._plugin_dir, provider.name), *(provider.args or ())]
        environment = {**os.environ, **{entry.name: entry.value for entry in provider.env or ()}}
        ran = run(command, msgspec.json.encode(request), seconds=_SECONDS, environment=environment)
        if ran.status != 0:
            raise InvalidCredentials(
                f"credential provider {provider.name} failed with exit status {ran.status}",
                next_step="run it by hand with a CredentialProviderRequest on stdin",
            )
        try:
            answer = _ANSWER.decode(ran.output)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Not `from error`: the text may quote a secret.
            raise self._wrong(provider) from None
        if answer.kind != "CredentialProviderResponse" or answer.api_version != provider.api_version:
            raise self._wrong(provider)
        key = {"Image": image, "Registry": registry, "Global": ""}.get(answer.cache_key_type)
        if key is None:
            raise self._wrong(provider)
        seconds = parse_duration(answer.cache_duration or provider.default_cache_duration)
        if seconds is None:
            raise self._wrong(provider)
        auth = answer.auth or {}
        if seconds > 0:
            now = time.monotonic()
            until = now + min(seconds, _MAX_CACHE_SECONDS)
            with self._lock:
                if scope:
                    # A token lives an hour and every pod has its own: their answers must not pile up.
                    self._cache = {known: one for known, one in self._cache.items() if one.until > now}
                self._cache[provider.name, key, scope] = _Cached(until, auth)
        return auth

    def _wrong(self, provider: _Provider) -> InvalidCredentials:
        return InvalidCredentials(
            f"credential provider {provider.name} did not answer with a CredentialProviderResponse of "
            f"{provider.api_version}",
            next_step="check its version and its entry in the kubelet's configuration",
        )


def _scope(provider: _Provider, account: ServiceAccount) -> str | None:
    """Whose answers these are: "" for everybody's, None when the account has not what the provider wants."""
    wants = provider.token_attributes
    if wants is None:
        return ""
    if wants.required_service_account_annotation_keys:
        _log.warning("provider %s wants annotations of the service account: not asked", provider.name)
        return None
    token = account.tokens.get(wants.service_account_token_audience)
    if token is None:
        if wants.require_service_account or account.name:
            _log.warning(
                "provider %s wants a token for the audience %s and none came: name it in the CSIDriver's"
                " tokenRequests",
                provider.name,
                wants.service_account_token_audience,
            )
            return None
        return ""
    if wants.cache_type == "ServiceAccount":
        return f"{account.namespace}/{account.name}"
    return hashlib.sha256(token.encode()).hexdigest()


def _read_config(path: str) -> list[_Provider]:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_CONFIG + 1)
    except OSError as error:
        raise InvalidCredentials(
            f"{path} cannot be read: {error.strerror}", next_step="check the path and its permissions"
        ) from error
    if len(raw) > _MAX_CONFIG:
        raise InvalidCredentials(f"{path} is larger than {_MAX_CONFIG} bytes")
    try:
        config = _CONFIG.decode(msgspec.json.encode(_load_yaml(raw)))
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidCredentials(f"{path} is not a CredentialProviderConfig: {error}") from error
    group, _, version = config.api_version.partition("/")
    if (group, config.kind) != ("kubelet.config.k8s.io", "CredentialProviderConfig"):
        raise InvalidCredentials(f"{path} is a {config.kind[:80]!r}, not a CredentialProviderConfig")
    if version not in _CONFIG_VERSIONS:
        raise InvalidCredentials(f"{path} has the unknown version {version[:80]!r}")
    for provider in config.providers:
        if not _NAME.fullmatch(provider.name):
            raise InvalidCredentials(f"{path}: {provider.name[:80]!r} is not the name of a plugin")
        if not provider.api_version.startswith(_API):
            raise InvalidCredentials(f"{path}: {provider.name} has apiVersion {provider.api_version[:80]!r}")
    return config.providers


def _load_yaml(raw: bytes) -> Any:
    """YAML by its safe loader: JSON's types, no tags, no code."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(raw.decode())
    except (YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {type(error).__name__}") from error
