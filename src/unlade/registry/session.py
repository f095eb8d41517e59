"""One request to one host of a registry, with everything around it: credentials, redirects, retries.

Owns the order of things: the known Authorization is tried, a 401 is answered once per credential, the next
credential is tried when one may not do it, redirects are followed by hand (credentials and configured
headers stay on the registry's origin; never from TLS to plain HTTP), errors that may pass are retried
within caps. What an answer means is `client`'s business. Invariant: the number of requests that one call
can cause is bounded by attempts * candidates * (3 + redirects), whatever the servers answer.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping
from typing import Final

import msgspec

from unlade.errors import RegistryError, UnladeError
from unlade.model import Deadline
from unlade.registry.auth import Authenticator, Authorization, Scope
from unlade.registry.config import RegistryConfig
from unlade.registry.credentials import ANONYMOUS, Credential, CredentialSource
from unlade.registry.errors import NotFound, Unauthorized, UnsafeRedirect
from unlade.registry.failures import failure, naming
from unlade.registry.hosts import Host, TLSSettings
from unlade.registry.keyed import KeyedLocks
from unlade.registry.origins import Origin, Url, check_next, parse_url
from unlade.registry.retry import retrying
from unlade.registry.transport import Answer, Body, Transport

# Registries redirect once (to storage), rarely twice.
_MAX_REDIRECTS: Final = 5
# Credential helpers are programs: not run for each of a hundred layers. Cleared when a credential is refused.
_REMEMBER_SECONDS: Final = 300.0
_MAX_REMEMBERED: Final = 4096
_READS: Final = frozenset({"GET", "HEAD"})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


class _Call(msgspec.Struct, frozen=True):
    """What is wanted, passed through the steps unchanged."""

    host: Host
    method: str
    url: Url
    purpose: str
    scope: Scope | None
    expect: frozenset[int]
    deadline: Deadline
    headers: Mapping[str, str]
    body: Body | None
    answer_within: float | None


class Session:
    """Sends requests; thread-safe. `close` ends its connections."""

    def __init__(self, config: RegistryConfig, credentials: CredentialSource) -> None:
        self.config = config
        self._credentials = credentials
        self._transport = Transport(config)
        self._auth = Authenticator(config, self._transport)
        self._remembered: dict[tuple[str, str], tuple[float, list[Credential]]] = {}
        self._looking = KeyedLocks()
        self._lock = threading.Lock()

    def send(
        self,
        host: Host,
        method: str,
        url: Url,
        *,
        purpose: str,
        scope: Scope | None,
        expect: frozenset[int],
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        attempts: int | None = None,
        answer_within: float | None = None,
    ) -> Answer:
        """An answer whose status is in `expect`; the caller closes it. Raises RegistryError by kind.

        `url` may be of another origin (an upload location): then no credential and no configured header goes
        there. `purpose` names the reference and the deed, for messages. `answer_within` is for requests that
        take the server longer than usual to answer.
        """
        call = _Call(host, method, url, purpose, scope, expect, deadline, headers or {}, body, answer_within)
        with naming(purpose):
            return retrying(
                lambda: self._as_somebody(call),
                config=self.config,
                attempts=attempts or self.config.attempts,
                deadline=deadline,
            )

    def ping(self, host: Host, credential: Credential, *, purpose: str, deadline: Deadline) -> None:
        """Ask for the API's root as this credential and nobody else; raises Unauthorized."""
        call = _Call(host, "GET", host.url(""), purpose, None, frozenset({200}), deadline, {}, None, None)
        retrying(
            lambda: self._as(credential, call),
            config=self.config,
            attempts=self.config.attempts,
            deadline=deadline,
        ).discard()

    def candidates(self, registry: str, repository: str) -> list[Credential]:
        """The credentials for a repository, the one that last worked first; empty for anonymous."""
        found = self._recall(registry, repository)
        if found is not None:
            return found
        with self._looking.held((registry, repository)):
            found = self._recall(registry, repository)
            if found is None:
                found = list(self._credentials.lookup(registry, repository))
                self._remember(registry, repository, found)
        return found

    def acting_for(self, credentials: CredentialSource) -> Session:
        """The same connections and token cache, which is kept by credential, for somebody else."""
        other = copy.copy(self)
        other._credentials = credentials
        other._remembered = {}
        other._looking = KeyedLocks()
        other._lock = threading.Lock()
        return other

    def close(self) -> None:
        """Close idle connections."""
        self._transport.close()

    def _recall(self, registry: str, repository: str) -> list[Credential] | None:
        with self._lock:
            known = self._remembered.get((registry, repository))
        return list(known[1]) if known is not None and known[0] > time.monotonic() else None

    def _remember(self, registry: str, repository: str, found: list[Credential]) -> None:
        with self._lock:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[registry, repository] = (time.monotonic() + _REMEMBER_SECONDS, found)

    def _forget(self, registry: str, repository: str) -> None:
        with self._lock:
            self._remembered.pop((registry, repository), None)

    def _as_somebody(self, call: _Call) -> Answer:
        """Try the candidates in turn; the kubelet does the same with a pod's pull secrets."""
        host = call.host
        if call.url.origin != host.origin:
            return self._judge(call, self._follow(call, None))
        repository = call.scope.repository if call.scope is not None else ""
        found = self.candidates(host.registry, repository)
        # Public content stays reachable with a stale login; a write is never anonymous after a refusal.
        tries = [*found, ANONYMOUS] if call.method in _READS or not found else found
        refused: RegistryError | None = None
        for credential in tries:
            if isinstance(refused, NotFound) and credential is ANONYMOUS:
                break
            try:
                answer = self._as(credential, call)
            except (Unauthorized, NotFound) as error:
                # "Not found" from an accepted credential says more than "denied" from the others.
                if refused is None or isinstance(error, NotFound):
                    refused = error
                continue
            if credential is not ANONYMOUS and credential is not found[0]:
                others = [one for one in found if one is not credential]
                self._remember(host.registry, repository, [credential, *others])
            return answer
        assert refused is not None
        if isinstance(refused, Unauthorized) and found:
            self._forget(host.registry, repository)
        raise refused

    def _as(self, credential: Credential, call: _Call) -> Answer:
        """One credential: ask, answer the challenge, judge.

        A token from the cache may have expired, and so may the one that another thread fetched meanwhile; a
        fresh one that is refused is the answer.
        """
        host, scope = call.host, call.scope
        authorization = self._auth.header(host, scope, credential, call.deadline)
        answer = self._follow(call, authorization)
        for _ in range(2):
            if answer.status != 401 or answer.url.origin != host.origin:
                break
            if authorization is not None:
                self._auth.forget(host, scope, credential, authorization)
            try:
                understood = self._auth.learn(host, answer.headers, scope)
                again = self._auth.header(host, scope, credential, call.deadline) if understood else None
            except UnladeError:
                answer.discard()
                raise
            if again is None or (authorization is not None and again.text == authorization.text):
                break
            answer.discard()
            authorization = again
            answer = self._follow(call, authorization)
            if authorization.fresh:
                break
        return self._judge(call, answer)

    def _judge(self, call: _Call, answer: Answer) -> Answer:
        if answer.status in call.expect:
            return answer
        raise failure(answer, call.purpose, registry=call.host.registry)

    def _follow(self, call: _Call, authorization: Authorization | None) -> Answer:
        """Send, and follow redirects of reads.

        Credentials stay with the registry, and are not taken up again when a foreign host leads back.
        """
        host, url = call.host, call.url
        at_home = True
        for _ in range(_MAX_REDIRECTS + 1):
            headers = dict(call.headers)
            at_home = at_home and url.origin == host.origin
            if at_home:
                headers.update(host.headers)
                if authorization is not None:
                    headers["Authorization"] = authorization.text
            answer = self._transport.exchange(
                call.method,
                url,
                tls=host.tls if url.origin == host.origin else self._foreign_tls(host, url.origin),
                headers=headers,
                body=call.body,
                dial_timeout=host.dial_timeout,
                answer_within=call.answer_within,
                deadline=call.deadline,
            )
            location = answer.headers.get("Location")
            if answer.status not in _REDIRECTS or call.method not in _READS or location is None:
                return answer
            answer.discard()
            following = parse_url(location, base=url)
            check_next(url.origin, following, self.config.plain_http)
            url = following
        raise UnsafeRedirect(
            f"{call.purpose}: {host.origin} redirected more than {_MAX_REDIRECTS} times",
            next_step="check the registry's storage",
        )

    def _foreign_tls(self, host: Host, origin: Origin) -> TLSSettings:
        """For a redirect's target: the registry's authorities are trusted there, too.

        Private storage is often signed by the same one. The client certificate is not shown to it.
        """
        insecure = self.config.insecure_skip_tls_verify
        skip = "*" in insecure or origin.authority in insecure
        if origin.host == host.origin.host:
            skip = skip or host.tls.skip_verify
        return TLSSettings(host.tls.ca_files, (), skip)
