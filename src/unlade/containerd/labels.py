"""The labels by which containerd keeps our objects alive, and by which we know them again.

Those of containerd's own (`containerd.io/…`, `io.cri-containerd.…`) are facts of its garbage collector and
its CRI plugin; those below `unlade.dev/` are ours. Whoever writes or reads a label finds its name here.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

# A lease (or object) with this is collectible after that time, RFC 3339.
GC_EXPIRE: Final = "containerd.io/gc.expire"
# What an object keeps alive; a suffix after "." tells several apart.
GC_CONTENT: Final = "containerd.io/gc.ref.content"
GC_SNAPSHOT: Final = "containerd.io/gc.ref.snapshot"
# The CRI plugin shows records with this label to the kubelet, without making labels of its own first.
CRI_MANAGED: Final = "io.cri-containerd.image"
CRI_MANAGED_VALUE: Final = "managed"

# On a snapshot of an image's layer: the chain ID that it is for; snapshotters that load lazily look for it.
SNAPSHOT_OF: Final = "containerd.io/snapshot.ref"
# On a layer's blob: the digest of what it unpacks to.
UNCOMPRESSED: Final = "containerd.io/uncompressed"

# On a lease: the file that its owner keeps locked while it lives.
OWNER: Final = "unlade.dev/owner"
PURPOSE: Final = "unlade.dev/purpose"
# On content: its media type, which containerd does not keep.
MEDIA_TYPE: Final = "unlade.dev/media-type"
# On a snapshot and on an image's record by ID: the key of the tree that it is.
TREE: Final = "unlade.dev/tree"
SIZE: Final = "unlade.dev/size"
ENTRIES: Final = "unlade.dev/entries"
FAMILY: Final = "unlade.dev/family"
# On a snapshot: where its directory is.
PATH: Final = "unlade.dev/path"
# On a snapshot being filled: the key of the tree that it will be.
STAGING: Final = "unlade.dev/staging"
# On an image's record by name: the ID of the artifact's image.
IMAGE: Final = "unlade.dev/image"
# On an ordinary image's record by ID: the handlers' tuples are recorded there.
ORDINARY: Final = "unlade.dev/ordinary"
# On the manifest of a guest's image: the index that it is an entry of, which would keep it alive.
ENTRY_OF: Final = "unlade.dev/entry-of"
# On an image's record by ID, followed by a hash: one (reference, handler, options) that leads to it.
TUPLE: Final = "unlade.dev/tuple."


def expires(at: float) -> str:
    """A time as containerd reads it in GC_EXPIRE."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def has_expired(labels: dict[str, str], now: float) -> bool:
    """Whether GC_EXPIRE is there and over; what cannot be read has not expired, as for containerd."""
    text = labels.get(GC_EXPIRE)
    if not text:
        return False
    try:
        return datetime.fromisoformat(text).timestamp() <= now
    except ValueError:
        return False
