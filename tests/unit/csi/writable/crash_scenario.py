"""A short life of writable volumes that passes every durable step, to be killed at any of them.

Run as a program: BASE HOST [trace] [containerd=SOCKET,NAMESPACE]. It can be run again on what an earlier run
left, and ends well. What a pod would have written is synced and said on stdout (`wrote NAME TEXT`); the test
that killed us looks for it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.unit.csi.writable.scene import MIB, Node, node
from unlade.kernel import failpoints

KEPT = "kept"


def live(here: Node) -> None:
    """Create, publish, write, copy, grow, unpublish, delete."""
    writable = here.writable
    writable.recover()
    claim = writable.create("pvc-live", 32 * MIB, here.parameters)
    target, second, third = here.target("a"), here.target("b"), here.target("c")
    writable.publish(claim.id, target)
    if not os.path.exists(f"{target}/{KEPT}"):
        with open(f"{target}/{KEPT}", "w") as file:
            file.write("by the pod")
            file.flush()
            os.fsync(file.fileno())
        say("wrote")
    writable.publish(claim.id, second, readonly=True)
    snapshot = writable.snapshot("snap", claim.id)
    clone = writable.create("pvc-clone", 64 * MIB, {}, origin=claim.id)
    restored = writable.create("pvc-restored", 64 * MIB, {}, origin=snapshot.id)
    writable.expand(claim.id, 40 * MIB)
    writable.unpublish(claim.id, second)
    writable.unpublish(claim.id, target)
    writable.expand(restored.id, 80 * MIB)
    writable.publish(restored.id, third)
    assert Path(third, KEPT).read_text() == "by the pod"
    writable.unpublish(restored.id, third)
    for volume in (clone, restored):
        writable.delete(volume.id)
    writable.delete_snapshot(snapshot.id)
    writable.bind(claim.id)


def say(name: str) -> None:
    """Reaches the test even if we are killed at once."""
    print(name, flush=True)


def main() -> None:
    base, host, *options = sys.argv[1:]
    if "trace" in options:
        failpoints.reach = say
    contained = next((one.partition("=")[2] for one in options if one.startswith("containerd=")), "")
    with node(Path(base), host, contained=contained) as here:
        here.holder.tidy()
        live(here)


if __name__ == "__main__":
    main()
