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


def traces(name: str | None = None) -> dict[str, list[str]]:
    """Everything that rigs (or the named one) have on this machine now; kinds with nothing are left out."""
    mark = f"/{name}" if name else ""
    directory = f"{state.root()}{mark}"
    found = {
        "process": _processes(directory, f"/{CGROUP_PARENT}{mark}"),
        "mount": [str(path) for path in machine.mounts_below(Path(directory))],
        "namespace": [
            n for n in machine.network_namespaces() if _ours(n, f"unlade-{name}" if name else None)
        ],
        "link": [link for link in machine.links() if link.startswith(("unlade", "br-node"))]
        if not name
        else [],
        "cgroup": [str(p) for p in machine.cgroup_places(name or "") if p.exists()],
        "file": _files(directory),
    }
    return {kind: sorted(things) for kind, things in found.items() if things}


def _ours(namespace: str, wanted: str | None) -> bool:
    return namespace == wanted if wanted else namespace.startswith(("unlade-", "cni-"))


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
            if in_group or (command.startswith(built) and f"{directory}/" in command):
                found.append(f"{entry} {command}")
    return found


def _files(directory: str) -> list[str]:
    """The rig's directory itself, and what engines wrote at fixed places on its behalf."""
    base = Path(directory)
    found = []
    if base != state.root() and base.exists():
        found.append(directory)
    elif base.is_dir():
        found += [str(path) for path in base.iterdir() if path.name != ".lock"]
    for place in ("/var/log/containers", "/var/lib/cni/results"):
        with suppress(OSError):
            for path in Path(place).iterdir():
                text = os.readlink(path) if path.is_symlink() else path.read_text()
                if f"{directory}/" in text:
                    found.append(str(path))
    return found
