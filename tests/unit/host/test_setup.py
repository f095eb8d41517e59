"""Install, upgrade, rollback, uninstall in a directory: steps, order, and what a failure takes back (V21)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes import systemctl
from unlade.cli import main
from unlade.errors import InvalidInput
from unlade.host import setup, units
from unlade.host.bundle import Bundle
from unlade.host.errors import HostError
from unlade.host.setup import Version, Wanted
from unlade.host.steps import Await, Host, carry_out
from unlade.kernel import failpoints

PREFIX = "/opt/unlade"
UNIT = "/etc/systemd/system/unlade-node.service"
DROP_IN = "/etc/kubernetes/kubelet.conf.d/50-unlade.conf"


class Running(Host):
    """A directory that plays the running host; systemctl is the stand-in."""

    @property
    def live(self) -> bool:
        return True


def bundle(tmp_path: Path, version: str, program: str = "") -> Bundle:
    """A bundle whose program waits, as a service does, after it told systemd that it is ready."""
    sources = tmp_path / f"sources-{version}"
    sources.mkdir(exist_ok=True)
    (sources / "empty").write_text(f"version = {version!r}\n")
    (sources / "cli").write_text(program or SERVICE)
    files = {"unlade/__init__.py": sources / "empty", "unlade/cli.py": sources / "cli"}
    return Bundle(version, os.path.realpath(sys.executable), files)


SERVICE = """
import os, signal, socket, sys

def main():
    if "--help" in sys.argv:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.connect(os.environ["NOTIFY_SOCKET"].replace("@", chr(0)))
    told.send(b"READY=1")
    signal.pause()
"""


def everything(root: Path) -> dict[str, str]:
    """Every file and link below a directory, bytecode aside."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(root))] = f"-> {path.readlink()}"
        elif path.is_file() and "__pycache__" not in path.parts:
            found[str(path.relative_to(root))] = path.read_text()
    return found


def put(host: Host, one: Bundle, **wanted: object) -> list[str]:
    """Install; the steps."""
    told: list[str] = []
    steps = setup.install(host, Wanted(**wanted), one, answers=lambda _socket: "")  # type: ignore[arg-type]
    carry_out(steps, host, told.append)
    return told


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


@pytest.fixture
def running(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name, value in systemctl.put_on_path(tmp_path, root).items():
        monkeypatch.setenv(name, value)
    host = Running(root)
    yield host
    host.systemctl("stop", units.UNIT)


def test_into_an_image_that_is_built(tmp_path: Path, root: Path) -> None:
    host = Host(root)
    first = bundle(tmp_path, "1.0")
    version = Version(("--handler", "vm=linux/arm64"), socket="/run/x.sock")
    steps = put(host, first, version=version)
    assert steps[0] == f"copy this installation to {PREFIX}/{first.name}"
    assert not [step for step in steps if "systemctl" in step]
    found = everything(root)
    assert found["opt/unlade/current"] == f"-> {first.name}"
    assert found[f"opt/unlade/{first.name}/bin/unlade"].startswith(f"#!{first.python} -IS\n")
    assert "imageServiceEndpoint: unix:///run/x.sock\n" in found[DROP_IN[1:]]
    assert "serve --handler vm=linux/arm64\n" in found[UNIT[1:]]
    for target in ("multi-user.target", "kubelet.service"):
        link = root / f"etc/systemd/system/{target}.wants/unlade-node.service"
        assert link.resolve() == root / UNIT[1:]
    told = json.loads(found[f"opt/unlade/{first.name}/bundle.json"])
    assert (told["version"], told["digest"].removeprefix("sha256:")[:12]) == ("1.0", first.name[4:])
    assert put(host, first) == []
    assert everything(root) == found
    carry_out(setup.uninstall(host), host, lambda _line: None)
    assert everything(root) == {}
    assert setup.uninstall(host) == []


def test_upgrades_keep_options_and_the_version_before(tmp_path: Path, root: Path) -> None:
    host = Host(root)
    one, two, three = (bundle(tmp_path, version) for version in ("1.0", "1.1", "1.2"))
    put(host, one, version=Version(("--parallel-pulls", "3")))
    put(host, two)
    assert "--parallel-pulls 3\n" in everything(root)[UNIT[1:]]
    put(host, two, version=Version(("--parallel-pulls", "4")))
    there = setup.installed(host)
    assert (there.current, there.previous) == (two.name, one.name)
    carry_out(setup.rollback(host, Wanted(), answers=lambda _socket: ""), host, lambda _line: None)
    there = setup.installed(host)
    assert (there.current, there.previous) == (one.name, two.name)
    assert "--parallel-pulls 3\n" in everything(root)[UNIT[1:]]
    put(host, three)
    assert sorted(path.name for path in (root / "opt/unlade").iterdir() if path.is_dir()) == sorted(
        [one.name, three.name, "current", "previous"]
    )


def test_one_version_built_twice_is_two(tmp_path: Path) -> None:
    first = bundle(tmp_path, "1.0")
    name = first.name
    assert bundle(tmp_path, "1.0").name == name
    assert bundle(tmp_path, "1.0", SERVICE + "\n# another build\n").name != name


def test_nothing_to_go_back_to(tmp_path: Path, root: Path) -> None:
    put(Host(root), bundle(tmp_path, "1.0"))
    with pytest.raises(InvalidInput, match="no version before"):
        setup.rollback(Host(root), Wanted(), answers=lambda _socket: "")


def test_on_a_running_host(tmp_path: Path, root: Path, running: Running) -> None:
    one, two = bundle(tmp_path, "1.0"), bundle(tmp_path, "1.1")
    steps = put(running, one)
    order = [step for step in steps if "systemctl" in step or "see that" in step or "kubelet.conf.d" in step]
    assert order == [
        "systemctl daemon-reload",
        "systemctl restart unlade-node.service",
        "see that /run/unlade/image.sock answers",
        f"write {DROP_IN}",
        "systemctl try-restart kubelet.service",
    ]
    assert running.active(units.UNIT)
    assert put(running, one) == []
    steps = put(running, two)
    assert [step for step in steps if "systemctl" in step] == ["systemctl restart unlade-node.service"]
    survey = setup.survey(running, PREFIX, answers=lambda _socket: "")
    assert (survey["current"], survey["previous"], survey["problems"]) == (two.name, one.name, [])
    assert survey["unit"] == {
        "name": units.UNIT,
        "path": UNIT,
        "installed": True,
        "enabled": True,
        "active": "active",
        "pid": survey["unit"]["pid"],
    }
    before = len(systemctl.calls(tmp_path))
    carry_out(setup.uninstall(running), running, lambda _line: None)
    assert systemctl.calls(tmp_path)[before:] == [
        "try-restart kubelet.service",
        "stop unlade-node.service",
        "daemon-reload",
    ]
    assert everything(root) == {}
    problems = setup.survey(running, PREFIX, answers=lambda _socket: "no socket")["problems"]
    assert problems == [
        "nothing is installed in /opt/unlade",
        "unlade-node.service is inactive",
        "/run/unlade/image.sock: no socket",
    ]


def test_a_first_install_that_fails_leaves_nothing(tmp_path: Path, root: Path, running: Running) -> None:
    broken = bundle(tmp_path, "1.0", "import sys\ndef main():\n    '--help' in sys.argv or sys.exit(3)\n")
    with pytest.raises(HostError, match=r"systemctl restart unlade-node.service.* failed"):
        put(running, broken)
    assert everything(root) == {}
    assert not (root / "etc/systemd").exists()


def test_an_uninstall_that_fails_leaves_it_running(tmp_path: Path, root: Path, running: Running) -> None:
    put(running, bundle(tmp_path, "1.0"))
    before = everything(root)
    steps = setup.uninstall(running)
    at = next(number for number, step in enumerate(steps) if step.describe() == "systemctl daemon-reload")

    def fails() -> str:
        return "the disk is full"

    told: list[str] = []
    with pytest.raises(HostError, match="the disk is full"):
        carry_out([*steps[:at], Await("it goes on", fails), *steps[at:]], running, told.append)
    assert everything(root) == before
    assert running.active(units.UNIT)
    assert told[-1] == "taking back: systemctl restart unlade-node.service"


def test_an_interrupt_is_taken_back_too(tmp_path: Path, root: Path, running: Running) -> None:
    def interrupted(_socket: str) -> str:
        raise KeyboardInterrupt

    steps = setup.install(running, Wanted(), bundle(tmp_path, "1.0"), answers=interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry_out(steps, running, lambda _line: None)
    assert everything(root) == {}
    assert not running.active(units.UNIT)


@contextmanager
def kubelet(tmp_path: Path, *arguments: str) -> Iterator[None]:
    """A process with a kubelet's command line, run by something else than our systemd."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", *arguments])
    try:
        with systemctl.Elsewhere(tmp_path, "kubelet.service", restart=lambda: None, pid=lambda: process.pid):
            yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("why", ["does not start", "is not whole", "does not answer"])
def test_an_upgrade_that_fails_runs_the_version_before(
    tmp_path: Path, root: Path, running: Running, why: str
) -> None:
    put(running, bundle(tmp_path, "1.0"))
    before = everything(root)
    program = {
        "does not start": "import sys\ndef main():\n    '--help' in sys.argv or sys.exit(3)\n",
        "is not whole": "import nothing_of_this_name\n",
        "does not answer": SERVICE,
    }[why]
    steps = setup.install(
        running, Wanted(), bundle(tmp_path, "1.1", program), answers=lambda _socket: "UNAVAILABLE"
    )
    told: list[str] = []
    with pytest.raises(HostError) as failed:
        carry_out(steps, running, told.append)
    assert failed.value.next_step
    assert everything(root) == before
    assert running.active(units.UNIT)
    assert not any("try-restart kubelet" in line for line in told)


def test_a_kubelet_that_reads_no_drop_ins(tmp_path: Path, root: Path, running: Running) -> None:
    """Refused before anything is changed; told otherwise, the kubelet is left alone."""
    one = bundle(tmp_path, "1.0")
    with kubelet(tmp_path, "--config=/none"):
        with pytest.raises(InvalidInput, match="not told to read drop-ins") as refused:
            put(running, one)
        assert "--config-dir=/etc/kubernetes/kubelet.conf.d" in refused.value.next_step
        assert everything(root) == {}
        put(running, one, leave_kubelet=True)
        assert DROP_IN[1:] not in everything(root)
    with (
        kubelet(
            tmp_path, "--config-dir=/etc/kubernetes/kubelet.conf.d", "--image-service-endpoint=unix:///x"
        ),
        pytest.raises(InvalidInput, match="wins over every file"),
    ):
        put(running, one)
    with kubelet(tmp_path, "--config-dir", "/etc/mine.d/"):
        put(running, one)
        assert "etc/mine.d/50-unlade.conf" in everything(root)


def test_a_kubelet_that_was_told_elsewhere_is_not_left_without_its_service(
    tmp_path: Path, root: Path, running: Running
) -> None:
    put(running, bundle(tmp_path, "1.0"), leave_kubelet=True)
    config = tmp_path / "kubelet.yaml"
    config.write_text("kind: KubeletConfiguration\nimageServiceEndpoint: unix:///run/unlade/image.sock\n")
    with kubelet(tmp_path, "--config", str(config)):
        with pytest.raises(InvalidInput, match=r"kubelet\.yaml makes the kubelet use"):
            setup.uninstall(running)
        survey = setup.survey(running, PREFIX, answers=lambda _socket: "")
        assert survey["kubelet"]["source"] == str(config)
        assert survey["kubelet"]["ours"]


@pytest.mark.parametrize("mounts", [False, True])
def test_systemd_accepts_the_unit(tmp_path: Path, root: Path, mounts: bool) -> None:
    """Every key is known to systemd, the program is there, and what `enable` would make is made."""
    arguments = ("--handler", "vm=linux/arm64", "--certs-dir", '/a b/%c$d"\\')
    put(Host(root), bundle(tmp_path, "1.0"), version=Version(arguments, mounts=mounts))
    # What is mounted for the kubelet must not stay in a mount namespace of the service's own.
    assert ("ProtectSystem=" not in everything(root)[UNIT[1:]]) is mounts
    shutil.copytree("/usr/lib/systemd/system", root / "usr/lib/systemd/system", symlinks=True)
    for words, expected in (
        (["systemd-analyze", "verify", f"--root={root}", units.UNIT], ""),
        (["systemctl", f"--root={root}", "is-enabled", units.UNIT], "enabled\n"),
    ):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


KILLED = """
import sys
from pathlib import Path
from tests.unit.host.test_setup import Host, bundle, put
place, version = Path(sys.argv[1]), sys.argv[2]
put(Host(place / "root"), bundle(place, version))
"""


@pytest.mark.parametrize(
    "point", ["host.bundle.filled", "host.step.done:1", "host.file.written:4", "host.step.done:6"]
)
def test_a_killed_install_is_ended_by_the_next(tmp_path: Path, root: Path, point: str) -> None:
    """First an install, then an upgrade; whatever is there meanwhile is whole."""
    assert point.partition(":")[0] in failpoints.names()
    other = tmp_path / "clean"
    other.mkdir()
    for version in ("1.0", "1.1"):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, tmp_path, version],
            env={**os.environ, failpoints.VARIABLE: point, "PYTHONPATH": str(Path(__file__).parents[3])},
            check=False,
        )
        killed = done.returncode == -signal.SIGKILL
        assert killed or version == "1.1"  # an upgrade has fewer steps
        if (root / "opt/unlade/current").is_symlink():
            assert (root / "opt/unlade/current/bin/unlade").exists()
            assert (root / "opt/unlade/current/bundle.json").exists()
        put(Host(root), bundle(tmp_path, version))
        put(Host(other), bundle(tmp_path, version))
        assert everything(root) == everything(other)
    carry_out(setup.uninstall(Host(root)), Host(root), lambda _line: None)
    assert everything(root) == {}


def test_two_at_once_are_refused(root: Path) -> None:
    with Host(root).alone(), pytest.raises(HostError, match="under way"), Host(root).alone():
        pass


def test_the_command(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into an image's tree, with the real installation; options are read before anything is made."""

    def unlade(*words: str, expect: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["node", *words, *(() if "--" in words else ("--root", str(root)))])
        out, err = capsys.readouterr()
        assert ended.value.code == expect, err
        return out + err

    assert "No such option" in unlade("install", "--root", str(root), "--", "--no-such", expect=2)
    planned = unlade("install", "--dry-run", "--root", str(root), "--", "--parallel-pulls", "3")
    assert everything(root) == {}
    assert "nothing was changed" in planned
    assert "next: " in unlade("install", "--rollback", expect=3)
    told = json.loads(unlade("status", "-o", "json", expect=1))
    assert told["problems"] == ["nothing is installed in /opt/unlade"]
    assert "nothing to do" in unlade("uninstall")
    put(Host(root), bundle(tmp_path, "1.0"), version=Version(("--grace", "7"), grace=7.0))
    table = unlade("status")
    assert "--grace 7" in table
    assert "TimeoutStopSec=17\n" in everything(root)[UNIT[1:]]
