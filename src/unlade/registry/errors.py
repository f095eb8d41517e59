"""What can go wrong with a registry, as types; the reader's map of this room.

::

    RegistryError (unlade.errors)
    ├── HTTPFailure            an answer with a status that is not what was asked for: status, codes, url
    │   ├── NotFound           404
    │   ├── Unauthorized       401, 403, or no credential was accepted
    │   ├── RateLimited        429
    │   └── Unavailable        408, 5xx: retryable
    ├── Unreachable            no connection, or it broke: retryable
    │   ├── Truncated          a body ended early: continue with a range
    │   └── TooSlow            below the minimum rate
    ├── TLSFailure             the certificate or the handshake: not retryable
    ├── BadResponse            an answer outside the protocol
    │   ├── ResponseTooLarge   a body over its cap
    │   └── TooManyPages       pagination without an end
    └── Refused                we do not do what the server asks
        ├── PlainHTTPRefused   http to a host that is not allowlisted
        ├── UnsafeRedirect     a redirect or Location that must not be followed
        └── UntrustedRealm     a token realm outside the rules
    IntegrityError
    ├── WrongContent           size, digest or range is not what was asked for
    └── WrongSubject           a referrer that refers to something else, or is of another type
    InvalidInput
    └── InvalidHosts / InvalidCredentials

Texts never hold a credential, a token or the query of a URL (signed URLs are credentials).
"""

from __future__ import annotations

from unlade.errors import IntegrityError, InvalidInput, RegistryError


class HTTPFailure(RegistryError):
    """The registry answered, but not with what was asked for."""

    code = "registry-refused"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        codes: tuple[str, ...] = (),
        url: str = "",
        next_step: str = "",
        retryable: bool | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, next_step=next_step, retryable=retryable)
        self.status = status
        self.codes = codes
        self.url = url
        self.retry_after = retry_after


class NotFound(HTTPFailure):
    """The registry has no such repository, manifest or blob (or hides it from these credentials)."""

    code = "not-found"


class Unauthorized(HTTPFailure):
    """No credential was accepted, or none of them may do this."""

    code = "unauthorized"


class RateLimited(HTTPFailure):
    """The registry asked us to slow down, for longer than we wait."""

    code = "rate-limited"
    retryable = True


class Unavailable(HTTPFailure):
    """The registry failed on its side."""

    code = "registry-unavailable"
    retryable = True


class Unreachable(RegistryError):
    """No connection could be made, or it broke."""

    code = "registry-unreachable"
    retryable = True


class Truncated(Unreachable):
    """A body ended before its declared length."""

    code = "truncated"


class TooSlow(Unreachable):
    """The server sends, but below the minimum rate."""

    code = "too-slow"


class TLSFailure(RegistryError):
    """The server's certificate is not trusted, or the handshake failed."""

    code = "tls"


class BadResponse(RegistryError):
    """An answer that is outside the protocol."""

    code = "bad-response"


class ResponseTooLarge(BadResponse):
    """A body over its cap."""

    code = "response-too-large"


class TooManyPages(BadResponse):
    """A listing that does not end."""

    code = "too-many-pages"


class Refused(RegistryError):
    """The server asks for something we do not do."""

    code = "refused"


class PlainHTTPRefused(Refused):
    """Plain HTTP to a host that is not allowlisted; never a fallback."""

    code = "plain-http-refused"


class UnsafeRedirect(Refused):
    """A redirect or upload location that must not be followed."""

    code = "unsafe-redirect"


class UntrustedRealm(Refused):
    """A token realm on a host to which this registry's credentials do not go."""

    code = "untrusted-realm"


class WrongContent(IntegrityError):
    """The server's content is not what the descriptor promised."""

    code = "wrong-content"


class WrongSubject(IntegrityError):
    """A referrer that refers to something else, or is not of the type it was listed as."""

    code = "wrong-subject"


class InvalidHosts(InvalidInput):
    """A hosts.toml or certificate directory that cannot be used."""

    code = "invalid-hosts"


class InvalidCredentials(InvalidInput):
    """A credential file, secret or helper that cannot be used."""

    code = "invalid-credentials"
