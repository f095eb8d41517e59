"""`WorkerPool`: archives are unpacked in processes that can do nothing else.

One server process per pool (see `worker`) forks a child for each archive; this side hands over descriptors
and waits for the answer. The server is forked from this process when that is safe, which costs about a
millisecond, and started afresh otherwise: a process with threads is never forked. A server that died is
started again with the next archive. Deadlines hold here too: a child that does not come back is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

from unlade.model.deadline import Deadline
from unlade.unpack import wire
from unlade.unpack.policy import UnpackPolicy
from unlade.unpack.refusals import WorkerDied

if TYPE_CHECKING:
    from unlade.unpack.policy import Unpacked

# How soon a cancelled deadline is noticed while waiting for an answer.
_PATIENCE: Final = 0.1
# Without site: the worker needs our packages, found by the path this process has, and nothing else at start.
_SPAWN: Final = "import sys; sys.path[:] = sys.argv[2:]; from unlade.unpack.worker import main; main()"

Start = Literal["auto", "fork", "spawn"]


class WorkerPool:
    """Unpacks up to `max_workers` archives at once; thread-safe; `close` ends the processes."""

    def __init__(self, max_workers: int, *, start: Start = "auto") -> None:
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="unlade-worker")
        self._lock = threading.Lock()
        self._numbers = 0
        self._closed = False
        # Forking is possible now, while there are no threads, or never: do not wait for the first archive.
        self._server: _Server | None = None
        if start == "fork" or (start == "auto" and _single_threaded()):
            self._server = _Server.fork()

    def unpack(
        self,
        source_fd: int,
        dirfd: int,
        policy: UnpackPolicy,
        *,
        files_out: BinaryIO | None = None,
        deadline: Deadline | None = None,
    ) -> Future[Unpacked]:
        """Unpack the archive read from a descriptor; the future raises what `unpack` does, or WorkerDied.

        The descriptors are duplicated before this returns: the caller may close its own at once.
        `files_out` must be a real file; it is written at its current position.
        """
        descriptors = [os.dup(source_fd), os.dup(dirfd)]
        if files_out is not None:
            files_out.flush()
            descriptors.append(os.dup(files_out.fileno()))
        try:
            return self._threads.submit(self._run, descriptors, policy, deadline or Deadline.never())
        except BaseException:
            _close_all(descriptors)
            raise

    def close(self) -> None:
        """End the server and whatever it still runs (their futures raise WorkerDied); idempotent."""
        with self._lock:
            self._closed = True
            if self._server is not None:
                self._server.end()
                self._server = None
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, descriptors: list[int], policy: UnpackPolicy, deadline: Deadline) -> Unpacked:
        ours, theirs = socket.socketpair()
        try:
            with ours:
                try:
                    with theirs:
                        deadline.check()
                        server, number = self._submit(descriptors, theirs, policy, deadline)
                finally:
                    # Ours must go, or the sender at the other end of the pipe would never see it break.
                    _close_all(descriptors)
                    descriptors.clear()
                answer = _wait(ours, server, number, deadline)
        finally:
            _close_all(descriptors)
        if answer is None:
            raise WorkerDied(
                "the unpack process ended without an answer",
                next_step="try again; see the kernel's log if it repeats",
            )
        if answer.unpacked is not None:
            return answer.unpacked
        if answer.failure is None:
            raise WorkerDied("the unpack process gave an empty answer")
        raise wire.error_of(answer.failure)

    def _submit(
        self, descriptors: list[int], reply: socket.socket, policy: UnpackPolicy, deadline: Deadline
    ) -> tuple[_Server, int]:
        source, directory, *files = descriptors
        with self._lock:
            if self._closed:
                raise WorkerDied("the worker pool is closed", retryable=False)
            self._numbers += 1
            job = wire.Job(self._numbers, policy, deadline.remaining(), files=bool(files))
            sent = (source, directory, reply.fileno(), *files)
            problem: OSError | None = None
            for _ in range(2):
                try:
                    if self._server is None:
                        self._server = _Server.spawn()
                    self._server.send(job, sent)
                except OSError as error:
                    problem = error
                    if self._server is not None:
                        self._server.end()  # it died since; a fresh one gets the same job
                        self._server = None
                else:
                    return self._server, job.number
        raise WorkerDied(f"the unpack server cannot be started: {problem}") from problem


class _Server:
    """The process that forks workers, and our end of its control socket."""

    def __init__(self, control: socket.socket, pid: int, process: subprocess.Popen[bytes] | None) -> None:
        self._control = control
        self._pid = pid
        self._process = process
        self._lock = threading.Lock()

    @classmethod
    def fork(cls) -> _Server:
        """Fork this process; only while it has a single thread."""
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                _only_descriptor(theirs.detach(), 3)
                # Imported on this side of the fork, while the owner goes on to ask the registry.
                from unlade.unpack import worker

                worker.serve(socket.socket(fileno=3))
            finally:
                os._exit(1)
        theirs.close()
        return cls(ours, pid, None)

    @classmethod
    def spawn(cls) -> _Server:
        """Start a fresh interpreter."""
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-I", "-S", "-c", _SPAWN, str(number), *(p for p in sys.path if p)]
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=(number,))
        return cls(ours, process.pid, process)

    def send(self, job: wire.Job, descriptors: tuple[int, ...] = ()) -> None:
        """Hand over a request; raises OSError when the server is gone."""
        with self._lock:
            wire.send(self._control, job, descriptors)

    def kill(self, number: int) -> None:
        """End one job's child."""
        with contextlib.suppress(OSError):
            self.send(wire.Job(number))

    def end(self) -> None:
        """Close the socket, which ends the server and its children, and wait for it."""
        self._control.close()
        if self._process is not None:
            self._process.wait()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


def _wait(ours: socket.socket, server: _Server, number: int, deadline: Deadline) -> wire.Answer | None:
    ours.settimeout(_PATIENCE)
    while True:
        try:
            if not ours.recv(1, socket.MSG_PEEK):
                return None
            break
        except TimeoutError:
            if deadline.expired:
                server.kill(number)
                ours.settimeout(None)
                ours.recv(1, socket.MSG_PEEK)  # until it is gone: its staging is about to be removed
                deadline.check()
        except ConnectionResetError:
            return None
    ours.settimeout(None)
    return wire.receive_answer(ours)


def _single_threaded() -> bool:
    """Whether forking is sound: one thread, in the kernel's view too (C libraries start their own)."""
    if sys.platform != "linux":
        return False
    return len(os.listdir("/proc/self/task")) == 1


def _only_descriptor(fd: int, wanted: int) -> None:
    """Keep one descriptor, as number `wanted`; the standard ones lead nowhere from now on."""
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, wanted + 1)  # out of the way of the numbers below
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.dup2(high, wanted, inheritable=False)
    os.closerange(wanted + 1, os.sysconf("SC_OPEN_MAX"))


def _close_all(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
