"""Our errors as gRPC statuses: one table, used once per call.

The kubelet copies the message into an event of the pod, so it says what happened and what to do next
(V15), on one line and short enough that the event keeps the next step.
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
# An event's message holds 1024 bytes, and the kubelet puts the reference before ours, twice.
_WHAT: Final = 500
_NEXT: Final = 200


def status(error: UnladeError) -> grpc.StatusCode:
    """The status code of an error."""
    return next(code for kind, code in STATUSES if isinstance(error, kind))


def message(error: UnladeError) -> str:
    """What happened, then the next step: one line."""
    return one_line(error, what=_WHAT, next_step=_NEXT)
