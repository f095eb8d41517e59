"""A rig leaves nothing behind: after `down`, after `kill -9` of its owner, after a failed start."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rig import RigError, state
from rig.cluster import Rig
from rig.inventory import traces
from rig.machine import Process
from rig.pods import Namespace
from rig.settings import Settings

ROOT = Path(__file__).resolve().parents[2]

# Makes a rig with a running pod, says so, and waits to be killed.
OWNER = """
import sys, time
from rig.cluster import Rig
from rig.machine import Process
from rig.pods import Namespace
rig = Rig.up(sys.argv[1])
namespace = Namespace(rig)
namespace.run("left-behind", volumes={"/scratch": {"emptyDir": {"medium": "Memory"}}}).wait_ready()
print("up", flush=True)
time.sleep(600)
"""


def _name(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(3)}"


def test_cycles_leave_nothing_behind(full: bool) -> None:
    # 20 in `make full`; CI samples.
    for _ in range(20 if full else 3):
        name = _name("cycle")
        with Rig.up(name) as rig:
            pod = Namespace(rig).run("once", command="echo ran")
            pod.wait("Succeeded")
            assert pod.logs() == "ran\n"
            Namespace(rig).run("still-running").wait_ready()
            during = traces(name)
            assert set(during) == {"process", "mount", "namespace", "link", "cgroup", "file"}
        assert traces(name) == {}


def test_next_start_removes_the_rig_of_a_killed_owner() -> None:
    name = _name("killed")
    # `python -c` looks for modules in the working directory first.
    owner = subprocess.Popen([sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    left = traces(name)
    assert any("kubelet" in process for process in left["process"])
    assert any("pause" in process for process in left["process"])
    assert left["mount"]

    with Rig.up(_name("next"), Settings(kubelets=False)):
        assert traces(name) == {}
        assert state.load(name) is None


def test_owner_killed_while_its_rig_starts(full: bool) -> None:
    # Moments of a start that takes some 8 s; what exists by then differs each time.
    for moment in (0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 6.0) if full else (0.5, 3.0):
        name = _name("early")
        owner = subprocess.Popen([sys.executable, "-c", OWNER, name], stdout=subprocess.DEVNULL, cwd=ROOT)
        time.sleep(moment)
        owner.kill()
        owner.wait()
        with state.lock():
            state.sweep()
        assert traces(name) == {}


def test_recorded_pid_that_belongs_to_another_process_is_not_touched() -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        record = state.claim(_name("reused"), owner=None)
        real = Process.of(bystander.pid)
        assert real is not None
        record.processes["kubelet-node1"] = Process(bystander.pid, real.started - 1)
        record.save()
        loaded = state.load(record.name)
        assert loaded is not None
        loaded.remove()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_two_rigs_run_at_once_and_go_apart() -> None:
    first, second = _name("first"), _name("second")
    with Rig.up(first) as one:
        with Rig.up(second) as other:
            assert one.control_plane.server != other.control_plane.server
            for rig in (one, other):
                Namespace(rig).run("pod", command="echo ran").wait("Succeeded")
        assert traces(second) == {}
        pod = Namespace(one).run("afterwards", command="echo ran")
        pod.wait("Succeeded")
        assert pod.logs() == "ran\n"
    assert traces(first) == {}


def test_failed_start_cleans_up_and_keeps_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNLADE_RIG_ARTIFACTS", str(tmp_path))
    name = _name("broken")
    with pytest.raises(RigError, match="kube-apiserver ended"):
        Rig.up(name, Settings(flags={"kube-apiserver": ("--no-such-flag",)}))
    assert traces(name) == {}
    assert "no-such-flag" in (tmp_path / "failed-starts" / name / "kube-apiserver.log").read_text()


FAILING_TEST = """
def test_that_fails(make_rig):
    make_rig(kubelets=False)
    assert False, "on purpose"
"""


def test_failing_test_keeps_logs_and_events_and_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(FAILING_TEST)
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.rig.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_sample.py")],
        cwd=ROOT,
        env={**os.environ, "UNLADE_RIG_ARTIFACTS": str(tmp_path / "kept")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed" in done.stdout, done.stdout + done.stderr
    (kept,) = (tmp_path / "kept").glob("*test_that_fails/own-*")
    assert f"logs and events are in {kept}" in done.stdout
    names = {path.name for path in kept.iterdir()}
    assert {"kube-apiserver.log", "etcd.log", "containerd-node1.log", "events.txt", "pods.json"} <= names


def test_a_name_is_taken_once() -> None:
    record = state.claim(_name("taken"), owner=None)
    try:
        with pytest.raises(RigError, match="exists already"):
            state.claim(record.name, owner=None)
        with pytest.raises(RigError, match="lower-case"):
            state.claim("../escape", owner=None)
    finally:
        record.remove()
