"""Jobs that outlive their calls: joined, bounded, forgotten, and never handed to the wrong credentials."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from unlade.csi import fetching
from unlade.csi.fetching import Fetches, Job, StillFetching
from unlade.csi.holding import Holder
from unlade.csi.observed import Metrics
from unlade.csi.statuses import Busy
from unlade.delivery import Delivered
from unlade.errors import DeadlineExceeded, StoreError
from unlade.model import Digest
from unlade.transfer import ProgressEvent

DONE = cast("Delivered", object())


def fetches(**options: Any) -> Fetches:
    return Fetches(cast("Holder", None), Metrics(), **{"parallel": 2, **options})


def ask(made: Fetches, key: str, work: Any, seconds: float | None = 10.0) -> Delivered:
    return made.ask(key, f"artifact {key}", work, seconds=seconds, alive=lambda: True)


def test_a_second_call_joins_the_first() -> None:
    made, go_on, runs = fetches(), threading.Event(), []

    def work(job: Job) -> Delivered:
        runs.append(job)
        go_on.wait(10)
        return DONE

    with pytest.raises(StillFetching, match="still fetching artifact a"):
        ask(made, "a", work, seconds=0.05)
    go_on.set()
    assert ask(made, "a", work) is DONE
    assert len(runs) == 1
    assert ask(made, "a", work) is DONE
    assert len(runs) == 2, "a result is handed out once"


def test_an_error_that_nobody_waited_for_is_told_once() -> None:
    made, go_on, runs = fetches(), threading.Event(), []

    def fails(job: Job) -> Delivered:
        runs.append(job)
        go_on.wait(10)
        raise StoreError("broken")

    with pytest.raises(StillFetching):
        ask(made, "a", fails, seconds=0.05)
    go_on.set()
    runs[0].done.wait(10)
    with pytest.raises(StoreError, match="broken"):
        ask(made, "a", lambda _: DONE)
    assert ask(made, "a", lambda _: DONE) is DONE


def test_an_error_of_ours_ends_its_job_alone(caplog: pytest.LogCaptureFixture) -> None:
    made = fetches()
    with pytest.raises(ZeroDivisionError):
        ask(made, "a", lambda _: 1 / 0)
    assert "fetching artifact a" in caplog.text
    assert ask(made, "a", lambda _: DONE) is DONE


def test_too_many_are_sent_away_and_cancelled_ones_make_room() -> None:
    made = fetches(parallel=1, waiting=1)

    def until_cancelled(job: Job) -> Delivered:
        while True:
            job.deadline.wait(5.0)

    for key in ("a", "b"):
        with pytest.raises(StillFetching):
            ask(made, key, until_cancelled, seconds=0.05)
    with pytest.raises(Busy, match="2 volumes"):
        ask(made, "c", lambda _: DONE)
    made.cancel("a")
    assert ask(made, "c", lambda _: DONE) is DONE
    made.cancel("never-begun")
    made.close()


def test_a_caller_that_is_gone_is_not_waited_for() -> None:
    made, go_on = fetches(), threading.Event()

    def work(_: Job) -> Delivered:
        go_on.wait(10)
        return DONE

    with pytest.raises(StillFetching):
        made.ask("a", "artifact", work, seconds=None, alive=lambda: False)
    go_on.set()
    assert ask(made, "a", work) is DONE


def test_progress_is_told_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("model")
    assert "waiting" in job.still().message
    job.total = 4_000_000_000
    job.watch(ProgressEvent("bytes", "model", Digest.of(b"a"), 1_500_000_000, 4_000_000_000))
    assert "1.5 GB of 4.0 GB" in job.still().message
    job.watch(ProgressEvent("bytes", "model", Digest.of(b"b"), 999, 4_000_000_000))
    job.deadline.check()
    # Nobody asked for a long time: the pod is gone, and so is the reason to go on.
    monkeypatch.setattr(fetching, "_ABANDONED", 0.0)
    time.sleep(0.01)
    job.watch(ProgressEvent("bytes", "model", Digest.of(b"b"), 1000, 4_000_000_000))
    with pytest.raises(DeadlineExceeded):
        job.deadline.check()


def test_results_that_nobody_comes_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made, jobs = fetches(parallel=1, waiting=0), []

    def work(job: Job) -> Delivered:
        jobs.append(job)
        time.sleep(0.1)
        return DONE

    with pytest.raises(StillFetching):
        ask(made, "a", work, seconds=0.02)
    jobs[0].done.wait(10)
    with pytest.raises(Busy):
        ask(made, "b", work)
    monkeypatch.setattr(fetching, "_ABANDONED", 0.0)
    assert ask(made, "b", work) is DONE
