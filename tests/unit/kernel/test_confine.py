"""What a process gives up: each call on its own, in a child, because none can be undone."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from unlade.kernel import confine


def in_child(work: Callable[[], object]) -> str:
    """What it returned or raised, as text."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            theirs.send(repr(work()).encode())
        except BaseException as error:
            theirs.send(type(error).__name__.encode())
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        answer = ours.recv(1000).decode()
    os.waitpid(pid, 0)
    return answer


def status(field: str) -> str:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return line.split(":")[1].strip()
    raise AssertionError(field)


def test_no_new_privileges() -> None:
    assert in_child(lambda: (confine.no_new_privileges(), status("NoNewPrivs"))) == "(True, '1')"
    assert status("NoNewPrivs") == "0"


def test_no_network_keeps_the_user() -> None:
    def work() -> object:
        before = os.geteuid(), os.getegid()
        took = confine.no_network()
        interfaces = [
            line.split(":")[0].strip() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]
        ]
        return (os.geteuid(), os.getegid()) == before, not took or interfaces == ["lo"]

    assert in_child(work) == "(True, True)"


def test_landlock_leaves_what_is_open(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").write_text("already open")

    def work() -> object:
        kept = os.open(tmp_path / "out", os.O_RDONLY)
        directory = os.open(tmp_path / "in", os.O_RDONLY | os.O_DIRECTORY)
        confine.no_new_privileges()
        if confine.only_beneath(directory) == 0:
            return "no landlock here"
        os.mkdir("d", dir_fd=directory)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=directory))
        os.link("f", "d/g", src_dir_fd=directory, dst_dir_fd=directory)
        try:
            os.open(tmp_path / "out", os.O_RDONLY)
        except PermissionError:
            return os.read(kept, 100)
        return "opened again"

    assert in_child(work) in ("b'already open'", "'no landlock here'")


@pytest.mark.root
def test_root_at(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")

    def work() -> object:
        directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        return confine.root_at(directory), os.listdir("/"), os.path.exists("/etc")

    assert in_child(work) == "(True, ['f'], False)"


@pytest.mark.root
def test_capabilities_are_dropped_and_never_gained() -> None:
    def work() -> object:
        assert confine.keep_capabilities(frozenset({confine.CAP_CHOWN, confine.CAP_FOWNER}))
        assert confine.keep_capabilities(frozenset({confine.CAP_CHOWN, confine.CAP_SYS_ADMIN}))
        return int(status("CapEff"), 16), int(status("CapPrm"), 16), int(status("CapInh"), 16)

    assert in_child(work) == "(1, 1, 0)"


def test_limits_only_go_down() -> None:
    def work() -> object:
        confine.limit(memory=64 << 20, file_size=1000, descriptors=50)
        confine.limit(memory=1 << 40, file_size=1 << 40, descriptors=5000)
        return (
            resource.getrlimit(resource.RLIMIT_CORE)[0],
            resource.getrlimit(resource.RLIMIT_FSIZE)[0],
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )

    assert in_child(work) == "(0, 1000, 50)"

    def greedy() -> object:
        confine.limit(memory=64 << 20, file_size=1000, descriptors=50)
        return len(bytearray(200 << 20))

    assert in_child(greedy) == "MemoryError"


def test_dying_with_the_parent() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            confine.die_with_parent(signal.SIGKILL)
            os.write(writing, b"ready")
            signal.pause()
        os.read(reading, 5)
        os._exit(0)  # and the grandchild with it
    os.close(writing)
    os.waitpid(pid, 0)
    assert os.read(reading, 1) == b""  # the end of the pipe: nobody is left to write
    os.close(reading)
