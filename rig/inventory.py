"""What rigs have left on this machine: the tests' measure of a clean exit.

It looks at the kernel and at the places engines write to, never at a rig's own record, so that a rig which
forgot something cannot hide it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rig import engines, machine, state
from rig.machine import CGROUP_PARENT, Process


def traces(name: str) -> dict[str, list[str]]:
    """Everything a rig has on this machine now; kinds with nothing are left out."""
    directory = state.root() / name
    found = {
        "process": _processes(f"{directory}/", f"/{CGROUP_PARENT}/{name}"),
        "mount": [str(path) for path in machine.mounts_below(directory)],
        "namespace": sorted(machine.network_namespaces() & {f"unlade-{name}"}),
        "link": sorted(machine.links() & {state.link_of(name)}),
        "cgroup": [str(place) for place in machine.cgroup_places(name) if place.exists()],
        "file": _files(directory),
    }
    return {kind: things for kind, things in found.items() if things}


def _processes(directory: str, cgroup: str) -> list[str]:
    """Living processes in a rig's cgroup, and engines that were started with a rig's path."""
    built = f"{engines.cache()}/engines/"
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid() or Process.of(int(entry)) is None:
            continue
        with suppress(OSError):  # ended meanwhile
            command = (
                Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            groups = Path("/proc", entry, "cgroup").read_text()
            in_group = any(line.endswith(cgroup) or f":{cgroup}/" in line for line in groups.splitlines())
            if in_group or (command.startswith(built) and directory in command):
                found.append(f"{entry} {command}")
    return found


def _files(directory: Path) -> list[str]:
    """The rig's directory itself, and what engines wrote at fixed places on its behalf."""
    found = [str(directory)] if directory.exists() else []
    for place in ("/var/log/containers", "/var/lib/cni/results"):
        with suppress(OSError):
            for path in Path(place).iterdir():
                text = os.readlink(path) if path.is_symlink() else path.read_text()
                if f"{directory}/" in text:
                    found.append(str(path))
    return found
