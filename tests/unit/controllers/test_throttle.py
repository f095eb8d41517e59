"""The token bucket and the growing pause."""

import threading

from unlade.controllers.throttle import Backoff, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_free_and_what_follows_is_spaced() -> None:
    clock = Clock()
    bucket = TokenBucket(10, 3, clock=clock)
    assert [bucket.reserve() for _ in range(3)] == [0, 0, 0]
    assert [round(bucket.reserve(), 3) for _ in range(3)] == [0.1, 0.2, 0.3]
    clock.now += 0.3
    assert round(bucket.reserve(), 3) == 0.1


def test_an_idle_bucket_fills_to_its_burst_and_no_further() -> None:
    clock = Clock()
    bucket = TokenBucket(10, 2, clock=clock)
    clock.now += 3600
    assert [bucket.try_take() for _ in range(3)] == [True, True, False]
    clock.now += 0.1
    assert bucket.try_take()


def test_no_rate_means_no_limit() -> None:
    bucket = TokenBucket(0, 1)
    assert all(bucket.try_take() and bucket.reserve() == 0 for _ in range(100))


def test_a_stop_ends_the_wait() -> None:
    bucket = TokenBucket(0.001, 1)
    stop = threading.Event()
    assert bucket.wait(stop)
    threading.Timer(0.05, stop.set).start()
    assert not bucket.wait(stop)


def test_pauses_double_to_their_bound_and_start_over() -> None:
    backoff = Backoff(0.1, 0.5, draw=lambda: 1.0)
    assert [round(backoff.next(), 3) for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert round(backoff.next(), 3) == 0.1
    assert round(Backoff(0.1, 0.5, draw=lambda: 0.0).next(), 3) == 0.05
