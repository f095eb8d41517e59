"""The work queue: no key twice at once, failures later and later."""

import threading
import time

from unlade.controllers.workqueue import MOST_RETRY, RETRY_BURST, WorkQueue


def test_a_key_added_twice_runs_once() -> None:
    queue = WorkQueue()
    for key in ("a", "b", "a", "a"):
        queue.add(key)
    assert len(queue) == 2
    assert [queue.get(0), queue.get(0), queue.get(0)] == ["a", "b", None]


def test_a_key_added_while_it_runs_runs_again_after_and_never_beside() -> None:
    queue = WorkQueue()
    queue.add("a")
    assert queue.get(0) == "a"
    queue.add("a")
    assert queue.get(0) is None
    queue.done("a")
    assert queue.get(0) == "a"
    queue.done("a")
    assert queue.get(0) is None


def test_a_later_key_comes_when_its_time_has_come_and_the_earlier_request_wins() -> None:
    now = [100.0]
    queue = WorkQueue(clock=lambda: now[0])
    queue.add_after("a", 10)
    queue.add_after("a", 5)
    queue.add_after("a", 60)
    assert queue.get(0) is None
    now[0] += 5
    assert queue.get(0) == "a"
    queue.done("a")
    now[0] += 100
    assert queue.get(0) is None


def test_failures_pause_twice_as_long_each_time_until_forgotten() -> None:
    now = [100.0]
    queue = WorkQueue(clock=lambda: now[0])
    pauses = [queue.retry("a") for _ in range(20)]
    assert pauses[:4] == [0.005, 0.01, 0.02, 0.04]
    assert pauses[-1] == MOST_RETRY
    assert queue.failing == 1
    queue.forget("a")
    assert queue.failing == 0
    assert queue.retry("a") == 0.005


def test_ten_thousand_failing_keys_do_not_drown_the_rest() -> None:
    now = [100.0]
    queue = WorkQueue(clock=lambda: now[0])
    pauses = [queue.retry(str(key)) for key in range(RETRY_BURST + 100)]
    assert max(pauses[:RETRY_BURST]) == 0.005
    assert 9 < pauses[-1] <= 10.1


def test_a_worker_that_sleeps_is_woken_by_an_earlier_time() -> None:
    queue = WorkQueue()
    queue.add_after("late", 30)
    got: list[str | None] = []
    worker = threading.Thread(target=lambda: got.append(queue.get(5)))
    worker.start()
    time.sleep(0.05)
    queue.add_after("soon", 0.05)
    worker.join(4)
    assert got == ["soon"]


def test_each_key_is_with_one_worker_only_however_many_there_are() -> None:
    queue = WorkQueue()
    busy: dict[str, int] = {}
    worst = [0]
    runs = [0]
    lock = threading.Lock()

    def work() -> None:
        while (key := queue.get()) is not None:
            with lock:
                busy[key] = busy.get(key, 0) + 1
                worst[0] = max(worst[0], busy[key])
                runs[0] += 1
            time.sleep(0.001)
            with lock:
                busy[key] -= 1
            queue.done(key)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for number in range(400):
        queue.add(f"key-{number % 5}")
        if number % 50 == 0:
            time.sleep(0.005)
    while len(queue):
        time.sleep(0.005)
    time.sleep(0.05)
    queue.close()
    for worker in workers:
        worker.join(5)
    assert worst[0] == 1
    assert runs[0] >= 5
    assert not any(busy.values())


def test_closing_wakes_everybody() -> None:
    queue = WorkQueue()
    got: list[str | None] = []
    workers = [threading.Thread(target=lambda: got.append(queue.get())) for _ in range(3)]
    for worker in workers:
        worker.start()
    queue.close()
    for worker in workers:
        worker.join(5)
    assert got == [None, None, None]
    queue.add("a")
    assert queue.get(0) is None
