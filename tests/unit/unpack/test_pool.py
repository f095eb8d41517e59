"""Unpacking in worker processes: the same results and errors, and what a worker cannot do."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import pytest

from tests.fakes.tars import Tar, gz, zst
from unlade.errors import DeadlineExceeded
from unlade.kernel import confine
from unlade.model import Deadline, DiffID, Digest
from unlade.unpack import Unpacked, UnpackPolicy, UnsafeName, WorkerDied, WorkerPool, wire, worker
from unlade.unpack.filelist import final
from unlade.unpack.policy import Limits

ARTIFACT = UnpackPolicy(rules="artifact")


@pytest.fixture(params=["spawn", "fork"])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    if request.param == "fork":
        _be_single_threaded()
    with WorkerPool(2, start=request.param) as made:
        yield made


def run(
    pool: WorkerPool, archive: bytes, directory: Path, policy: UnpackPolicy = ARTIFACT, **options: object
) -> Unpacked:
    with tempfile.TemporaryFile() as file:
        file.write(archive)
        file.seek(0)
        dirfd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return pool.unpack(file.fileno(), dirfd, policy, **options).result()  # type: ignore[arg-type]
        finally:
            os.close(dirfd)


@pytest.mark.parametrize("compress", [bytes, gz, zst])
def test_results_are_those_of_the_library(
    pool: WorkerPool, tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    tar = Tar().file(b"a/f", b"x" * 300_000).symlink(b"l", b"a/f").link(b"h", b"lower").file(b".wh.gone")
    with tempfile.TemporaryFile() as files_out:
        result = run(pool, compress(bytes(tar)), tmp_path, UnpackPolicy("image"), files_out=files_out)
        files_out.seek(0)
        records = final(files_out)
    assert (tmp_path / "a/f").read_bytes() == b"x" * 300_000
    assert (result.entries, result.bytes, result.whiteouts) == (4, 300_000, (b"gone",))
    assert result.pending_links == ((b"h", b"lower"),)
    assert records[b"a/f"].size == 300_000


def test_errors_keep_their_type_and_text(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(UnsafeName, match=r"contains '\.\.' \(entry '\.\./x\\udcff'\)") as caught:
        run(pool, bytes(Tar().file(b"../x\xff")), tmp_path)
    assert caught.value.code == "unsafe-name"


def test_many_at_once_from_many_threads(pool: WorkerPool, tmp_path: Path) -> None:
    results: list[int] = []

    def one(number: int) -> None:
        place = tmp_path / str(number)
        place.mkdir()
        results.append(run(pool, gz(bytes(Tar().file(b"f", b"%d" % number))), place).entries)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1] * 12
    assert [(tmp_path / str(n) / "f").read_text() for n in range(12)] == [str(n) for n in range(12)]


def test_an_expired_deadline_kills_the_worker(pool: WorkerPool, tmp_path: Path) -> None:
    reading, writing = os.pipe()  # never written: the worker waits for ever
    dirfd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    started = time.monotonic()
    answer = pool.unpack(reading, dirfd, ARTIFACT, deadline=Deadline.after(0.3))
    os.close(reading)
    os.close(dirfd)
    with pytest.raises(DeadlineExceeded):
        answer.result()
    assert time.monotonic() - started < 10
    with pytest.raises(BrokenPipeError):  # nobody holds the other end any more
        for _ in range(100):
            os.write(writing, b"x")
            time.sleep(0.02)
    os.close(writing)


def test_cancelling_ends_the_wait(pool: WorkerPool, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    dirfd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    deadline = Deadline.never()
    answer = pool.unpack(reading, dirfd, ARTIFACT, deadline=deadline)
    os.close(reading)
    os.close(dirfd)
    deadline.cancel()
    with pytest.raises(DeadlineExceeded):
        answer.result(timeout=10)
    os.close(writing)


def test_no_descriptor_is_left_open(pool: WorkerPool, tmp_path: Path) -> None:
    run(pool, bytes(Tar().file(b"warm")), tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    run(pool, bytes(Tar().file(b"f")), tmp_path)
    with pytest.raises(UnsafeName):
        run(pool, bytes(Tar().file(b"../x")), tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= before


def _be_single_threaded() -> None:
    # In Python's view only: the runner's own watchdog is a thread of C, which a fork leaves behind unharmed.
    if threading.active_count() > 1:
        pytest.skip("this process has threads: it must not be forked")


def children_of(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                state, parent = stat.rpartition(")")[2].split()[:2]
                if int(parent) == pid and state != "Z":
                    found.append(int(entry))
    return found


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_a_dead_worker_is_a_typed_error_and_the_next_one_lives(
    start: Literal["spawn", "fork"], tmp_path: Path
) -> None:
    if start == "fork":
        _be_single_threaded()
    before = set(children_of(os.getpid()))
    with WorkerPool(1, start=start) as pool:
        reading, writing = os.pipe()
        dirfd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        answer = pool.unpack(reading, dirfd, ARTIFACT)
        os.close(reading)
        os.close(dirfd)
        server = _wait_for(lambda: [pid for pid in children_of(os.getpid()) if pid not in before])[0]
        os.kill(_wait_for(lambda: children_of(server))[0], signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            answer.result(timeout=10)
        assert caught.value.retryable
        os.close(writing)
        assert run(pool, bytes(Tar().file(b"f")), tmp_path).entries == 1
        os.kill(server, signal.SIGKILL)  # the server itself: a fresh one is started
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        assert run(pool, bytes(Tar().file(b"g")), tmp_path).entries == 1
    assert set(children_of(os.getpid())) == before


def _wait_for(find: Callable[[], list[int]]) -> list[int]:
    end = time.monotonic() + 10
    while not (found := find()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def test_a_closed_pool_takes_no_more(tmp_path: Path) -> None:
    pool = WorkerPool(1, start="spawn")
    pool.close()
    pool.close()
    with pytest.raises((WorkerDied, RuntimeError)):
        run(pool, bytes(Tar().file(b"f")), tmp_path)


# What the worker has given up -------------------------------------------------------------------------


def confined(tmp_path: Path, attempt: Callable[[], object], policy: UnpackPolicy = ARTIFACT) -> str:
    """Run something in a child that has been confined like a worker; what it raised, or 'allowed'."""
    ours, theirs = socket.socketpair()
    inside = tmp_path / "inside"
    inside.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            directory = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
            confine.no_new_privileges()
            confine.no_network()
            worker._confine(directory, policy)
            os.fchdir(directory)
            attempt()
            theirs.send(b"allowed")
        except BaseException as error:
            theirs.send(type(error).__name__.encode())
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        os.waitpid(pid, 0)
        return ours.recv(100).decode()


def _touch(path: Path | str) -> Callable[[], object]:
    return lambda: os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


@pytest.mark.skipif(sys.platform != "linux", reason="landlock and namespaces are Linux's")
class TestConfinement:
    def test_only_its_directory(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("x")
        assert confined(tmp_path, _touch("file")) == "allowed"
        assert confined(tmp_path, lambda: os.mkdir("dir")) == "allowed"
        # Out of reach by landlock, or not there at all where the worker could make its directory the root.
        closed = ("PermissionError", "FileNotFoundError")
        assert confined(tmp_path, _touch(tmp_path / "elsewhere")) in closed
        assert confined(tmp_path, lambda: os.open(tmp_path / "secret", os.O_RDONLY)) in closed
        assert confined(tmp_path, lambda: os.open("/etc/passwd", os.O_RDONLY)) in closed
        assert confined(tmp_path, lambda: os.open("../secret", os.O_RDONLY)) in closed
        assert confined(tmp_path, lambda: os.listdir("/proc")) in closed
        assert sorted(os.listdir(tmp_path)) == ["inside", "secret"]

    def test_no_network(self, tmp_path: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            address = listener.getsockname()
            reached = confined(tmp_path, lambda: socket.socket().connect(address))
        assert reached in ("OSError", "PermissionError", "ConnectionRefusedError")
        assert reached != "allowed"

    @pytest.mark.root
    def test_no_socket_of_the_host(self, tmp_path: Path) -> None:
        """containerd's socket, say: a network namespace alone does not hide it."""
        name = str(tmp_path / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen()

            def connect() -> None:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(name)

            assert confined(tmp_path, connect) == "FileNotFoundError"

    def test_no_program_is_run(self, tmp_path: Path) -> None:
        (tmp_path / "inside").mkdir()
        (tmp_path / "inside/program").write_text("#!/bin/sh\n")
        (tmp_path / "inside/program").chmod(0o755)
        assert confined(tmp_path, lambda: os.execv("/bin/true", ["true"])) != "allowed"
        assert confined(tmp_path, lambda: os.execv("program", ["program"])) == "PermissionError"

    def test_memory_and_files_are_bounded(self, tmp_path: Path) -> None:
        assert confined(tmp_path, lambda: bytearray(1 << 30)) == "MemoryError"
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        small = UnpackPolicy("artifact", limits=Limits(max_bytes=1000))
        too_much = lambda: os.truncate(os.open("f", os.O_RDWR | os.O_CREAT), 5000)  # noqa: E731
        assert confined(tmp_path, too_much, small) == "OSError"

    @pytest.mark.root
    def test_capabilities(self, tmp_path: Path) -> None:
        assert confined(tmp_path, lambda: os.chroot(".")) == "PermissionError"
        assert confined(tmp_path, lambda: os.setuid(1)) == "PermissionError"

        def chown() -> None:
            _touch("file")()
            os.chown("file", 5, 6)

        assert confined(tmp_path, chown) == "allowed"


@pytest.mark.root
def test_without_root(tmp_path: Path) -> None:
    """The pool as an ordinary user: files are that user's, in the list too."""
    place = tmp_path / "place"
    place.mkdir()
    os.chown(place, 65534, 65534)
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as archive:
        archive.write(gz(bytes(Tar().file(b"d/f", b"x", uid=5).dir(b"ro", mode=0o555).file(b"ro/g"))))
        archive.seek(0)
        pid = os.fork()
        if pid == 0:
            try:
                dirfd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                theirs.send(_as_user(archive, dirfd))
            except BaseException as error:
                theirs.send(repr(error).encode())
            finally:
                os._exit(0)
    theirs.close()
    with ours:
        assert ours.recv(1000).decode() == "3 65534"
    os.waitpid(pid, 0)
    assert (place / "d/f").stat().st_uid == 65534
    assert (place / "ro").stat().st_mode & 0o777 == 0o555


def _as_user(archive: BinaryIO, dirfd: int) -> bytes:
    with tempfile.TemporaryFile(dir=None) as files_out, WorkerPool(1, start="fork") as pool:
        result = pool.unpack(archive.fileno(), dirfd, ARTIFACT, files_out=files_out).result()
        files_out.seek(0)
        return b"%d %d" % (result.entries, final(files_out)[b"d/f"].uid)


# What an answer may say -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"../x", b"/x", b"a//b", b"a/./b", b"a\0b", b".."])
def test_names_from_the_worker_are_checked(name: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        forged = Unpacked(0, 0, DiffID(Digest.of(b"")), whiteouts=(name,))
        wire.send(theirs, wire.Answer(unpacked=forged))
        with pytest.raises(WorkerDied):
            wire.receive_answer(ours)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\x02{}"[:5] + b"]", b"\0\0\0\x05nonsense"])
def test_nonsense_from_the_worker_is_a_dead_worker(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(data)
        with pytest.raises(WorkerDied):
            wire.receive_answer(ours)


def test_errors_that_are_not_ours_say_what_they_are() -> None:
    assert wire.error_of(wire.failure_of(MemoryError())).code == "limit-exceeded"
    failed = wire.error_of(wire.failure_of(ZeroDivisionError("oops")))
    assert isinstance(failed, WorkerDied)
    assert "ZeroDivisionError: oops" in str(failed)
    assert not failed.retryable
