"""A blob on its way: what a server says it sends, held against what was asked for.

Owns the checks that need no digest: status and Content-Range against the request, the declared length
against the descriptor, and the count of bytes against both. The digest itself is checked by `transfer`,
which also resumes. Invariant: a BlobStream never hands out more bytes than the descriptor promises, and
ends either after exactly those or with an error: `Truncated` (retryable: continue with a range) when the
connection ended early, `WrongContent` when the server means a body of another length.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Final, Self

from unlade.model import Descriptor
from unlade.registry.errors import BadResponse, Truncated, WrongContent
from unlade.registry.failures import naming
from unlade.registry.transport import Answer

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)


class BlobStream:
    """Bytes of a blob from `offset` up to `end`; a context manager. Not verified by digest."""

    def __init__(self, answer: Answer, offset: int, end: int, purpose: str) -> None:
        self.offset = offset
        self.end = end
        self.etag = answer.headers.get("ETag")
        self.source = answer.url.origin.authority
        self._answer = answer
        self._left = end - offset
        self._purpose = purpose

    def readinto(self, view: memoryview) -> int:
        """Fill (part of) the view; 0 at the end. Raises Truncated, WrongContent, Unreachable,
        DeadlineExceeded.
        """
        if not self._left:
            return 0
        with naming(self._purpose):
            got = self._answer.readinto(view[: self._left])
        if got:
            self._left -= got
            if not self._left:
                self._expect_end()
        elif len(view):
            self.close()
            if self._answer.framed:
                raise WrongContent(f"{self._purpose}: {self.source} sent {self._left} bytes too few")
            raise Truncated(f"{self._purpose}: {self.source} stopped {self._left} bytes early")
        return got

    def close(self) -> None:
        """Give the connection back; idempotent."""
        self._answer.close()

    def _expect_end(self) -> None:
        if self._answer.length is None and self._answer.readinto(memoryview(bytearray(1))):
            self.close()
            raise WrongContent(f"{self._purpose}: {self.source} sent more bytes than were promised")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def range_header(descriptor: Descriptor, offset: int, end: int) -> dict[str, str]:
    """The Range header for a part of a blob; empty for all of it."""
    if offset == 0 and end == descriptor.size:
        return {}
    return {"Range": f"bytes={offset}-{'' if end == descriptor.size else end - 1}"}


def accept(answer: Answer, descriptor: Descriptor, offset: int, end: int, purpose: str) -> BlobStream:
    """Hold an answer of 200 or 206 against the request; closes it and raises where they disagree.

    A 200 to a ranged request is the whole blob: the stream then starts at 0.
    """
    try:
        if answer.status == 206:
            _check_range(answer, descriptor, offset, end, purpose)
        else:
            offset, end = 0, descriptor.size
        if answer.length is not None and answer.length != end - offset:
            raise WrongContent(
                f"{purpose}: {answer.url.redacted} sends {answer.length} bytes, {end - offset} were promised",
                next_step="the registry or a cache in front of it is wrong; try another mirror",
            )
    except BaseException:
        answer.close()
        raise
    return BlobStream(answer, offset, end, purpose)


def _check_range(answer: Answer, descriptor: Descriptor, offset: int, end: int, purpose: str) -> None:
    if not range_header(descriptor, offset, end):
        raise BadResponse(f"{purpose}: {answer.url.redacted} sent a part where the whole was asked for")
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if match is None:
        raise BadResponse(f"{purpose}: {answer.url.redacted} sent a part without saying which")
    total = descriptor.size if match[3] == "*" else int(match[3])
    if (int(match[1]), int(match[2]) + 1, total) != (offset, end, descriptor.size):
        raise WrongContent(
            f"{purpose}: {answer.url.redacted} sent {match[0]} where bytes {offset}-{end - 1} of "
            f"{descriptor.size} were asked for",
            next_step="the registry or a cache in front of it is wrong; try another mirror",
        )
