"""What the rig asks of the kernel: processes, cgroups, mounts, network namespaces.

Every function is safe to call again, and every removal works from what the kernel shows now, not from what
the caller remembers: that lets a start clean up after a rig whose owner was killed. A process is named by pid
*and* start time, because pids are used again. Everything a rig starts lives in one cgroup subtree, so that
shims and containers are found even where nobody recorded them.

Callers: `rig.state` (cleaning) and `rig.cluster` (starting).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rig import RigError

# One subtree of every hierarchy belongs to rigs and to nothing else.
CGROUP_PARENT = "unlade-rig"


@dataclass(frozen=True)
class Process:
    """A process as recorded: the pid, and its start in clock ticks since boot (pids are reused)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process that has this pid now, or None."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The command name may hold spaces and brackets: count fields after the last bracket.
        fields = stat.rpartition(")")[2].split()
        # The first thread may be a zombie while others still hold the sockets: gone is when it is alone.
        gone = fields[0] in "ZX" and int(fields[17]) <= 1
        return None if gone else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """Whether that very process still runs (a zombie does not)."""
        return Process.of(self.pid) == self

    def signal(self, number: int) -> None:
        """Send a signal unless the process is gone."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self, grace: float) -> None:
        """Ask to end, wait for at most `grace` seconds (0: do not ask), then kill; ends when it is gone."""
        if grace > 0:
            self.signal(signal.SIGTERM)
        if not self._gone(grace):
            self.signal(signal.SIGKILL)
            if not self._gone(10):
                raise RigError(f"process {self.pid} does not end after SIGKILL; see /proc/{self.pid}/stack")

    def _gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            with suppress(ChildProcessError):  # ours to reap, or not ours at all
                os.waitpid(self.pid, os.WNOHANG)
            if not self.alive:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def run(*argv: str, timeout: float = 60, stdin: bytes | None = None) -> str:
    """Run a command to its end and return its stdout; RigError with its stderr when it fails."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout, check=False)
    except FileNotFoundError as error:
        raise RigError(f"{argv[0]} is not installed; scripts/setup lists the packages") from error
    except subprocess.TimeoutExpired as error:
        raise RigError(f"{' '.join(argv)} did not end within {timeout:.0f} s") from error
    if done.returncode != 0:
        raise RigError(f"{' '.join(argv)} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


def spawn(argv: Iterable[str], *, log: Path, namespace: str, cgroup: str, env: Mapping[str, str]) -> Process:
    """Start a daemon in a network namespace and a cgroup; its output is appended to `log`."""
    # The shell moves itself into the cgroup and becomes the program: the pid stays the one recorded, and no
    # Python runs between fork and exec (the caller may have threads).
    script = 'for c in $RIG_CGROUPS; do echo $$ >"$c/cgroup.procs"; done; unset RIG_CGROUPS; exec "$@"'
    places = [str(place) for place in cgroup_places(cgroup)]
    with log.open("ab") as out:
        child = subprocess.Popen(
            ["/bin/sh", "-ec", script, "sh", "nsenter", f"--net=/run/netns/{namespace}", "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**env, "RIG_CGROUPS": " ".join(places)},
            start_new_session=True,
            cwd=log.parent,
        )
    process = Process.of(child.pid)
    # Popen would warn at garbage collection that the child still runs; that is the purpose, and stop() reaps.
    child.returncode = 0
    if process is None:
        raise RigError(f"{next(iter(argv))} ended at once; see {log}")
    return process


def cgroup_hierarchies() -> list[Path]:
    """The mount point of every cgroup hierarchy, version 1 and 2."""
    with open("/proc/self/mounts") as mounts:
        rows = [line.split() for line in mounts]
    return [Path(row[1]) for row in rows if row[2] in ("cgroup", "cgroup2")]


def cgroup_places(path: str) -> list[Path]:
    """The directory of a rig's cgroup (`name/part`) in each hierarchy."""
    return [mount / CGROUP_PARENT / path for mount in cgroup_hierarchies()]


def make_cgroup(path: str) -> None:
    """Create a cgroup in every hierarchy, ready to hold processes."""
    for mount in cgroup_hierarchies():
        place = mount
        for part in (CGROUP_PARENT, *path.split("/")):
            parent, place = place, place / part
            place.mkdir(exist_ok=True)
            # A new cpuset of version 1 is empty and takes no process until it has its parent's values.
            for name in ("cpuset.cpus", "cpuset.mems"):
                if (place / name).exists() and (parent / "cgroup.procs").exists():
                    value = (parent / name).read_text().strip()
                    if value and not (place / name).read_text().strip():
                        (place / name).write_text(value)
            control = parent / "cgroup.subtree_control"
            if control.exists():
                for controller in (parent / "cgroup.controllers").read_text().split():
                    with suppress(OSError):  # a controller bound to a version 1 hierarchy, or a busy root
                        control.write_text(f"+{controller}")


def cgroup_pids(path: str) -> set[int]:
    """Every process in a rig's cgroup, the cgroups below it included."""
    found: set[int] = set()
    for place in cgroup_places(path):
        for directory, _, _ in os.walk(place):
            with suppress(OSError):
                found.update(map(int, Path(directory, "cgroup.procs").read_text().split()))
    return found


def kill_cgroup(path: str, seconds: float = 20) -> None:
    """Kill every process in a rig's cgroup and wait until none is left."""
    deadline = time.monotonic() + seconds
    while pids := cgroup_pids(path):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            raise RigError(f"processes {sorted(pids)} of rig {path} survive SIGKILL; see /proc/<pid>/stack")
        time.sleep(0.02)


def remove_cgroup(path: str, seconds: float = 10) -> None:
    """Remove a rig's empty cgroup and what is below it, in every hierarchy."""
    deadline = time.monotonic() + seconds
    for place in cgroup_places(path):
        for directory, _, _ in os.walk(place, topdown=False):
            while True:
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    break
                except OSError as error:
                    # Busy for a moment after its last process died.
                    if time.monotonic() > deadline:
                        raise RigError(f"cgroup {directory} cannot be removed: {error}") from error
                    time.sleep(0.02)
                else:
                    break
        with suppress(OSError):  # another rig's cgroup is still in it
            place.parent.rmdir()


def mounts_below(directory: Path) -> list[Path]:
    """Mount points at and below a directory, deepest and newest first."""
    prefix = str(directory)
    found = []
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            # Octal escapes stand for space, tab, newline and backslash.
            point = (
                line.split()[4]
                .encode()
                .decode("unicode_escape")
                .encode("latin-1")
                .decode(errors="surrogateescape")
            )
            if point == prefix or point.startswith(prefix + "/"):
                found.append(Path(point))
    return found[::-1]


def unmount_below(directory: Path) -> None:
    """Unmount everything at and below a directory, lazily where it is busy."""
    for _ in range(8):  # a lazy unmount of a stack shows the one beneath it in the next round
        points = mounts_below(directory)
        if not points:
            return
        for point in points:
            done = subprocess.run(["umount", str(point)], capture_output=True, check=False)
            if done.returncode != 0:
                subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)
    raise RigError(f"still mounted below {directory}: {', '.join(map(str, mounts_below(directory)))}")


def remove_tree(directory: Path) -> None:
    """Delete a directory; refuses while something is mounted below it, as it would delete what is mounted."""
    if mounts_below(directory):
        raise RigError(f"{directory} has mounts; it is not deleted")
    for attempt in range(5):
        if not directory.exists():
            return
        try:
            shutil.rmtree(directory)
        except OSError:  # a dying process may still write
            if attempt == 4:
                raise
            time.sleep(0.1)


def network_namespaces() -> set[str]:
    """The names of the network namespaces under /run/netns."""
    try:
        return set(os.listdir("/run/netns"))
    except FileNotFoundError:
        return set()


def links() -> set[str]:
    """The names of the network interfaces of this namespace."""
    return set(os.listdir("/sys/class/net"))


def make_network(
    namespace: str, link: str, *, host: str, inside: Iterable[str], routed: Iterable[str]
) -> None:
    """A network namespace joined to this one by a veth pair; `routed` ranges are reached through it.

    Addresses are CIDR strings; the first of `inside` is the gateway for `routed`.
    """
    inside = list(inside)
    run("ip", "netns", "add", namespace)
    run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    run("ip", "addr", "add", host, "dev", link)
    run("ip", "link", "set", link, "up")
    run("ip", "-n", namespace, "link", "set", "lo", "up")
    for address in inside:
        run("ip", "-n", namespace, "addr", "add", address, "dev", "eth0")
    run("ip", "-n", namespace, "link", "set", "eth0", "up")
    enter = ("nsenter", f"--net=/run/netns/{namespace}", "--")
    run(*enter, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    for network in routed:
        run("ip", "route", "add", network, "via", inside[0].partition("/")[0], "dev", link)


def remove_network(namespace: str, link: str) -> None:
    """Remove a namespace and its veth pair; bridges, routes and rules inside go with it."""
    if link in links():
        run("ip", "link", "del", link)
    if namespace in network_namespaces():
        run("ip", "netns", "del", namespace)
