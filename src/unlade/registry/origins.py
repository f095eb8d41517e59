"""URLs that a server chose (redirects, upload locations, token realms) and what we will do with them.

Owns the one URL parser of this room: what is checked here is exactly what is connected to, so no second
parser can disagree. Invariant: a `Url` has a scheme of http or https, a host that is a DNS name or a strict
IP literal (never the `0x7f.1` forms that the resolver would still accept), no user info, printable ASCII
only. Rules for plain HTTP and for addresses of metadata services live here too; `transport` and `auth` call
them.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import urljoin, urlsplit

import msgspec

from unlade.registry.errors import BadResponse, PlainHTTPRefused, UnsafeRedirect

_PORTS: Final = {"http": 80, "https": 443}
# Signed storage URLs run to about 3 KB; http.client refuses lines over 64 KiB anyway.
_MAX_URL: Final = 16 << 10
_PRINTABLE: Final = re.compile(r"[!-\[\]-~]+")  # ASCII without blanks, control characters and backslash
_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?", re.ASCII)
# The resolver reads these as IPv4 addresses even where a URL library sees a name.
_NUMERIC_LABEL: Final = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)", re.ASCII)

# Where clouds hand out machine credentials to whoever asks from inside.
_METADATA_ADDRESSES: Final = frozenset(
    ipaddress.ip_address(text)
    for text in ("fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192")
)
_METADATA_NAMES: Final = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data"})


class Origin(msgspec.Struct, frozen=True):
    """Scheme, host and port: the unit to which credentials belong."""

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """`host[:port]`, the port left out when it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def is_metadata(self) -> bool:
        """Whether this is the address or the name of a cloud's metadata service (or link-local at all)."""
        address = ip_literal(self.host)
        if address is None:
            return self.host.rstrip(".") in _METADATA_NAMES
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_link_local or address in _METADATA_ADDRESSES

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


class Url(msgspec.Struct, frozen=True):
    """An origin and the request target (path and query)."""

    origin: Origin
    target: str

    @property
    def redacted(self) -> str:
        """For messages: without the query, which may be a signature."""
        path, question, _ = self.target.partition("?")
        return f"{self.origin}{path}{'?…' if question else ''}"

    def __str__(self) -> str:
        return f"{self.origin}{self.target}"


def ip_literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is written as, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def parse_url(unsafe_text: str, *, base: Url | None = None) -> Url:
    """Parse an absolute URL (or one relative to `base`); raises BadResponse."""
    # Before urlsplit, which silently drops newlines and tabs.
    if len(unsafe_text) > _MAX_URL or not _PRINTABLE.fullmatch(unsafe_text):
        raise BadResponse("a URL from the server has forbidden characters or is too long")
    try:
        split = urlsplit(urljoin(str(base), unsafe_text) if base else unsafe_text)
        port = split.port
    except ValueError as error:
        raise BadResponse("a URL from the server cannot be parsed") from error
    host = (split.hostname or "").lower()
    if split.scheme not in _PORTS:
        raise BadResponse(f"a URL from the server has the scheme {split.scheme[:20]!r}")
    if "@" in split.netloc:
        raise BadResponse("a URL from the server carries user information")
    if ip_literal(host) is None:
        last = host.rstrip(".").rpartition(".")[2]
        if not _NAME.fullmatch(host) or _NUMERIC_LABEL.fullmatch(last):
            raise BadResponse(f"a URL from the server has an unusable host {host[:80]!r}")
    target = split.path or "/"
    if split.query:
        target += f"?{split.query}"
    return Url(Origin(split.scheme, host, _PORTS[split.scheme] if port is None else port), target)


def is_plain_allowed(origin: Origin, plain_http: frozenset[str]) -> bool:
    """Whether plain HTTP may be spoken to an origin: its `host[:port]` is on the list, exactly."""
    return origin.authority in plain_http or f"{origin.authority}:{origin.port}" in plain_http


def check_next(current: Origin, following: Url, plain_http: frozenset[str]) -> None:
    """Refuse a redirect or location that downgrades, or leads to a metadata service.

    Raises PlainHTTPRefused or UnsafeRedirect. Whether credentials go along is the caller's business: only
    when the origin is the same.
    """
    target = following.origin
    if target == current:
        return
    if target.scheme == "http":
        if current.scheme == "https":
            raise UnsafeRedirect(
                f"{current} sends us to plain HTTP at {target}",
                next_step="fix the registry's external URL; a downgrade from TLS is never followed",
            )
        if not is_plain_allowed(target, plain_http):
            raise PlainHTTPRefused(
                f"{current} sends us to plain HTTP at {target}, which is not allowlisted",
                next_step=f"if that host is trusted, allow it: UNLADE_PLAIN_HTTP={target.authority}",
            )
    if target.is_metadata and target.host != current.host:
        raise UnsafeRedirect(
            f"{current} sends us to {target}, a link-local or metadata address",
            next_step="do not use this registry; report it to its operator",
        )
