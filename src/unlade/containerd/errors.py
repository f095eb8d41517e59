"""What containerd answers when it does not do what was asked, in our own terms.

gRPC's exceptions stop here: `explained` turns each into one of ours, once, with the cause kept. NotFound,
AlreadyExists and FailedPrecondition have classes of their own because callers decide by them; the rest is
for people to read. A full disk is the store's NoSpace, as everywhere.
"""

from __future__ import annotations

from typing import Final

import grpc

from unlade.errors import DeadlineExceeded, InvalidInput, StoreError, UnladeError
from unlade.store import NoSpace

# How Go spells ENOSPC and EDQUOT: containerd passes the operating system's errors on as text.
_FULL: Final = ("no space left on device", "disk quota exceeded")

_NO_SNAPSHOTTER: Final = "snapshotter not loaded"


class ContainerdError(StoreError):
    """containerd refused, or failed."""

    code = "containerd"


class ContainerdUnavailable(ContainerdError):
    """containerd does not answer; it may be restarting."""

    code = "containerd-unavailable"
    retryable = True


class Missing(ContainerdError):
    """containerd has no such object."""

    code = "containerd-missing"


class Exists(ContainerdError):
    """containerd has such an object already."""

    code = "containerd-exists"


class Refused(ContainerdError):
    """The object is in a state that does not allow it: in use, or not what was expected."""

    code = "containerd-refused"


class SnapshotterUnsupported(ContainerdError):
    """A snapshotter whose snapshots are no plain directories, or that containerd does not have."""

    code = "snapshotter-unsupported"


class UnknownHandler(InvalidInput):
    """A runtime handler that the node's configuration does not name (R2)."""

    code = "unknown-handler"


_BY_CODE: Final[dict[grpc.StatusCode, type[ContainerdError]]] = {
    grpc.StatusCode.NOT_FOUND: Missing,
    grpc.StatusCode.ALREADY_EXISTS: Exists,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.UNAVAILABLE: ContainerdUnavailable,
}


def explained(what: str, error: grpc.RpcError) -> UnladeError:
    """Our error for one of gRPC's that came up while doing this; raise it `from` the other."""
    code, details = error.code(), error.details() or ""
    if any(text in details for text in _FULL):
        return NoSpace(f"cannot {what}: containerd's disk is full", next_step="free space, or remove images")
    if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return DeadlineExceeded(
            f"cannot {what}: containerd did not answer in time", next_step="try again; check containerd's log"
        )
    if code == grpc.StatusCode.INVALID_ARGUMENT and _NO_SNAPSHOTTER in details:
        return SnapshotterUnsupported(
            f"cannot {what}: containerd has no such snapshotter ({details})",
            next_step="correct the handler's snapshotter in the node's configuration",
        )
    kind = _BY_CODE.get(code, ContainerdError)
    step = "check that containerd runs" if kind is ContainerdUnavailable else "see containerd's log"
    return kind(f"cannot {what}: {details or code.name}", next_step=step)
