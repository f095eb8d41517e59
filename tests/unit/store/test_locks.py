"""One holder per name, among threads and processes, and none after a death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unlade.errors import DeadlineExceeded
from unlade.model import Deadline
from unlade.store.locks import KeyLocks, OwnerLock

HOLDER = """
import sys, time
from pathlib import Path
from unlade.store.locks import KeyLocks
with KeyLocks(Path(sys.argv[1])).hold("name"):
    print("held", flush=True)
    time.sleep(60)
"""

COUNTER = """
import sys
from pathlib import Path
from unlade.store.locks import KeyLocks
locks, counter = KeyLocks(Path(sys.argv[1])), Path(sys.argv[2])
for _ in range(50):
    with locks.hold("name"):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


def test_a_name_has_one_holder(tmp_path: Path) -> None:
    one, two = KeyLocks(tmp_path), KeyLocks(tmp_path)
    with one.hold("name"):
        with one.try_hold("name") as again:
            assert not again
        with two.try_hold("name") as other:
            assert not other
        with two.try_hold("another") as free:
            assert free
    with two.try_hold("name") as now:
        assert now
    assert os.listdir(tmp_path) == []


def test_waiting_can_be_cancelled(tmp_path: Path) -> None:
    one = KeyLocks(tmp_path)
    deadline = Deadline.never()
    with one.hold("name"):
        timer = threading.Timer(0.05, deadline.cancel)
        timer.start()
        with pytest.raises(DeadlineExceeded), one.hold("name", deadline=deadline):
            pass
        with pytest.raises(DeadlineExceeded), KeyLocks(tmp_path).hold("name", deadline=deadline):
            pass
        timer.join()
    with one.try_hold("name") as free:
        assert free


def test_a_death_releases(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with KeyLocks(tmp_path).try_hold("name") as held:
            assert not held
        holder.send_signal(signal.SIGKILL)
    with KeyLocks(tmp_path).hold("name", deadline=Deadline.after(5)):
        pass
    assert os.listdir(tmp_path) == []


def test_processes_exclude_each_other(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    locks = tmp_path / "locks"
    locks.mkdir()
    command = [sys.executable, "-c", COUNTER, str(locks), str(counter)]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(timeout=60) for process in running] == [0, 0, 0]
    assert counter.read_text() == "150"


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    locks = KeyLocks(tmp_path)
    total = [0]

    def count(_: int) -> None:
        with locks.hold("name"):
            before = total[0]
            os.sched_yield()
            total[0] = before + 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(400)))
    assert total == [400]


def test_an_owner_is_alive_until_it_closes(tmp_path: Path) -> None:
    owner = OwnerLock(tmp_path, "me")
    assert OwnerLock.alive(tmp_path, "me")
    owner.close()
    owner.close()
    assert not OwnerLock.alive(tmp_path, "me")
    (tmp_path / "dead").touch()
    assert not OwnerLock.alive(tmp_path, "dead")
