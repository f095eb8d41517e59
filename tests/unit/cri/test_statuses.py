"""Errors as statuses: the one table, and the words that reach the pod's event (V15)."""

from __future__ import annotations

import grpc
import pytest

from unlade import errors
from unlade.containerd import UnknownHandler
from unlade.cri.statuses import STATUSES, message, status
from unlade.registry import NotFound, Unauthorized, Unreachable
from unlade.store import NoSpace


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownHandler("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NothingProduced("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (NotFound("x", status=404), grpc.StatusCode.NOT_FOUND),
        (Unauthorized("x", status=401), grpc.StatusCode.PERMISSION_DENIED),
        (Unreachable("x"), grpc.StatusCode.UNAVAILABLE),
        (NoSpace("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.MergeConflict("x"), grpc.StatusCode.UNKNOWN),
    ],
)
def test_codes(error: errors.UnladeError, code: grpc.StatusCode) -> None:
    assert status(error) == code


def test_no_row_of_the_table_hides_a_later_one() -> None:
    kinds = [kind for kind, _ in STATUSES]
    for number, kind in enumerate(kinds):
        assert not any(issubclass(kind, earlier) for earlier in kinds[:number]), kind


def test_the_event_keeps_the_next_step() -> None:
    assert message(errors.InvalidInput("what")) == "what"
    long = errors.InvalidInput("x\n\x1b[31m" * 1000, next_step="do this")
    assert message(long).endswith("…; next: do this")
    assert len(message(long)) < 800
    assert message(long).isprintable()
