"""Listings in pages (tags, referrers), followed by their Link headers (RFC 8288) and no further than a cap.

Invariant: the next page is at the same origin and the same path as the first, so a page cannot lead the
client, and its credentials, anywhere else; a page that was seen before, or one too many, ends the listing
with an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from unlade.registry.errors import BadResponse, TooManyPages
from unlade.registry.origins import Url, parse_url
from unlade.registry.transport import Document

# With pages of a thousand, a million entries: far beyond any repository that can be used.
MAX_PAGES: Final = 1000
_MAX_LINK: Final = 8 << 10
_LINK: Final = re.compile(r'<([^<>\s]*)>((?:\s*;\s*[A-Za-z*-]+(?:=(?:"[^"]*"|[^\s",;]*))?)*)', re.ASCII)
_NEXT: Final = re.compile(r';\s*rel="?next"?(?:\s*;|\s*$)', re.IGNORECASE | re.ASCII)


def pages(first: Url, fetch: Callable[[Url], Document], purpose: str) -> Iterator[Document]:
    """Each page, fetched as it is asked for; raises TooManyPages."""
    seen: set[str] = set()
    url: Url | None = first
    while url is not None:
        if len(seen) >= MAX_PAGES or url.target in seen:
            raise TooManyPages(
                f"{purpose}: the listing has no end",
                next_step="ask for something narrower, or report it to the registry's operator",
            )
        seen.add(url.target)
        page = fetch(url)
        yield page
        url = _next(page.headers.get("Link", ""), url, purpose)


def _next(unsafe_header: str, current: Url, purpose: str) -> Url | None:
    if len(unsafe_header) > _MAX_LINK:
        raise BadResponse(f"{purpose}: a Link header of {len(unsafe_header)} bytes")
    for target, parameters in _LINK.findall(unsafe_header):
        if _NEXT.search(parameters):
            url = parse_url(target, base=current)
            if url.origin != current.origin or _path(url) != _path(current):
                raise BadResponse(f"{purpose}: the next page is said to be elsewhere, at {url.redacted}")
            return url
    return None


def _path(url: Url) -> str:
    return url.target.partition("?")[0]
