"""Authentication to a registry: Basic, and distribution's tokens (GET; OAuth2 POST for identity tokens).

Owns what was learnt from challenges and the token cache. Invariants: a token is used only for the (host,
repository and actions, credential) it was asked for, whatever wider scope the server put into it; a
credential goes to the registry's origin and to a realm that `realms` accepts, nowhere else; a realm's
answer is capped and a token that could break out of a header is refused. `session` calls `header` before a
request and `learn` after a 401; one token is fetched at a time per key, however many threads wait for it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

import msgspec

from unlade.model import Deadline
from unlade.registry.challenge import Challenge, parse_challenges
from unlade.registry.config import RegistryConfig
from unlade.registry.credentials import ANONYMOUS, Credential
from unlade.registry.errors import BadResponse, UnsafeRedirect
from unlade.registry.failures import failure
from unlade.registry.hosts import Host, TLSSettings
from unlade.registry.keyed import KeyedLocks
from unlade.registry.origins import Origin, Url
from unlade.registry.realms import check_realm
from unlade.registry.retry import retrying
from unlade.registry.transport import Body, Transport

_MAX_TOKEN_BODY: Final = 1 << 20
# The specification's default, and a bound against tokens that claim to live for years.
_DEFAULT_SECONDS: Final = 60
_MAX_SECONDS: Final = 3600
# Not used in its last seconds: a request takes time to arrive, and clocks differ.
_MARGIN: Final = 10.0
_MAX_CACHED: Final = 4096
_TOKEN_TEXT: Final = re.compile(r"[!-~]{1,65536}", re.ASCII)
_SCOPE: Final = re.compile(r"repository:([^\s:]+(?::\d+/[^\s:]+)?):([a-z*,]+)", re.ASCII)


class Scope(msgspec.Struct, frozen=True):
    """What a request needs: actions on a repository, and perhaps pull from another (a mount's source)."""

    repository: str
    actions: tuple[str, ...]
    mount_from: str | None = None

    def texts(self, name: str) -> list[str]:
        """As scope parameters; `name` is the repository as the server calls it."""
        texts = [f"repository:{name}:{','.join(self.actions)}"]
        if self.mount_from is not None:
            texts.append(f"repository:{self.mount_from}:pull")
        return texts


class _TokenAnswer(msgspec.Struct):
    token: str | None = None
    access_token: str | None = None
    expires_in: int | float | None = None


_TOKEN_ANSWER = msgspec.json.Decoder(_TokenAnswer)


class _Bearer(msgspec.Struct, frozen=True):
    realm: Url
    service: str


class _Key(msgspec.Struct, frozen=True):
    origin: Origin
    realm: Url
    service: str
    scopes: tuple[str, ...]
    credential: str


class _Token(msgspec.Struct):
    text: str
    until: float


@dataclass(frozen=True, slots=True, repr=False)
class Authorization:
    """The value of the header; `fresh` when a refusal of it is final: it did not come from the cache."""

    text: str
    fresh: bool


class Authenticator:
    """Turns credentials into Authorization headers; thread-safe."""

    def __init__(self, config: RegistryConfig, transport: Transport) -> None:
        self._config = config
        self._transport = transport
        self._schemes: dict[Origin, _Bearer | None] = {}  # None: Basic
        self._names: dict[tuple[Origin, str], str] = {}
        self._tokens: dict[_Key, _Token] = {}
        self._fetching = KeyedLocks()
        self._lock = threading.Lock()

    def header(
        self, host: Host, scope: Scope | None, credential: Credential, deadline: Deadline
    ) -> Authorization | None:
        """The Authorization for a request, by what earlier challenges taught; None to go without."""
        if credential.registry_token:
            return Authorization(f"Bearer {credential.registry_token}", fresh=True)
        with self._lock:
            if host.origin not in self._schemes:
                return None
            bearer = self._schemes[host.origin]
        if bearer is None:
            some = credential.username or credential.password
            return Authorization(credential.basic(), fresh=True) if some else None
        return self._token(host, bearer, scope, credential, deadline)

    def learn(self, host: Host, headers: Mapping[str, str], scope: Scope | None) -> bool:
        """Take in the challenge of a 401; False when it offers nothing we speak. Raises UntrustedRealm."""
        challenges = parse_challenges(headers.get("WWW-Authenticate", ""))
        bearer = next(
            (one for one in challenges if one.scheme == "bearer" and "realm" in one.parameters), None
        )
        if bearer is not None:
            realm = check_realm(bearer.parameters["realm"], host.origin, self._config)
            scheme: _Bearer | None = _Bearer(realm, bearer.parameters.get("service", ""))
            if scope is not None:
                self._learn_name(host, bearer, scope)
        elif any(one.scheme == "basic" for one in challenges):
            scheme = None
        else:
            return False
        with self._lock:
            self._schemes[host.origin] = scheme
        return True

    def forget(self, host: Host, scope: Scope | None, credential: Credential, refused: Authorization) -> None:
        """Drop the token of an Authorization that was refused, unless another thread has replaced it."""
        with self._lock:
            bearer = self._schemes.get(host.origin)
            if bearer is None:
                return
            key = self._key(host, bearer, scope, credential)
            token = self._tokens.get(key)
            if token is not None and refused.text == f"Bearer {token.text}":
                del self._tokens[key]

    def _learn_name(self, host: Host, challenge: Challenge, scope: Scope) -> None:
        """A proxy may know the repository by a longer name (`cache/library/x`).

        No other name is taken over, and never more actions than we need.
        """
        match = _SCOPE.fullmatch(challenge.parameters.get("scope", ""))
        if match is not None and match[1].endswith(f"/{scope.repository}"):
            with self._lock:
                self._names[host.origin, scope.repository] = match[1]

    def _key(self, host: Host, bearer: _Bearer, scope: Scope | None, credential: Credential) -> _Key:
        scopes: list[str] = []
        if scope is not None:
            scopes = scope.texts(self._names.get((host.origin, scope.repository), scope.repository))
        return _Key(host.origin, bearer.realm, bearer.service, tuple(scopes), credential.fingerprint())

    def _token(
        self, host: Host, bearer: _Bearer, scope: Scope | None, credential: Credential, deadline: Deadline
    ) -> Authorization:
        with self._lock:
            key = self._key(host, bearer, scope, credential)
            found = self._cached(key)
        if found is not None:
            return found
        with self._fetching.held(key):
            with self._lock:
                found = self._cached(key)
            if found is not None:
                return found
            token = retrying(
                lambda: self._fetch(host, key, credential, deadline),
                config=self._config,
                attempts=self._config.attempts,
                deadline=deadline,
            )
            with self._lock:
                if len(self._tokens) >= _MAX_CACHED:
                    self._tokens.clear()
                self._tokens[key] = token
            return Authorization(f"Bearer {token.text}", fresh=True)

    def _cached(self, key: _Key) -> Authorization | None:
        token = self._tokens.get(key)
        if token is None or token.until <= time.monotonic():
            return None
        return Authorization(f"Bearer {token.text}", fresh=False)

    def _fetch(self, host: Host, key: _Key, credential: Credential, deadline: Deadline) -> _Token:
        asked = time.monotonic()
        headers = {"Accept": "application/json"}
        url = key.realm
        body: Body | None = None
        method = "GET"
        if credential.identity_token:
            method = "POST"
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            form = {
                "grant_type": "refresh_token",
                "service": key.service,
                "client_id": "unlade",
                "scope": " ".join(key.scopes),
                "refresh_token": credential.identity_token,
            }
            body = urlencode(form).encode()
        else:
            if credential != ANONYMOUS:
                headers["Authorization"] = credential.basic()
            url = Url(url.origin, _with_query(url.target, key, credential))
        tls = host.tls
        if url.origin.host != host.origin.host:
            # Another host: what the registry's own configuration says about it does not hold there.
            insecure = self._config.insecure_skip_tls_verify
            skip = "*" in insecure or url.origin.authority in insecure
            tls = TLSSettings(host.tls.ca_files, (), skip)
        answer = self._transport.exchange(method, url, tls=tls, headers=headers, body=body, deadline=deadline)
        with answer:
            if 300 <= answer.status < 400:
                raise UnsafeRedirect(
                    f"the token realm {url.redacted} redirects", next_step="correct the realm in the registry"
                )
            if answer.status != 200:
                raise failure(
                    answer, f"token for {host.registry} from {url.redacted}", registry=host.registry
                )
            raw = answer.read(_MAX_TOKEN_BODY)
        return _decode_token(raw, url, asked)


def _with_query(target: str, key: _Key, credential: Credential) -> str:
    parameters = [("scope", scope) for scope in key.scopes]
    if key.service:
        parameters.insert(0, ("service", key.service))
    if credential.username:
        parameters.append(("account", credential.username))
    query = urlencode(parameters, quote_via=quote)
    if not query:
        return target
    return f"{target}{'&' if '?' in target else '?'}{query}"


def _decode_token(raw: bytes, url: Url, asked: float) -> _Token:
    try:
        answer = _TOKEN_ANSWER.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        # Not `from error`: the text may quote a token.
        raise BadResponse(f"the token realm {url.redacted} did not answer with a token") from None
    text = answer.token or answer.access_token or ""
    if not _TOKEN_TEXT.fullmatch(text):
        raise BadResponse(f"the token realm {url.redacted} did not answer with a usable token")
    seconds = answer.expires_in if answer.expires_in is not None else _DEFAULT_SECONDS
    if not 0 < seconds <= _MAX_SECONDS:
        seconds = _DEFAULT_SECONDS if seconds <= 0 else _MAX_SECONDS
    return _Token(text, asked + max(seconds - _MARGIN, seconds / 2))
