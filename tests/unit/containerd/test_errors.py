"""gRPC's errors in our terms, and containerd's times."""

from __future__ import annotations

import time

import grpc
import pytest

from unlade.containerd import labels
from unlade.containerd.errors import (
    ContainerdError,
    ContainerdUnavailable,
    Exists,
    Missing,
    Refused,
    SnapshotterUnsupported,
    explained,
)
from unlade.errors import DeadlineExceeded, UnladeError
from unlade.store import NoSpace


class Failure(grpc.RpcError):  # type: ignore[misc]
    """As a call raises it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("code", "details", "kind", "retryable"),
    [
        ("NOT_FOUND", "no such lease", Missing, False),
        ("ALREADY_EXISTS", "there", Exists, False),
        ("FAILED_PRECONDITION", "cannot remove snapshot with child", Refused, False),
        ("UNAVAILABLE", "connection refused", ContainerdUnavailable, True),
        ("DEADLINE_EXCEEDED", "", DeadlineExceeded, True),
        ("UNKNOWN", "write /x: no space left on device", NoSpace, True),
        ("UNAVAILABLE", "disk quota exceeded", NoSpace, True),
        ("INVALID_ARGUMENT", "snapshotter not loaded: zfs: invalid argument", SnapshotterUnsupported, False),
        ("INTERNAL", "", ContainerdError, False),
    ],
)
def test_each_code_has_a_meaning(code: str, details: str, kind: type[UnladeError], retryable: bool) -> None:
    ours = explained("look for it", Failure(getattr(grpc.StatusCode, code), details))
    assert type(ours) is kind
    assert ours.message.startswith("cannot look for it: ")
    assert ours.next_step
    assert ours.retryable is retryable


def test_times_as_containerd_writes_and_reads_them() -> None:
    now = time.time()
    assert labels.expires(0) == "1970-01-01T00:00:00.000000Z"
    assert labels.has_expired({labels.GC_EXPIRE: labels.expires(now - 1)}, now)
    assert not labels.has_expired({labels.GC_EXPIRE: labels.expires(now + 1)}, now)
    assert not labels.has_expired({}, now)
    assert not labels.has_expired({labels.GC_EXPIRE: "tomorrow"}, now)
