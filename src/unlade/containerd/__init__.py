"""containerd as store and tree backend: on a node, what we pull lives there and nowhere else.

`Containerd` is the connection; `ContainerdStore` and `ContainerdTrees` fulfil the protocols of `store` and
`tree` with its content store and its snapshots; `Artifacts` makes whatever a registry holds mountable by a
stock kubelet and containerd, and reads back what is there. containerd is the database: nothing of ours has
to survive beside it. Faces of the node wire this together; `delivery` does the pulling.
"""

from unlade.containerd import leases
from unlade.containerd.artifacts import Artifacts, Recovered
from unlade.containerd.connection import Containerd
from unlade.containerd.content import ContainerdStore
from unlade.containerd.errors import (
    ContainerdError,
    ContainerdUnavailable,
    SnapshotterUnsupported,
    UnknownHandler,
)
from unlade.containerd.handlers import Handler, Handlers, PullOptions
from unlade.containerd.ordinary import HeldImage, OrdinaryImage, OrdinaryImages
from unlade.containerd.records import ArtifactImage, ImageTuple
from unlade.containerd.snapshots import ContainerdTrees

__all__ = [
    "ArtifactImage",
    "Artifacts",
    "Containerd",
    "ContainerdError",
    "ContainerdStore",
    "ContainerdTrees",
    "ContainerdUnavailable",
    "Handler",
    "Handlers",
    "HeldImage",
    "ImageTuple",
    "OrdinaryImage",
    "OrdinaryImages",
    "PullOptions",
    "Recovered",
    "SnapshotterUnsupported",
    "UnknownHandler",
    "leases",
]
