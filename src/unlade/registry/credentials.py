"""Credentials, and where they come from: static ones, pull secrets, and chains of sources.

Owns the types and the matching of a registry and repository against the keys people write (`host`,
`host/path`, `https://index.docker.io/v1/`, `*.example.com`): the longest match first, path parts whole, so
that a secret for `r.io/team` never serves `r.io/team-b`. Docker and Podman files are read in
`dockerconfig`. Invariant: no representation, message or log of a Credential shows its secret. `session`
asks, per (registry, repository).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Protocol

import msgspec

from unlade.registry.errors import InvalidCredentials

# Where Docker files the credentials of docker.io.
DOCKER_KEY: Final = "https://index.docker.io/v1/"
_DOCKER_NAMES: Final = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
# A secret in Kubernetes is at most 1 MiB.
_MAX_SECRET: Final = 1 << 20


@dataclass(frozen=True, slots=True, repr=False)
class Credential:
    """A user name and password, an identity token (traded for access tokens), or a ready access token."""

    username: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""

    def fingerprint(self) -> str:
        """A hash to remember grants by (V5); equal for equal credentials, and not the secret itself."""
        hasher = hashlib.sha256(b"unlade credential\0")
        for part in (self.username, self.password, self.identity_token, self.registry_token):
            raw = part.encode("utf-8", "surrogatepass")
            hasher.update(len(raw).to_bytes(8, "big") + raw)
        return hasher.hexdigest()

    def basic(self) -> str:
        """The value of a Basic Authorization header."""
        pair = f"{self.username}:{self.password}".encode("utf-8", "surrogatepass")
        return f"Basic {base64.b64encode(pair).decode()}"

    def __repr__(self) -> str:
        return f"Credential(username={self.username!r}, …)"


ANONYMOUS: Final = Credential()


class CredentialSource(Protocol):
    """Knows credentials for registries."""

    def lookup(self, registry: str, repository: str) -> Sequence[Credential]:
        """Candidates, best first; empty for anonymous. Raises InvalidCredentials."""
        ...


class NoCredentials:
    """Anonymous everywhere."""

    def lookup(self, registry: str, repository: str) -> Sequence[Credential]:  # noqa: ARG002 # the protocol's
        """Nothing."""
        return ()


class StaticCredentials:
    """Credentials by key, as written in an auths table."""

    def __init__(self, entries: Mapping[str, Credential]) -> None:
        self._entries = dict(entries)

    def lookup(self, registry: str, repository: str) -> Sequence[Credential]:
        """The matching entries, the longest key first."""
        return [self._entries[key] for key in matching_keys(self._entries, registry, repository)]


class ChainCredentials:
    """Several sources, asked in order; all their candidates, without repeats."""

    def __init__(self, sources: Iterable[CredentialSource]) -> None:
        self._sources = tuple(sources)

    def lookup(self, registry: str, repository: str) -> Sequence[Credential]:
        """Every source's candidates, in order."""
        found = (one for source in self._sources for one in source.lookup(registry, repository))
        return list(dict.fromkeys(found))


class AuthEntry(msgspec.Struct, rename="lower"):
    """One entry of an auths table (identitytoken, registrytoken in lower case)."""

    auth: str | None = None
    username: str | None = None
    password: str | None = None
    identitytoken: str | None = None
    registrytoken: str | None = None

    def credential(self, where: str) -> Credential | None:
        """The credential in it; None when the entry is an empty marker. Raises InvalidCredentials."""
        username, password = self.username or "", self.password or ""
        if self.auth:
            username, password = decode_auth(self.auth, where)
        credential = Credential(username, password, self.identitytoken or "", self.registrytoken or "")
        return None if credential == ANONYMOUS or credential == Credential(username) else credential


_ENTRIES = msgspec.json.Decoder(dict[str, AuthEntry] | None)
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class PullSecretCredentials:
    """A Kubernetes pull secret: `.dockerconfigjson` (with auths) or the older `.dockercfg` (the bare
    table).
    """

    def __init__(self, data: bytes, *, name: str = "pull secret") -> None:
        self._name = name
        if len(data) > _MAX_SECRET:
            raise InvalidCredentials(f"{name} is larger than {_MAX_SECRET} bytes")
        self._entries = parse_auths(data, name)

    def lookup(self, registry: str, repository: str) -> Sequence[Credential]:
        """The matching entries, the longest key first."""
        keys = matching_keys(self._entries, registry, repository)
        found = (self._entries[key].credential(f"{self._name}, entry {key!r}") for key in keys)
        return [one for one in found if one is not None]


def parse_auths(data: bytes, where: str) -> dict[str, AuthEntry]:
    """The auths table of a dockerconfigjson or dockercfg document; raises InvalidCredentials."""
    try:
        document = _PARTS.decode(data)
        if "auths" in document:
            return _ENTRIES.decode(document["auths"]) or {}
        return _ENTRIES.decode(data) or {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        # Not `from error`: msgspec's text may quote the document.
        raise InvalidCredentials(
            f"{where} is not a Docker credential document",
            next_step='it should be JSON with an "auths" table, as docker login writes it',
        ) from None


def decode_auth(text: str, where: str) -> tuple[str, str]:
    """User and password from the base64 of `user:password`; raises InvalidCredentials."""
    try:
        raw = base64.b64decode(text.strip().rstrip("\0"), validate=True)
        username, colon, password = raw.decode().partition(":")
    except (binascii.Error, ValueError):
        colon = username = password = ""
    if not colon:
        raise InvalidCredentials(
            f"{where}: auth is not the base64 of user:password", next_step="log in again to that registry"
        )
    # Some old tools padded the password with NULs.
    return username, password.rstrip("\0")


def normalise_key(key: str) -> str:
    """`host[:port][/path]` from what people and tools write as a key."""
    text = key.strip().lower() if "/" not in key else key.strip()
    scheme, separator, rest = text.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        text = rest
    host, _, path = text.rstrip("/").partition("/")
    if path in ("v1", "v2"):
        path = ""
    host = "docker.io" if host.lower() in _DOCKER_NAMES else host.lower()
    return f"{host}/{path}" if path else host


def matching_keys(keys: Iterable[str], registry: str, repository: str) -> list[str]:
    """The keys that cover a repository, the longest (most specific) first, exact hosts before patterns."""
    host = "docker.io" if registry.lower() in _DOCKER_NAMES else registry.lower()
    parts = repository.split("/") if repository else []
    found = []
    for key in keys:
        key_host, _, key_path = normalise_key(key).partition("/")
        key_parts = key_path.split("/") if key_path else []
        if parts[: len(key_parts)] != key_parts or not _host_matches(key_host, host):
            continue
        found.append((len(key_parts), key_host == host, len(key_host), key))
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [entry[3] for entry in found]


def _host_matches(pattern: str, host: str) -> bool:
    """Equal, or label by label with `*`, as the kubelet matches pull secrets: `*.io` is not `a.b.io`."""
    if pattern == host:
        return True
    if not any(char in pattern for char in "*?["):
        return False
    pattern_name, _, pattern_port = pattern.partition(":")
    name, _, port = host.partition(":")
    pattern_labels, labels = pattern_name.split("."), name.split(".")
    return (
        port == pattern_port
        and len(pattern_labels) == len(labels)
        and all(fnmatchcase(label, glob) for glob, label in zip(pattern_labels, labels, strict=True))
    )
