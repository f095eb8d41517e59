"""From an answer that is not what was asked for to the error that says so.

Reads the registry's error document (distribution-spec, "Error Codes") within a cap, keeps its codes, and
shows its texts with control characters removed: they end on terminals and in events. Closes the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from unlade.errors import RegistryError
from unlade.registry.errors import (
    BadResponse,
    HTTPFailure,
    NotFound,
    RateLimited,
    Unauthorized,
    Unavailable,
    UnsafeRedirect,
)
from unlade.registry.retry import parse_retry_after
from unlade.registry.transport import Answer

# Error documents are short; a page of HTML from a proxy is longer and says nothing.
_MAX_ERROR_BODY: Final = 64 << 10
_CODE: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}", re.ASCII)
_UNPRINTABLE: Final = re.compile(r"[^ -~]+")
_AGAIN: Final = frozenset({408, 425, 500, 502, 503, 504})


class _Entry(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Document(msgspec.Struct):
    errors: list[_Entry] = []


_DOCUMENT = msgspec.json.Decoder(_Document)


@contextmanager
def naming(purpose: str) -> Iterator[None]:
    """Errors that pass say what was being done, and to which reference (V15)."""
    try:
        yield
    except RegistryError as error:
        if not error.message.startswith(purpose):
            error.message = f"{purpose}: {error.message}"
        raise


def failure(answer: Answer, purpose: str, *, registry: str) -> RegistryError:
    """The error for an unexpected status. `purpose` names the reference and what was being done."""
    status = answer.status
    retry_after = parse_retry_after(answer.headers.get("Retry-After"))
    codes, text = _explain(answer)
    url = answer.url.redacted
    reason = f"HTTP {status}" + (f" {', '.join(codes)}" if codes else "") + (f": {text}" if text else "")
    message = f"{purpose}: {reason} ({url})"
    if status in (401, 403):
        return Unauthorized(
            message,
            status=status,
            codes=codes,
            url=url,
            next_step=f"log in with `unlade login {registry}`, or check that the account may do this",
        )
    if status == 404:
        return NotFound(
            message,
            status=status,
            codes=codes,
            url=url,
            next_step="check the name and the tag; a private repository may look missing without credentials",
        )
    if status == 429:
        return RateLimited(
            message,
            status=status,
            codes=codes,
            url=url,
            retry_after=retry_after,
            next_step="wait, log in for a higher limit, or use a mirror",
        )
    if status in _AGAIN:
        return Unavailable(
            message, status=status, codes=codes, url=url, retry_after=retry_after, next_step="try again later"
        )
    if 300 <= status < 400:
        return UnsafeRedirect(
            f"{message}: a redirect that is not followed", next_step="correct the registry's URL"
        )
    if status < 400:
        return BadResponse(f"{message}: not a status for this request")
    return HTTPFailure(
        message,
        status=status,
        codes=codes,
        url=url,
        next_step="see what the registry says about this request",
    )


def _explain(answer: Answer) -> tuple[tuple[str, ...], str]:
    """Codes and texts of the error document; nothing when there is none to read."""
    try:
        raw = answer.read(_MAX_ERROR_BODY)
        document = _DOCUMENT.decode(raw) if raw else _Document()
    except (RegistryError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return (), ""
    finally:
        answer.close()
    entries = document.errors[:5]
    codes = tuple(entry.code for entry in entries if _CODE.fullmatch(entry.code))
    text = "; ".join(entry.message for entry in entries if entry.message)
    return codes, _UNPRINTABLE.sub(" ", text)[:300]
