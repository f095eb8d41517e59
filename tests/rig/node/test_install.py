"""The installed bundle in front of the real containerd: put in place, upgraded, rolled back, gone (V21).

systemd does not run where tests do: `tests/fakes/systemctl.py` stands in for it. It starts the installed
bundle for real, as its unit says; the cluster's kubelet, told by the drop-in, is the kubelet of the unit.
/etc/systemd/system is a directory of the test's own, mounted there for the commands alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.cluster import Rig
from rig.kube import until
from rig.pods import Namespace, Pod
from tests.fakes import systemctl
from tests.figures import figure
from tests.rig.node.client import Client
from tests.rig.node.conftest import RATE
from tests.rig.node.holdings import holdings
from unlade.cri.watching import ask

ROOT = Path(__file__).parents[3]


class Machine:
    """The host: runs `unlade node …` as its administrator would, with a unit directory of its own."""

    def __init__(self, rig: Rig, directory: Path) -> None:
        self.rig = rig
        self.directory = directory
        self.prefix = directory / "opt"
        self.units = directory / "units"
        self.config = directory / "kubelet.conf.d"
        self.socket = directory / "run" / "image.sock"
        self.kubelet = f"kubelet-{rig.node.name}"
        for made in (self.units, self.config):
            made.mkdir()
        self.options = [
            *("--socket", str(self.socket), "--state", str(directory / "run")),
            *("--containerd", str(rig.node.containerd_socket), "--listen", "127.0.0.1:0", "--grace", "30"),
            *("--certs-dir", str(rig.node.directory / "certs.d")),
        ]
        # The service's own view of /etc and /usr is read-only; this machine's Python may lie anywhere.
        self._env = {**os.environ, **systemctl.put_on_path(directory)}

    def unlade(self, *arguments: object, program: Path | None = None, expect: int = 0) -> str:
        """Run a command; what it printed."""
        mount = f'mount --bind {self.units} /etc/systemd/system && exec "$@"'
        command = [str(program)] if program else [sys.executable, "-m", "unlade"]
        done = subprocess.run(
            [*("unshare", "--mount", "--propagation", "slave", "sh", "-ec", mount, "sh"), *command]
            + [str(word) for word in arguments],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == expect, f"{done.stdout}{done.stderr}{self.log()}"
        return done.stdout

    def status(self, expect: int = 0) -> dict[str, Any]:
        """`unlade node status -o json`."""
        told = self.unlade("node", "status", "--prefix", self.prefix, "-o", "json", expect=expect)
        data: dict[str, Any] = json.loads(told)
        return data

    def log(self) -> str:
        """What the service wrote, whichever version."""
        path = self.directory / "state" / "unlade-node.service.log"
        return path.read_text() if path.exists() else ""

    def restart_kubelet(self) -> None:
        """As systemd does: with the command line it has."""
        self.rig.restart(self.kubelet)
        self.rig.wait_node(self.rig.node)

    def kubelet_pid(self) -> int:
        """The kubelet's process."""
        return self.rig.state.processes[self.kubelet].pid


@pytest.fixture
def machine(cluster: Rig, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(cluster, tmp_path)
    # A kubelet that reads drop-ins, as a node's administrator has to set it up.
    cluster.restart(made.kubelet, [*cluster.node.kubelet(), f"--config-dir={made.config}"])
    cluster.wait_node(cluster.node)
    with systemctl.Elsewhere(tmp_path, "kubelet.service", restart=made.restart_kubelet, pid=made.kubelet_pid):
        yield made
        made.unlade("node", "uninstall", "--prefix", made.prefix)
    cluster.restart_kubelet(cluster.node, image_service=None)


def newer(machine: Machine, version: str) -> Path:
    """The installed bundle as a later release would bring it: copied to the node, with another version."""
    made = machine.directory / "release"
    shutil.copytree(machine.prefix / "current", made, ignore=shutil.ignore_patterns("__pycache__"))
    [described] = (made / "lib").glob("unlade-*.dist-info/METADATA")
    described.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}", described.read_text()))
    return made / "bin" / "unlade"


def reads(namespace: Namespace, name: str, reference: str, content: str) -> Pod:
    """A pod that runs and sees an artifact's file."""
    pod = namespace.run(name, volumes={"/data": {"image": {"reference": reference}}})
    pod.wait_ready(seconds=120)
    assert pod.exec("cat", "/data/f") == content
    return pod


def started(pod: Pod) -> tuple[str, int]:
    """Which container runs, and how often it was started again."""
    [container] = pod.read()["status"]["containerStatuses"]
    return container["containerID"], container["restartCount"]


def test_installed_upgraded_rolled_back_and_gone(
    cluster: Rig, namespace: Namespace, machine: Machine, slow: str
) -> None:
    artifacts = [
        cluster.registry.push_artifact(f"install/{name}", {"f": name.encode()}).reference
        for name in ("first", "second", "third")
    ]
    wanted = ("--prefix", machine.prefix, "--", *machine.options)
    planned = machine.unlade("node", "install", "--dry-run", *wanted)
    assert list(machine.units.iterdir()) == list(machine.config.iterdir()) == []
    assert machine.unlade("node", "install", *wanted) == planned
    # A bundle makes itself again, byte for byte: nothing to do.
    own = machine.prefix / "current" / "bin" / "unlade"
    assert machine.unlade("node", "install", "--prefix", machine.prefix, program=own) == ""
    first = machine.status()
    assert first["problems"] == []
    assert first["kubelet"]["endpoint"] == f"unix://{machine.socket}"
    assert Path(first["kubelet"]["source"]).parent == machine.config
    figure("size of the bundle", _size(machine.prefix / first["current"]), "bytes")

    # Its own packages and the host's standard library, and the sandbox of the unit.
    maps = Path(f"/proc/{first['unit']['pid']}/maps").read_text()
    loaded = {line.split()[-1] for line in maps.splitlines() if ".so" in line and "site-packages" in line}
    assert loaded == set()
    process = Path(f"/proc/{first['unit']['pid']}/status").read_text()
    assert "NoNewPrivs:\t1" in process
    assert re.search(r"CapBnd:\t(\w+)", process)[1] == f"{_bounding():016x}"  # type: ignore[index]

    one = reads(namespace, "one", artifacts[0], "first")
    ran = started(one)

    # An upgrade: the kubelet goes on, the pod too, a pull has its grace, and the version before is kept.
    kubelet = machine.kubelet_pid()
    large = cluster.registry.push_artifact("install/large", {"f": os.urandom(4 * RATE)})
    reference = large.reference.replace(cluster.registry.address, slow)
    waits = namespace.run("waits", volumes={"/data": {"image": {"reference": reference}}})
    top = machine.socket.parent / "pulls.sock"
    until("a pull is under way", lambda: [one for one in ask(top).pulls if one.phase == "fetch"])
    done = machine.unlade("node", "install", "--prefix", machine.prefix, program=newer(machine, "9.9.9"))
    assert "systemctl restart unlade-node.service" in done.splitlines()
    second = machine.status()
    assert second["current"].startswith("9.9.9-")
    assert second["running"]["version"] == "9.9.9"
    assert second["running"]["pid"] == second["unit"]["pid"]
    assert (second["previous"], second["problems"]) == (first["current"], [])
    assert second["arguments"] == machine.options
    assert machine.kubelet_pid() == kubelet
    waits.wait_ready()
    # The pull went on; a look at an image in the moment without a service is told, and asked again.
    failed = [event["message"] for event in waits.events() if event["reason"] == "Failed"]
    assert [message for message in failed if "ImageInspectError" not in message] == []
    two = reads(namespace, "two", artifacts[1], "second")
    assert (one.exec("cat", "/data/f"), started(one)) == ("first", ran)

    # And back.
    machine.unlade("node", "install", "--prefix", machine.prefix, "--rollback")
    third = machine.status()
    assert (third["current"], third["previous"]) == (first["current"], second["current"])
    assert third["problems"] == []
    assert machine.kubelet_pid() == kubelet
    reads(namespace, "three", artifacts[2], "third")

    # Gone: in the order that keeps a kubelet with an image service, and containerd keeps what it has.
    held = holdings(cluster)
    calls = len(systemctl.calls(machine.directory))
    machine.unlade("node", "uninstall", "--prefix", machine.prefix)
    assert systemctl.calls(machine.directory)[calls:] == [
        "try-restart kubelet.service",
        "stop unlade-node.service",
        "daemon-reload",
    ]
    assert (holdings(cluster).beyond(held), held.beyond(holdings(cluster))) == ({}, {})
    for directory in (machine.prefix, machine.socket.parent):
        assert not directory.exists()
    assert [path for path in machine.units.rglob("*") if not path.is_dir()] == []
    assert list(machine.config.iterdir()) == []
    assert machine.status(expect=1)["problems"][0].startswith("nothing is installed")
    assert (one.exec("cat", "/data/f"), started(one)) == ("first", ran)
    assert two.exec("cat", "/data/f") == "second"
    reads(namespace, "afterwards", artifacts[0], "first")
    direct = Client(cluster.node.containerd_socket)
    for pod in (one, two, waits):
        pod.delete()
    for name in (*artifacts, reference):
        direct.remove(name)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _bounding() -> int:
    """CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, KILL, SYS_CHROOT, SYS_ADMIN, MKNOD, SETFCAP."""
    return sum(1 << number for number in (0, 1, 2, 3, 4, 5, 18, 21, 27, 31))
