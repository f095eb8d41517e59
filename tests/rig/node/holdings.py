"""What a containerd holds, as `ctr` tells it: for tests that nothing is left behind."""

from __future__ import annotations

from dataclasses import dataclass

from rig import machine
from rig.cluster import Rig
from rig.engines import binary


@dataclass(frozen=True)
class Holdings:
    """Names of everything in the namespace k8s.io that costs space or keeps something."""

    images: frozenset[str]
    leases: frozenset[str]
    snapshots: frozenset[str]
    content: frozenset[str]

    def beyond(self, other: Holdings) -> dict[str, set[str]]:
        """What is here and not there, by kind."""
        more = {kind: set(getattr(self, kind) - getattr(other, kind)) for kind in self.__annotations__}
        return {kind: names for kind, names in more.items() if names}


def holdings(rig: Rig) -> Holdings:
    """What containerd of the first node holds now."""

    def names(*argv: str) -> frozenset[str]:
        address = str(rig.node.containerd_socket)
        out = machine.run(str(binary("ctr")), "-a", address, "-n", "k8s.io", *argv)
        return frozenset(line.split()[0] for line in out.splitlines() if line.strip())

    header = frozenset({"KEY", "DIGEST", "REF", "ID"})
    return Holdings(
        images=names("images", "ls", "-q"),
        leases=names("leases", "ls", "-q"),
        snapshots=names("snapshots", "ls") - header,
        content=names("content", "ls", "-q"),
    )
