"""Unmaking objects: the record first, then the data, so that a record is never without what it names.

`forget_unreferenced` is the one place where an object's record is deleted. It does so in a transaction that
sees no edge to the object; every edge is made in a transaction that sees the object. So an object that
someone refers to is never removed, and one that is removed cannot be referred to any more: whoever wants it
finds it missing and makes it again. The lock of the object's name is held from before the record goes until
its file is out of sight, so that a new ingest of the same digest never meets the old file's deletion.
Used by delete, rmi, gc and fsck.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from unlade.errors import StoreError
from unlade.kernel import failpoints
from unlade.kernel.files import remove_tree
from unlade.model import Digest
from unlade.store.failure import explaining
from unlade.store.layout import Layout, file_name

if TYPE_CHECKING:
    from sqlite3 import Connection

    from unlade.store.dirstore import DirStore


def blob_lock(digest: Digest) -> str:
    """The name that is held while a blob is made or unmade."""
    return f"blob-{file_name(digest)}"


def tree_lock(key: Digest) -> str:
    """The name that is held while a tree is made or unmade."""
    return f"tree-{file_name(key)}"


def delete_object(store: DirStore, name: str) -> bool:
    """Remove one object; False when it was not there, StoreError when something refers to it."""
    with store.locks.hold(_lock(name)):
        with store.database.write() as connection:
            referrer = connection.execute(
                "SELECT parent FROM edges WHERE child = ? LIMIT 1", (name,)
            ).fetchone()
            if referrer:
                raise StoreError(
                    f"{name[2:]} is needed by {referrer[0]}", next_step="remove what needs it first"
                )
            found = forget(connection, name)
        failpoints.reach("store.delete.forgotten")
        hide_data(store.layout, name)
    empty_trash(store.layout)
    return found


def forget(connection: Connection, name: str) -> bool:
    """Inside a write transaction: drop an object's record and what it kept alive."""
    found = connection.execute("DELETE FROM objects WHERE name = ?", (name,)).rowcount > 0
    connection.execute("DELETE FROM edges WHERE parent = ?", (name,))
    return found


def hide_data(layout: Layout, name: str) -> None:
    """Put an object's data out of sight; its record is gone and its lock held by the caller."""
    digest = Digest.parse(name[2:])
    with explaining(f"delete {digest}"):
        if name.startswith("b:"):
            layout.blob(digest).unlink(missing_ok=True)
        else:
            layout.discard(layout.tree(digest))
    failpoints.reach("store.delete.hidden")


@contextmanager
def free_names(store: DirStore, names: Iterable[str]) -> Iterator[list[str]]:
    """Hold the locks of those objects that nobody is making or unmaking at this moment; yields them."""
    with ExitStack() as stack:
        yield [name for name in names if stack.enter_context(store.locks.try_hold(_lock(name)))]


def empty_trash(layout: Layout) -> None:
    """Delete what is out of sight; any number of threads and processes may do so at once."""
    with explaining("empty the trash"):
        if not os.listdir(layout.trash):
            return
        fd = os.open(layout.trash, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in os.listdir(fd):
                _remove(fd, os.fsencode(name))
                failpoints.reach("store.trash.removed")
        finally:
            os.close(fd)


def _remove(fd: int, name: bytes) -> None:
    # Somebody else may be deleting the same: what vanishes under our hands is not an error, so look again.
    while True:
        try:
            remove_tree(fd, name)
        except FileNotFoundError:
            continue
        return


def _lock(name: str) -> str:
    digest = Digest.parse(name[2:])
    return blob_lock(digest) if name.startswith("b:") else tree_lock(digest)
