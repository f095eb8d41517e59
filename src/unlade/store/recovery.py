"""What is put right when a store is opened: the traces of processes that died.

A staged tree whose key nobody holds belongs to a process that is gone: the kernel released its lock. It is
moved to the trash, and the trash is emptied. Partial blobs stay: the next pull continues them. index.json
is brought in line with the records. Nothing here guesses from a pid, and nothing here waits: what somebody
holds is left alone. Costs a listing of three directories, normally empty.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from unlade.kernel import failpoints
from unlade.model import InvalidDigest
from unlade.store.failure import explaining
from unlade.store.layout import from_file_name
from unlade.store.removal import empty_trash, tree_lock

if TYPE_CHECKING:
    from unlade.store.dirstore import DirStore


def recover(store: DirStore) -> None:
    """Put away what dead processes left; idempotent, safe beside live ones."""
    with explaining(f"recover the store {store.path}"):
        for name in os.listdir(store.layout.staging):
            try:
                lock = tree_lock(from_file_name(name))
            except InvalidDigest:
                lock = f"stray-{name}"
            with store.locks.try_hold(lock) as held:
                if held:
                    store.layout.discard(store.layout.staging / name)
                    failpoints.reach("store.recover.discarded")
    empty_trash(store.layout)
    store.images.project()
