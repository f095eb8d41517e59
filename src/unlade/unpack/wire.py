"""What the pool and its worker process say to each other.

A request is one message with descriptors attached (SCM_RIGHTS): the archive, the directory, the socket for
the answer, and the file list where one is wanted. An answer is a result, or an error by its code. The
worker has read hostile bytes: its answers are bounded and checked like anything else from outside.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from unlade.errors import (
    DeadlineExceeded,
    IntegrityError,
    InvalidInput,
    StoreError,
    UnladeError,
    UnsafeArchive,
)
from unlade.unpack import refusals
from unlade.unpack.policy import Unpacked, UnpackPolicy

_LENGTH: Final = struct.Struct("!I")
_MAX_MESSAGE: Final = 256 << 20  # Limits.max_noted_bytes of names as base64, several times over
_MAX_DESCRIPTORS: Final = 4

_ERRORS: Final[dict[str, type[UnladeError]]] = {
    error.code: error
    for error in (
        DeadlineExceeded,
        IntegrityError,
        InvalidInput,
        StoreError,
        UnsafeArchive,
        refusals.UnsafeName,
        refusals.UnsafeLink,
        refusals.UnsupportedEntry,
        refusals.MalformedArchive,
        refusals.LimitExceeded,
        refusals.CorruptStream,
        refusals.CannotWrite,
    )
}


class Job(msgspec.Struct, frozen=True):
    """A request: unpack what comes with it, or (without a policy) end the job of that number."""

    number: int
    policy: UnpackPolicy | None = None
    seconds: float | None = None  # left until the deadline
    files: bool = False  # whether a descriptor for the file list comes along


_JOB = msgspec.json.Decoder(Job)


class Failure(msgspec.Struct, frozen=True):
    """An error on its way between processes."""

    code: str
    message: str
    next_step: str
    retryable: bool


class Answer(msgspec.Struct, frozen=True):
    """Exactly one of the two."""

    unpacked: Unpacked | None = None
    failure: Failure | None = None


_ANSWER = msgspec.json.Decoder(Answer)


def failure_of(error: BaseException) -> Failure:
    """Pack an error; what is not ours becomes a worker's death with its type in the message."""
    if isinstance(error, MemoryError):
        error = refusals.LimitExceeded("the archive needs more memory than a worker is granted")
    if isinstance(error, UnladeError) and error.code in _ERRORS:
        return Failure(error.code, error.message[:4096], error.next_step[:1024], error.retryable)
    text = f"the unpack process failed: {type(error).__name__}: {error}"
    step = "this is a defect of unlade; please report it"
    return Failure(refusals.WorkerDied.code, text[:4096], step, retryable=False)


def error_of(failure: Failure) -> UnladeError:
    """The error that was packed."""
    kind = _ERRORS.get(failure.code, refusals.WorkerDied)
    return kind(failure.message, next_step=failure.next_step, retryable=failure.retryable)


def send(to: socket.socket, message: Job | Answer, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message; the descriptors ride on its first byte and stay open here."""
    data = msgspec.json.encode(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    head = _LENGTH.pack(len(data))
    sent = to.sendmsg([head], rights)
    if sent < len(head):
        to.sendall(head[sent:])
    to.sendall(data)


def receive_job(source: socket.socket) -> tuple[Job, list[int]] | None:
    """The next request and its descriptors, which the caller closes; None when the other side is gone."""
    size = array.array("i").itemsize
    head, ancillary, _, _ = source.recvmsg(_LENGTH.size, socket.CMSG_SPACE(_MAX_DESCRIPTORS * size))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % size])
    for fd in descriptors:
        os.set_inheritable(fd, False)
    body = _rest(source, head)
    return None if body is None else (_JOB.decode(body), list(descriptors))


def receive_answer(source: socket.socket) -> Answer | None:
    """An answer; None when the worker ended without one. Raises WorkerDied for one that makes no sense."""
    body = _rest(source, b"")
    if body is None:
        return None
    try:
        answer = _ANSWER.decode(body)
    except msgspec.MsgspecError as error:
        raise refusals.WorkerDied(f"the unpack process gave a broken answer: {error}") from error
    if answer.unpacked is not None:
        for name in _names(answer.unpacked):
            if name.startswith(b"/") or b"\0" in name or not {b"", b".", b".."}.isdisjoint(name.split(b"/")):
                raise refusals.WorkerDied("the unpack process named a path outside its directory")
    return answer


def _names(unpacked: Unpacked) -> Iterator[bytes]:
    yield from unpacked.whiteouts
    yield from (name for name in unpacked.opaques if name)
    yield from (name for name in unpacked.implicit_dirs if name)
    yield from unpacked.skipped
    for pair in unpacked.pending_links:
        yield from pair


def _rest(source: socket.socket, head: bytes) -> bytes | None:
    while len(head) < _LENGTH.size:
        more = source.recv(_LENGTH.size - len(head))
        if not more:
            return None
        head += more
    length = _LENGTH.unpack(head)[0]
    if length > _MAX_MESSAGE:
        raise refusals.WorkerDied("the unpack process gave an answer without end")
    parts = []
    while length:
        part = source.recv(min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
