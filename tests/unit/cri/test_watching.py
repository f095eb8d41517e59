"""`unlade top` and events of pods: what they say of a pull, and when (V18)."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.cri.test_pulls import ONE, Clock, event, request
from unlade.cli import main
from unlade.cli.node_events import RecordedEvents
from unlade.cli.top import duration, row
from unlade.cri.announcing import Announcer, message
from unlade.cri.observed import Metrics
from unlade.cri.pulls import Pod, Pull, Pulls
from unlade.cri.watching import Unseen, Watch, ask, shown


@pytest.fixture
def pulls() -> Pulls:
    return Pulls(Metrics())


@pytest.fixture
def watch(tmp_path: Path, pulls: Pulls) -> Iterator[Path]:
    watch = Watch(tmp_path, lambda: shown(pulls.states(), "1.2.3"))
    yield tmp_path / "pulls.sock"
    watch.close()


def test_root_alone_is_answered(watch: Path, pulls: Pulls) -> None:
    assert stat.S_IMODE(watch.stat().st_mode) == 0o600
    assert ask(watch).pulls == ()
    with pulls.begin(request("vm")) as pull:
        pull(event("start", ONE, 0, 4096))
        told = ask(watch)
        assert (told.version, told.pid) == ("1.2.3", os.getpid())
        [one] = told.pulls
        assert one.pod is not None
        assert (one.reference, one.pod.name, one.handler) == ("registry.example.com/m:v1", "web", "vm")
        assert (one.phase, one.done_bytes, one.total_bytes) == ("fetch", 0, 4096)


def test_a_second_service_takes_the_socket_over(tmp_path: Path, watch: Path, pulls: Pulls) -> None:
    second = Watch(tmp_path, lambda: shown((), "2.0"))
    try:
        assert ask(watch).version == "2.0"
    finally:
        second.close()
    with pytest.raises(Unseen):
        ask(watch, seconds=1)


def test_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--once", "--state", str(tmp_path)])
    assert ended.value.code == 13
    assert "next: start it" in capsys.readouterr().err


def test_top_once(watch: Path, pulls: Pulls, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["top", "--once", "--state", str(watch.parent)]
    with pulls.begin(request()) as pull:
        pull(event("bytes", ONE, 1 << 20, 4 << 20))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        head, line = capsys.readouterr().out.splitlines()
        assert head.split() == [
            "REFERENCE",
            "POD",
            "HANDLER",
            "PHASE",
            "DONE",
            "OF",
            "%",
            "RATE",
            "LEFT",
            "TIME",
        ]
        assert line.split() == [
            "registry.example.com/m:v1",
            "team/web",
            "-",
            "fetch",
            "1.0",
            "MiB",
            "4.0",
            "MiB",
            "25",
            "-",
            "-",
            "0s",
        ]
        with pytest.raises(SystemExit):
            main([*arguments, "-o", "json"])
        [one] = json.loads(capsys.readouterr().out)["pulls"]
        assert (one["doneBytes"], one["totalBytes"], one["pod"]["namespace"]) == (1 << 20, 4 << 20, "team")


def test_top_without_a_terminal_writes_lines(
    watch: Path, pulls: Pulls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def enough(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", enough)
    with pulls.begin(request()), pytest.raises(SystemExit) as ended:
        main(["top", "--state", str(watch.parent)])
    assert ended.value.code == 130
    assert "registry.example.com/m:v1  team/web  wait  - of - (- %)" in capsys.readouterr().out


def test_top_on_a_terminal_draws_a_table(watch: Path, pulls: Pulls) -> None:
    """Drawn anew while it runs; Ctrl-C ends it and gives the screen back."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "unlade", "top", "--interval", "0.1", "--state", str(watch.parent)]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown_text = b""
    try:
        with pulls.begin(request()) as pull:
            for done in (1 << 20, 2 << 20):
                pull(event("bytes", ONE, done, 4 << 20))
                while f"{done >> 20}.0 MiB".encode() not in shown_text:
                    assert select.select([leader], [], [], 30)[0], shown_text
                    shown_text += os.read(leader, 65536)
        while b"nothing is pulled" not in shown_text:
            assert select.select([leader], [], [], 30)[0], shown_text
            shown_text += os.read(leader, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert b"team/web" in shown_text


def test_rows_of_long_pulls(pulls: Pulls) -> None:
    assert [duration(seconds) for seconds in (0.4, 61, 7500)] == ["0s", "1m01s", "2h05m"]
    clock = Clock()
    pull = Pull(1, request(), clock=clock)
    pull(event("start", ONE, 0, 8 << 30))
    clock.now += 100
    pull(event("bytes", ONE, 1 << 30, 8 << 30))
    clock.now += 5
    pull(event("bytes", ONE, 2 << 30, 8 << 30))
    [shown_pull] = shown([pull.state()], "").pulls
    assert row(shown_pull)[3:] == ("fetch", "2.0 GiB", "8.0 GiB", "25", "204.8 MiB/s", "30s", "1m45s")


class Told:
    """Events, kept."""

    def __init__(self) -> None:
        self.events: list[tuple[Pod, str, str]] = []

    def tell(self, pod: Pod, reason: str, message: str) -> None:
        self.events.append((pod, reason, message))


def test_events_come_late_and_seldom() -> None:
    clock, told = Clock(), Told()
    pulls = Pulls(Metrics(), clock=clock)
    announcer = Announcer(pulls, told, clock=clock)
    with pulls.begin(request()) as pull, pulls.begin(request(pod="")):
        pull(event("start", ONE, 0, 4 << 20))
        for _second in range(80):
            clock.now += 1
            pull(event("bytes", ONE, 1 << 20, 4 << 20))
            announcer.look()
    announcer.look()
    # After 15, 45 and 75 seconds; nothing for a pull without a pod, nothing once it ended.
    assert [pod.name for pod, _, _ in told.events] == ["web"] * 3
    assert told.events[0][1:] == (
        "PullProgress",
        "registry.example.com/m:v1: fetching, 1.0 MiB of 4.0 MiB (25 %), 15 s so far",
    )


def test_what_an_event_says() -> None:
    clock = Clock()
    pull = Pull(1, request(), clock=clock)
    clock.now += 20
    assert message(pull.state()) == "registry.example.com/m:v1: waiting for its turn, 20 s so far"
    pull(event("start", ONE, 0, 8 << 30))
    clock.now += 8
    pull(event("bytes", ONE, 1 << 30, 8 << 30))
    assert message(pull.state()).endswith("fetching, 1.0 GiB of 8.0 GiB (12 %), 128.0 MiB/s, about 56 s left")


def test_an_event_that_fails_is_only_an_event_less(caplog: pytest.LogCaptureFixture) -> None:
    pulls, looked = Pulls(Metrics()), threading.Event()

    class Broken:
        def tell(self, pod: Pod, reason: str, message: str) -> None:
            looked.set()
            raise RuntimeError("broken")

    announcer = Announcer(pulls, Broken(), after=0.01)
    with pulls.begin(request()):
        announcer.start()
        assert looked.wait(5)
        announcer.close()
    assert "progress was not told" in caplog.text


def test_a_kubeconfig_that_is_not_there_yet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("kubernetes")
    events = RecordedEvents(str(tmp_path / "kubelet.conf"))
    tell: Callable[[], None] = lambda: events.tell(Pod("n", "p", "u"), "PullProgress", "words")  # noqa: E731
    tell()
    tell()
    events.close()
    assert caplog.text.count("no events of pods") == 1
