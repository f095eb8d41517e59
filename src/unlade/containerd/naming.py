"""What a tree's snapshot is called: the synthetic layer's diff ID, which is its chain ID too.

Derived from the tree's key and this node's secret, so that one who knows an artifact's digests, and with
them the key, still cannot name the snapshot in an image of their own (see connection._SALT_LABEL).
"""

from __future__ import annotations

import hashlib
import hmac

from unlade.containerd.connection import Containerd
from unlade.model import DiffID, Digest


def diff_id(salt: bytes, key: Digest) -> DiffID:
    """The diff ID of the layer that stands for a tree."""
    return DiffID(Digest("sha256", hmac.new(salt, str(key).encode(), hashlib.sha256).hexdigest()))


def snapshot_name(containerd: Containerd, key: Digest) -> str:
    """The name of a tree's committed snapshot: the chain ID of its only layer."""
    return str(diff_id(containerd.salt(), key))
