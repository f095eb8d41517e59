"""The unpack process: parses hostile bytes, and can do nothing else (design, decision 5).

`serve` runs in a process of its own, which keeps everything imported and forks one child per archive. It
gives up the network and new privileges at once; each child then gives up the file system except for its
one directory, all capabilities it does not need, and memory beyond a limit, before it reads the first byte.
The child answers and exits; nothing of one archive is left for the next. The server stays single-threaded,
so forking it is sound whatever threads its owner has. When the owner goes away, so do all of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from typing import Final, NoReturn

from unlade.kernel import confine, files, memory
from unlade.model.deadline import Deadline
from unlade.unpack import wire, zstd
from unlade.unpack.archive import unpack
from unlade.unpack.policy import UnpackPolicy

# Imported elsewhere only when needed, which is too late for a child that may open no file.
_PREPARED: Final = (zstd,)

# Beyond what the process has at its start: the largest zstd window, the belts, and the names that
# Limits.max_noted_bytes allows, with Python's overhead for them.
_MEMORY: Final = 384 << 20
# Inflated blocks are a mebibyte, and a dozen are in flight.
_BLOCKS: Final = (4 << 20, 32 << 20)
_DESCRIPTORS: Final = 512  # the writer's open directories, a deep tree being removed, and a reserve

_FILE_CAPABILITIES: Final = frozenset(
    (confine.CAP_CHOWN, confine.CAP_DAC_OVERRIDE, confine.CAP_FOWNER, confine.CAP_FSETID, confine.CAP_MKNOD)
)


def serve(control: socket.socket) -> NoReturn:
    """Fork a child per request until the other side closes; never returns."""
    # An interrupt at the terminal is for the owner: it closes the socket when it gives up.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    confine.no_new_privileges()
    confine.no_network()
    memory.keep_freed(*_BLOCKS)
    children: dict[int, int] = {}  # pid -> job
    gc.freeze()  # what is imported stays: a child's collections need not write to pages it shares with us
    while True:
        ready, _, _ = select.select([control.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 512)
            _reap(children)
        if control.fileno() in ready:
            request = wire.receive_job(control)
            if request is None:
                break
            job, descriptors = request
            if job.policy is None:
                for pid in [pid for pid, number in children.items() if number == job.number]:
                    os.kill(pid, signal.SIGKILL)  # still ours to wait for, so the number is not reused
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.close(wake_read)
                os.close(wake_write)
                control.close()
                _child(job, job.policy, descriptors)
            children[pid] = job.number
            for fd in descriptors:
                os.close(fd)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _reap(children: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            children.pop(pid, None)


def _child(job: wire.Job, policy: UnpackPolicy, descriptors: list[int]) -> NoReturn:
    status = 1
    try:
        confine.die_with_parent(signal.SIGKILL)
        source, directory, reply, *rest = descriptors
        answers = socket.socket(fileno=reply)
        try:
            _confine(directory, policy)
            deadline = Deadline.never() if job.seconds is None else Deadline.after(job.seconds)
            files_out = os.fdopen(rest[0], "wb", buffering=0) if job.files else None
            unpacked = unpack(_Pipe(source), directory, policy, files_out=files_out, deadline=deadline)
            answer = wire.Answer(unpacked=unpacked)
        except BaseException as error:
            answer = wire.Answer(failure=wire.failure_of(error))
        wire.send(answers, answer)
        status = 0
    finally:
        os._exit(status)


def _confine(directory: int, policy: UnpackPolicy) -> None:
    wanted: set[int] = set()
    if os.geteuid() == 0:
        wanted |= _FILE_CAPABILITIES
        if policy.setid:
            wanted.add(confine.CAP_SETFCAP)
        if policy.whiteouts == "overlay" or policy.xattrs:
            wanted.add(confine.CAP_SYS_ADMIN)  # trusted.* attributes
    files.set_umask(0)  # modes are the archive's: nothing to take away, nothing to set twice
    confine.limit(memory=_MEMORY, file_size=policy.limits.max_bytes, descriptors=_DESCRIPTORS)
    confine.root_at(directory)
    confine.only_beneath(directory)
    confine.keep_capabilities(frozenset(wanted))


class _Pipe:
    """The archive's descriptor as a source."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def readinto(self, buffer: memoryview, /) -> int:
        return os.readv(self._fd, [buffer])


def main() -> NoReturn:
    """Serve on the descriptor whose number is the first argument (see `pool`)."""
    serve(socket.socket(fileno=int(sys.argv[1])))
