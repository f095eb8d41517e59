"""Ours and the peers, as commands: each starts from nothing and leaves a tree that can be looked at.

Every contender's run has three parts: what is prepared (a containerd, not timed), the command (timed, in an
empty directory of its own), and a look at what it made (a digest of the tree, not timed).
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench import measure
from bench.tools import Tools
from bench.trees import fingerprint
from rig.machine import unmount_below

OURS: Final = "unlade"


@dataclass
class Contender:
    """One way to do a work: a shell command that leaves its result in `result` below its directory.

    `syncs`: it is durable when it ends, no sync follows. `durable` False: it is only there for the column in
    which nobody syncs. `metadata` False: it does not claim to keep modes, owners and times.
    """

    name: str
    command: str
    result: str = "out"
    syncs: bool = False
    durable: bool = True
    metadata: bool = True
    mounts: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    look: Callable[[Path], str] | None = None

    def run(self, place: Path) -> tuple[measure.Cost, str]:
        """Do it once in an empty directory; the cost, and the digest of what was made."""
        try:
            cost = measure.run(self.command, place, sync=not self.syncs, environment=self.environment)
            return cost, self.fingerprint(place)
        finally:
            if self.mounts:
                unmount_below(place)

    def fingerprint(self, place: Path) -> str:
        """What the tree is; raises when there is none."""
        if self.look is not None:
            return self.look(place)
        return fingerprint(place / self.result, metadata=self.metadata)


@dataclass
class Ctr(Contender):
    """A containerd of its own for each run, started before the clock; its CPU and memory count."""

    tools: Tools | None = None
    reference: str = ""
    unpacks: int = 1

    def run(self, place: Path) -> tuple[measure.Cost, str]:
        """As Contender's; the tree is what `ctr images mount` shows."""
        assert self.tools is not None and self.tools.ctr is not None
        with containerd(self.tools, place, unpacks=self.unpacks) as (pid, ctr):
            pull = " ".join([*map(shlex.quote, ctr), "images", "pull", "--plain-http", self.reference])
            cost = measure.run(pull, place, sync=True, daemons=[pid])
            target = place / "view"
            target.mkdir()
            subprocess.run(
                [*ctr, "images", "mount", self.reference, str(target)], check=True, capture_output=True
            )
            try:
                return cost, fingerprint(target)
            finally:
                subprocess.run(["umount", str(target)], check=True)


_CONTAINERD = """
version = 3
root = "{base}/root"
state = "{base}/state"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing",
  "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
[grpc]
address = "{base}/c.sock"
[ttrpc]
address = "{base}/c.sock.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
path = "{base}/opt"
[plugins."io.containerd.shim.v1.manager"]
socket_dir = "{base}/s"
[plugins."io.containerd.transfer.v1.local"]
max_concurrent_unpacks = {unpacks}
"""


@contextmanager
def containerd(tools: Tools, place: Path, *, unpacks: int) -> Iterator[tuple[int, list[str]]]:
    """A containerd below a directory; gives its pid and the beginning of every ctr command."""
    assert tools.containerd is not None and tools.ctr is not None
    base = place / "containerd"
    base.mkdir()
    (base / "config.toml").write_text(_CONTAINERD.format(base=base, unpacks=unpacks))
    ctr = [tools.ctr, "--address", f"{base}/c.sock", "-n", "bench"]
    with (base / "log").open("wb") as log:
        process = subprocess.Popen(
            [tools.containerd, "-c", str(base / "config.toml")], stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + 30
        while subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() > end:
                raise measure.Failed((base / "log").read_text()[-2000:])
            time.sleep(0.05)
        yield process.pid, ctr
    finally:
        process.terminate()
        process.wait(30)
        unmount_below(base)


def pull(tools: Tools, reference: str, *, options: str = "") -> Contender:
    """`unlade pull REF DIR`."""
    return Contender(
        OURS, f"{tools.unlade} pull -q --plain-http {options} --store st {reference} out", syncs=True
    )


def mount(tools: Tools, reference: str) -> Contender:
    """`unlade mount REF DIR`: layers as trees of the store, shown by overlay; what ctr's snapshots are."""
    command = f"mkdir out && {tools.unlade} mount -q --plain-http --store st {reference} out"
    return Contender("unlade mount", command, syncs=True, mounts=True)


def unsynced(tools: Tools, ours: Sequence[Contender]) -> list[Contender]:
    """Ours with every sync made void by a shim, for the column in which nobody syncs."""
    if tools.shim is None:
        return []
    return [
        Contender(
            f"{one.name}, unsynced",
            one.command,
            one.result,
            syncs=True,
            durable=False,
            mounts=one.mounts,
            environment={"LD_PRELOAD": tools.shim},
            look=one.look,
        )
        for one in ours
    ]


def crane_tar(tools: Tools, reference: str) -> Contender:
    """`crane export | tar -x`."""
    export = f"{tools.crane} export --insecure {reference} - | tar -xf - -C out"
    return Contender("crane+tar", f"mkdir out && {export}")


def skopeo_umoci(tools: Tools, reference: str) -> list[Contender]:
    """`skopeo copy` into a layout, `umoci unpack` out of it."""
    if tools.skopeo is None or tools.umoci is None:
        return []
    copy = f"{tools.skopeo} copy -q --src-tls-verify=false docker://{reference} oci:layout:1"
    unpack = f"{tools.umoci} unpack --image layout:1 bundle"
    return [Contender("skopeo+umoci", f"{copy} && {unpack}", result="bundle/rootfs")]


def ctr(tools: Tools, reference: str) -> list[Contender]:
    """`ctr images pull`, as containerd comes and with layers unpacked at once."""
    if tools.ctr is None:
        return []
    return [
        Ctr("ctr", "", tools=tools, reference=reference),
        # As many as ours uses workers for on a machine of two cores.
        Ctr("ctr, parallel", "", tools=tools, reference=reference, unpacks=4),
    ]


def bare(tools: Tools, host: str, name: str, layers: Sequence[str]) -> list[Contender]:
    """The bare limit: curl into igzip into tar, a pipeline a layer, all at once; nothing is verified."""
    if tools.igzip is None:
        return []
    urls = (f"http://{host}/v2/bench/{name}/blobs/{digest}" for digest in layers)
    lines = (f"(curl -sSfL {url} | igzip -dc | tar -xf - -C out) & p+=($!)" for url in urls)
    command = f"mkdir out; p=(); {'; '.join(lines)}; for one in ${{p[@]}}; do wait $one || exit 1; done"
    return [Contender("curl|igzip|tar", command)]


def oras_py(tools: Tools, reference: str, *, packed: bool = False) -> list[Contender]:
    """oras-py's `pull`, in an interpreter of its own; it keeps names and bytes, not modes and times.

    A layer titled `.` it unpacks beside the directory that it is told: `packed` tells it one below.
    """
    if tools.oras is None:
        return []
    program = (
        "import sys, oras.client; oras.client.OrasClient(insecure=True)"
        ".pull(target=sys.argv[1], outdir=sys.argv[2], overwrite=True)"
    )
    where = "out/below" if packed else "out"
    command = f"mkdir out && {tools.oras} -c {shlex.quote(program)} {reference} {where}"
    return [Contender("oras-py", command, metadata=False)]


def clear(place: Path) -> None:
    """Remove what a run left."""
    unmount_below(place)
    shutil.rmtree(place)
