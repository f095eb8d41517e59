"""Trees on a shelf: content that no pod's `image:` names, kept in containerd as images without a name.

A tree that nobody holds is garbage to containerd. So each tree that is worth keeping for the next volume gets
what an artifact gets: a synthetic image whose record by ID leads to it (`ledger`), with one tuple for each
reference that it was made from. No name leads there: an ordinary image, or a merge of several references,
must never be what a pod's `image:` resolves to. The kubelet sees an image that no container uses, and removes
it when the disk fills, as it does with every other; the image service sees a tree that is here, and who
supplied it (V5). Called by the CSI driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from unlade.containerd import records
from unlade.containerd.connection import Containerd
from unlade.containerd.handlers import recall
from unlade.containerd.ledger import Ledger, RemovedMeanwhile
from unlade.containerd.records import ArtifactImage, ImageTuple
from unlade.delivery import Delivered, Found
from unlade.model import Digest
from unlade.store import Lease, NotInStore

# Where no image service has noted the node's handlers: the name that containerd itself has for its default.
_HANDLER: Final = "runc"
# Tuples with options have no name; the tree's key among them keeps one volume's from moving another's.
_OPTIONS: Final = "volume"
_KEY_DIGITS: Final = 16


class Shelf:
    """The trees of one snapshotter that are kept for later; thread-safe."""

    def __init__(self, containerd: Containerd, snapshotter: str) -> None:
        self._containerd = containerd
        self._snapshotter = snapshotter
        self._handler = ""

    def find(self, tree: Digest) -> ArtifactImage | None:
        """The image that keeps a tree, whoever made it; its `origins` are who supplied the tree (V5)."""
        return self._ledger().by_tree(tree)

    def has(self, image: ArtifactImage | None, found: Sequence[Found]) -> bool:
        """Whether an image that was found is kept for these references, too."""
        return image is not None and self._ledger().is_complete(image, self._tuples(found, image.tree))

    def put(self, found: Sequence[Found], done: Delivered, lease: Lease) -> None:
        """Keep a delivered tree until its image is removed; idempotent. Raises NotInStore when it is gone.

        The lease holds it then, too: an image may be removed at once.
        """
        assert done.tree is not None
        if not lease.hold_tree(done.tree):
            raise NotInStore(
                f"the tree {done.tree} was collected before it could be used", next_step="try again"
            )
        with suppress(RemovedMeanwhile):
            self._ledger().write(
                done,
                records.stamped(self._tuples(found, done.tree)),
                snapshotters=(self._snapshotter,),
                lease=lease,
            )

    def _ledger(self) -> Ledger:
        return Ledger(self._containerd, self._default())

    def _default(self) -> str:
        """The handler that names belong to: asked once, and not before containerd must be there."""
        if not self._handler:
            noted = recall(self._containerd)
            self._handler = noted.default if noted is not None else _HANDLER
        return self._handler

    def _tuples(self, found: Sequence[Found], tree: Digest) -> list[ImageTuple]:
        resolved = {records.record_name(one.reference): one.resolved for one in found}
        return [
            ImageTuple(
                reference=name,
                handler=self._default(),
                options=f"{_OPTIONS} {tree.hex[:_KEY_DIGITS]}",
                snapshotters=(self._snapshotter,),
                manifest=str(one.digest),
                index=str(one.index) if one.index else "",
                platform=str(one.platform) if one.platform else "",
            )
            for name, one in resolved.items()
        ]
