"""Which rigs exist on this machine, and how to remove one that nobody owns any more.

Every rig has a directory `<root>/<name>` with `state.json`: its number (which decides every address), the
process that owns it, and the processes it started. The record is written *before* a namespace, cgroup or
mount is made, so that whatever exists is on record. `sweep` removes each rig whose owner is gone, at
every start. All changes of the set of rigs happen under one file lock.

Callers: `rig.cluster`, `python -m rig`, and the tests that count leaks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rig import RigError, machine
from rig.machine import Process

# Each rig takes one number, and with it 10.77.N.0/24 for nodes, 10.78.N.0/24 for pods and 10.79.N.0/24 for
# services. Private addresses, so that crane and others talk plain HTTP to the registry there.
HIGHEST_NUMBER = 200

# The order in which a rig's components are asked to end: an apiserver whose etcd is gone hangs on SIGTERM.
STOP_ORDER = ("kubelet", "kube-", "etcd", "registry", "containerd")


def root() -> Path:
    """Where rigs keep their state: `UNLADE_RIG_ROOT`, else `/var/lib/unlade-rig` (socket paths are short)."""
    return Path(os.environ.get("UNLADE_RIG_ROOT", "/var/lib/unlade-rig"))


def link_of(name: str) -> str:
    """The name of a rig's veth interface: a hash of the rig's name, as the kernel allows 15 characters."""
    return "ul-" + hashlib.sha256(name.encode()).hexdigest()[:10]


@dataclass
class State:
    """What is on record about one rig."""

    name: str
    number: int
    # The process the rig belongs to; None: it stays until somebody takes it down (`make rig-up`).
    owner: Process | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    # Each component's command line as last started, for starting it again.
    commands: dict[str, list[str]] = field(default_factory=dict)
    # False until every component answered once.
    ready: bool = False

    @property
    def directory(self) -> Path:
        """The rig's directory: everything it writes is below it."""
        return root() / self.name

    @property
    def netns(self) -> str:
        """The name of the network namespace all components run in."""
        return f"unlade-{self.name}"

    @property
    def link(self) -> str:
        """The host's end of the veth pair."""
        return link_of(self.name)

    @property
    def sockets(self) -> Path:
        """A directory with a short path, for sockets whose length is limited."""
        return Path("/run/unlade-rig", str(self.number))

    @property
    def abandoned(self) -> bool:
        """Whether the owner is gone."""
        return self.owner is not None and not self.owner.alive

    def address(self, host: int) -> str:
        """An address in the rig's node network: 1 is this machine's end, 2 the first node."""
        return f"10.77.{self.number}.{host}"

    @property
    def pod_network(self) -> str:
        """The range pods get their addresses from."""
        return f"10.78.{self.number}.0/24"

    @property
    def service_network(self) -> str:
        """The range of ClusterIPs; its first address is the API server's."""
        return f"10.79.{self.number}.0/24"

    def save(self) -> None:
        """Write the record, whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        staged = self.directory / ".state.json"
        staged.write_text(json.dumps(asdict(self), indent=1))
        staged.rename(self.directory / "state.json")

    def remove(self) -> None:
        """Stop every process, remove mounts, namespace, cgroups and files; safe to call again."""
        ordered = sorted(self.processes.items(), key=lambda item: _stop_rank(item[0]))
        for _, process in ordered:
            # No grace: nothing of a rig outlives it, and the cgroup catches what these leave.
            process.stop(grace=0)
        machine.kill_cgroup(self.name)
        machine.unmount_below(self.directory)
        machine.remove_network(self.netns, self.link)
        machine.remove_cgroup(self.name)
        machine.remove_tree(self.sockets)
        _remove_foreign_traces(self)
        machine.remove_tree(self.directory)


def _stop_rank(component: str) -> int:
    for rank, prefix in enumerate(STOP_ORDER):
        if component.startswith(prefix):
            return rank
    return len(STOP_ORDER)


def _remove_foreign_traces(state: State) -> None:
    """Remove what engines write at fixed places outside the rig's directory."""
    # The kubelet links every container log from /var/log/containers, whatever its own log directory is.
    _unlink_where(
        Path("/var/log/containers"), lambda path: os.readlink(path).startswith(f"{state.directory}/")
    )
    # libcni caches each attachment here; the pod's network namespace, a path of ours, is in the file.
    _unlink_where(Path("/var/lib/cni/results"), lambda path: f"{state.directory}/" in path.read_text())
    # Every kubelet listens here for device plugins, whatever its root directory; the last one takes it over.
    devices = Path("/var/lib/kubelet/device-plugins")
    if not [other for other in every() if other.name != state.name] and not _listens(
        devices / "kubelet.sock"
    ):
        _unlink_where(devices, lambda path: path.name.startswith("kubelet"))
    for directory in (
        *("/var/log/containers", "/var/lib/cni/results", "/var/lib/cni"),
        *("/var/lib/kubelet/device-plugins", "/var/lib/kubelet", str(state.sockets.parent)),
    ):
        with suppress(OSError):  # only when empty: others may use it
            os.rmdir(directory)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _unlink_where(directory: Path, ours: Callable[[Path], bool]) -> None:
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        with suppress(OSError):
            if ours(path):
                path.unlink()


def load(name: str) -> State | None:
    """The record of a rig, or None when there is no such rig."""
    try:
        record = json.loads((root() / name / "state.json").read_text())
    except FileNotFoundError:
        return None
    record["processes"] = {key: Process(**value) for key, value in record["processes"].items()}
    record["owner"] = Process(**record["owner"]) if record["owner"] else None
    return State(**record)


def every() -> list[State]:
    """All rigs on this machine."""
    if not root().is_dir():
        return []
    names = sorted(entry.name for entry in root().iterdir() if entry.is_dir())
    return [state for state in map(load, names) if state is not None]


@contextmanager
def lock() -> Iterator[None]:
    """Hold while the set of rigs changes; released by the kernel when the holder dies."""
    root().mkdir(parents=True, exist_ok=True)
    with (root() / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sweep() -> list[str]:
    """Remove every rig whose owner is gone; the names of those removed. Call under `lock`."""
    removed = []
    for state in every():
        if state.abandoned:
            state.remove()
            removed.append(state.name)
    return removed


def claim(name: str, owner: Process | None) -> State:
    """A new record with a free number; removes abandoned rigs first."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?", name):
        raise RigError(f"rig name {name!r}: use up to 20 lower-case letters, digits and hyphens")
    if os.geteuid() != 0:
        raise RigError("the rig needs root: it makes network namespaces, mounts and cgroups")
    with lock():
        sweep()
        if load(name) is not None:
            raise RigError(f"rig {name} exists already; `python -m rig down {name}` removes it")
        taken = {state.number for state in every()} | _numbers_in_use()
        number = next((n for n in range(1, HIGHEST_NUMBER + 1) if n not in taken), None)
        if number is None:
            raise RigError(
                f"all {HIGHEST_NUMBER} rig networks are in use; `python -m rig list` names the rigs"
            )
        state = State(name=name, number=number, owner=owner)
        state.save()
        return state


def _numbers_in_use() -> set[int]:
    """Numbers whose networks somebody else on this machine already routes."""
    found = re.findall(r"\b10\.7[789]\.(\d+)\.", machine.run("ip", "route", "show", "table", "all"))
    return set(map(int, found))
