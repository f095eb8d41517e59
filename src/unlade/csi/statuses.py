"""Our errors as gRPC statuses: one table, used once per call.

The kubelet copies the message into an event of the pod (FailedMount), so it says what happened and what to
do next (V15), on one line and short enough that the event keeps the next step. The code matters to the
kubelet too: after one that is final it forgets the volume, after the others (deadline, unavailable,
exhausted, aborted) it asks us to unpublish before it lets go of the pod.
"""

from __future__ import annotations

from typing import Final

import grpc

from unlade.errors import (
    DeadlineExceeded,
    IntegrityError,
    InvalidInput,
    MountError,
    NothingProduced,
    RegistryError,
    StoreError,
    UnladeError,
    UnsafeArchive,
    one_line,
)
from unlade.registry import NotFound, RateLimited, Unauthorized
from unlade.store import NoSpace


class Busy(UnladeError):
    """So much is going on that this must wait; the caller comes again."""

    code = "busy"
    retryable = True


class Overtaken(UnladeError):
    """Another call for the same volume came in between."""

    code = "overtaken"
    retryable = True


class NoSuchVolume(UnladeError):
    """A volume that is not here."""

    code = "no-such-volume"


class AlreadyPublished(UnladeError):
    """The volume is there, as something else."""

    code = "already-published"


class NotServed(UnladeError):
    """What this driver was not started with, or does not do to such a volume."""

    code = "not-served"


# Errors of the driver's own rooms by their code, which is stable; a room need not be imported to be known.
CODES: Final[dict[str, grpc.StatusCode]] = {
    "no-such-volume": grpc.StatusCode.NOT_FOUND,
    "no-such-snapshot": grpc.StatusCode.NOT_FOUND,
    "volume-conflict": grpc.StatusCode.ALREADY_EXISTS,
    "volume-in-use": grpc.StatusCode.FAILED_PRECONDITION,
    "no-room": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "size-out-of-range": grpc.StatusCode.OUT_OF_RANGE,
    "bad-token": grpc.StatusCode.ABORTED,
    # What the external provisioner takes for "ask another node".
    "not-this-node": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "overtaken": grpc.StatusCode.ABORTED,
    "already-published": grpc.StatusCode.ALREADY_EXISTS,
    "not-served": grpc.StatusCode.FAILED_PRECONDITION,
    "containerd-unavailable": grpc.StatusCode.UNAVAILABLE,
    "containerd-invisible": grpc.StatusCode.FAILED_PRECONDITION,
    "snapshotter-unsupported": grpc.StatusCode.FAILED_PRECONDITION,
}
# Most specific first: the first class that an error is an instance of decides.
STATUSES: Final[tuple[tuple[type[UnladeError], grpc.StatusCode], ...]] = (
    (NothingProduced, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthorized, grpc.StatusCode.PERMISSION_DENIED),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (RateLimited, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RegistryError, grpc.StatusCode.UNAVAILABLE),
    (IntegrityError, grpc.StatusCode.DATA_LOSS),
    (UnsafeArchive, grpc.StatusCode.FAILED_PRECONDITION),
    (NoSpace, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (StoreError, grpc.StatusCode.INTERNAL),
    (MountError, grpc.StatusCode.INTERNAL),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnladeError, grpc.StatusCode.UNKNOWN),
)
# An event's message holds 1024 bytes, and the kubelet puts the volume's name and the code before ours.
_WHAT: Final = 600
_NEXT: Final = 200


def status(error: UnladeError) -> grpc.StatusCode:
    """The status code of an error."""
    if error.code in CODES:
        return CODES[error.code]
    return next(code for kind, code in STATUSES if isinstance(error, kind))


def message(error: UnladeError) -> str:
    """What happened, then the next step: one line."""
    return one_line(error, what=_WHAT, next_step=_NEXT)
