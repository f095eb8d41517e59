"""Every error has a status that the kubelet acts on rightly, and a message that fits an event (V15)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc
import pytest

from unlade.csi import statuses
from unlade.csi.fetching import StillFetching
from unlade.csi.statuses import AlreadyPublished, Busy, NoSuchVolume, NotServed, Overtaken, message, status
from unlade.csi.writable import NoRoom, NoSuchSnapshot, SizeOutOfRange, VolumeConflict, VolumeInUse
from unlade.errors import InvalidInput, MountError, StoreError, UnladeError
from unlade.registry import NotFound, Unauthorized
from unlade.store import NoSpace

CODE = grpc.StatusCode
# After these the kubelet asks to unpublish before it lets go of the pod; after all others it forgets.
NOT_FINAL = {
    CODE.CANCELLED,
    CODE.DEADLINE_EXCEEDED,
    CODE.UNAVAILABLE,
    CODE.RESOURCE_EXHAUSTED,
    CODE.ABORTED,
}


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Busy, CODE.RESOURCE_EXHAUSTED),
        (Overtaken, CODE.ABORTED),
        (NoSuchVolume, CODE.NOT_FOUND),
        (AlreadyPublished, CODE.ALREADY_EXISTS),
        (NotServed, CODE.FAILED_PRECONDITION),
        (StillFetching, CODE.DEADLINE_EXCEEDED),
        (NoSuchSnapshot, CODE.NOT_FOUND),
        (VolumeConflict, CODE.ALREADY_EXISTS),
        (VolumeInUse, CODE.FAILED_PRECONDITION),
        (NoRoom, CODE.RESOURCE_EXHAUSTED),
        (SizeOutOfRange, CODE.OUT_OF_RANGE),
        (InvalidInput, CODE.INVALID_ARGUMENT),
        (partial(NotFound, status=404), CODE.NOT_FOUND),
        (partial(Unauthorized, status=401), CODE.PERMISSION_DENIED),
        (NoSpace, CODE.RESOURCE_EXHAUSTED),
        (StoreError, CODE.INTERNAL),
        (MountError, CODE.INTERNAL),
        (UnladeError, CODE.UNKNOWN),
    ],
)
def test_statuses(kind: Callable[[str], UnladeError], code: grpc.StatusCode) -> None:
    assert status(kind("what")) == code


def test_work_that_goes_on_is_not_final() -> None:
    for kind in (Busy, Overtaken, StillFetching):
        assert status(kind("what")) in NOT_FINAL


def test_a_message_is_one_short_line_that_ends_with_the_next_step() -> None:
    told = message(UnladeError("a\nb\x1b[31m" + "x" * 5000, next_step="y" * 5000))
    assert len(told) < 1000
    assert told.isprintable()
    assert "; next: yyy" in told
    assert message(UnladeError("short")) == "short"
    assert set(statuses.CODES) >= {Busy.code, Overtaken.code, NoSuchVolume.code}
