"""A containerd without Kubernetes, of a test's own: started, stopped, killed and started again.

Content is not shared between namespaces, so that each test has an empty store in a namespace of its own;
garbage is collected only when asked, so that content without a lease stays until a test collects.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rig.engines import binary
from rig.machine import unmount_below

_CONFIG = """
version = 3
root = "{base}/root"
state = "{base}/state"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing"]
[grpc]
address = "{base}/c.sock"
[ttrpc]
address = "{base}/c.sock.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
path = "{base}/opt"
[plugins."io.containerd.shim.v1.manager"]
socket_dir = "{base}/s"
[plugins."io.containerd.metadata.v1.bolt"]
content_sharing_policy = "isolated"
[plugins."io.containerd.gc.v1.scheduler"]
deletion_threshold = 1000000
mutation_threshold = 1000000
# The share of time that may go into collections: in practice, none but those asked for.
pause_threshold = 0.000001
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{base}/certs.d"
[plugins."io.containerd.cri.v1.runtime".cni]
conf_dir = "{base}/cni"
"""


class Daemon:
    """One containerd below a directory; `close` leaves no process and no mount."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.address = f"{base}/c.sock"
        (base / "config.toml").write_text(_CONFIG.format(base=base))
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Daemon]:
        """One in a directory of its own, until the block ends."""
        # A short path: shims' sockets are limited to some hundred characters.
        with tempfile.TemporaryDirectory(prefix="ctd-", ignore_cleanup_errors=True) as base:
            daemon = cls(Path(base))
            try:
                yield daemon
            finally:
                daemon.close()

    def start(self) -> None:
        """Start it and wait until it answers."""
        with (self.base / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary("containerd"), "-c", str(self.base / "config.toml")], stdout=log, stderr=log
            )
        end = time.monotonic() + 60
        while self.ctr("version", check=False).returncode:
            assert self._process.poll() is None, (self.base / "log").read_text()[-2000:]
            assert time.monotonic() < end, (self.base / "log").read_text()[-2000:]
            time.sleep(0.1)

    def without_tls(self, host: str) -> None:
        """Have its CRI plugin pull from a registry by plain HTTP."""
        directory = self.base / "certs.d" / host
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "hosts.toml").write_text(f'server = "http://{host}"\n')

    def stop(self, *, kill: bool = False) -> None:
        """End it, by SIGKILL when told; returns when it is gone."""
        assert self._process is not None
        assert self._process.poll() is None, (self.base / "log").read_text()[-2000:]
        if kill:
            self._process.kill()
        else:
            self._process.terminate()
        self._process.wait(timeout=30)

    def restart(self, *, kill: bool = False) -> None:
        """Stop and start."""
        self.stop(kill=kill)
        self.start()

    def ctr(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """containerd's own command line."""
        command = [str(binary("ctr")), "--address", self.address, *arguments]
        return subprocess.run(command, capture_output=True, check=check)

    def lines(self, namespace: str, *arguments: str) -> list[str]:
        """What ctr lists in a namespace, without the heading."""
        out = self.ctr("-n", namespace, *arguments).stdout.decode()
        return [line for line in out.splitlines() if line and not line.startswith(("REF", "KEY", "ID "))]

    def directories(self, snapshotter: str = "overlayfs") -> set[str]:
        """The snapshot directories that are on the disk."""
        place = self.base / "root" / f"io.containerd.snapshotter.v1.{snapshotter}" / "snapshots"
        return {entry.name for entry in place.iterdir()} if place.is_dir() else set()

    def close(self) -> None:
        """Stop it and unmount what it left."""
        self.stop()
        unmount_below(self.base)
