"""Checking trees against the file lists that were written with them; and `fsck`, the check of everything.

Nothing keeps the blobs a tree was made from, so its list is what it is compared with: type, mode, owner,
time, size, link target and the checksum of every file's content. The list itself is known by its digest.
What is on disk and not in the list is a problem too, but for directories: one that a layer only passed
through has no record. A damaged tree is quarantined, and every stack that stands on it is dropped.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from unlade.errors import StoreError
from unlade.model import Deadline, Digest
from unlade.store import DirStore
from unlade.store.fsck import Problem, check_blobs, check_database, check_records, quarantine
from unlade.tree.attributes import is_whiteout, open_directory, open_file
from unlade.tree.dirtrees import DirTrees, TreeDetail, decode_detail
from unlade.tree.listing import Listing
from unlade.unpack.checksum import crc32
from unlade.unpack.filelist import FileRecord

_CHUNK: Final = 1 << 20
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TYPES: Final = {"f": stat.S_ISREG, "d": stat.S_ISDIR, "l": stat.S_ISLNK}
# Not every file system keeps nanoseconds; rot does not stop at the second.
_SECOND: Final = 1_000_000_000


def fsck(store: DirStore, *, repair: bool = False, deadline: Deadline | None = None) -> list[Problem]:
    """Check every byte and record of a store; with `repair`, quarantine and drop what is damaged.

    After a repair a second check finds nothing, and pulling the same references again brings all back.
    """
    deadline = deadline or Deadline.never()
    problems = list(check_database(store))
    if problems:
        # What an unreadable database says about the rest is not worth hearing.
        return problems
    problems += check_blobs(store, repair=repair, deadline=deadline)
    problems += check_trees(store, repair=repair, deadline=deadline)
    problems += check_records(store, repair=repair)
    return problems


def check_trees(store: DirStore, *, repair: bool, deadline: Deadline) -> Iterator[Problem]:
    """Every tree against its list, and every stack against its layers."""
    trees = DirTrees(store)
    stacks: list[tuple[Digest, TreeDetail]] = []
    for key, detail in _all_trees(store):
        if isinstance(detail, str):
            yield _damaged(store, key, detail, repair=repair)
            continue
        if detail.layers:
            stacks.append((key, detail))
        if not detail.layers or detail.own_root:
            wrong = _what_is_wrong(trees, key, detail, deadline)
            # Deleted while we looked: gone is not damaged.
            if wrong is not None and trees.find(key) is not None:
                yield _damaged(store, key, wrong, repair=repair)
    for key, detail in stacks:
        missing = [layer for layer in detail.layers if trees.find(Digest.parse(layer)) is None]
        if missing and trees.find(key) is not None:
            yield _damaged(store, key, f"its layer {missing[0]} is not there", repair=repair)


def _all_trees(store: DirStore) -> Iterator[tuple[Digest, TreeDetail | str]]:
    with store.database.read() as connection:
        rows = connection.execute(
            "SELECT name, detail FROM objects WHERE name > 't:' AND name < 't;'"
        ).fetchall()
    for name, text in rows:
        try:
            yield Digest.parse(name[2:]), decode_detail(text)
        except msgspec.DecodeError as error:
            yield Digest.parse(name[2:]), f"its record cannot be read: {error}"


def _damaged(store: DirStore, key: Digest, what: str, *, repair: bool) -> Problem:
    if repair:
        quarantine(store, f"t:{key}")
    step = "deliver what needs it again" if repair else "run with --repair, then deliver what needs it again"
    return Problem("tree-damaged", str(key), f"{what}; {step}", repair)


def _what_is_wrong(trees: DirTrees, key: Digest, detail: TreeDetail, deadline: Deadline) -> str | None:
    try:
        with open(trees.files(key), "rb") as files:
            if f"sha256:{hashlib.file_digest(files, 'sha256').hexdigest()}" != detail.files:
                return "its file list is damaged"
            files.seek(0)
            return compare(trees.store.layout.tree(key) / "root", files, deadline=deadline)
    except OSError as error:
        return f"cannot be read: {error}"


def compare(path: Path, files: Iterable[bytes], *, deadline: Deadline) -> str | None:
    """The first difference between a tree's directory and its file list, in words; None: they agree."""
    try:
        listing = {record.path: record for record in Listing.of(files)}
        root = os.open(path, _DIRECTORY)
    except (OSError, StoreError) as error:
        return f"cannot be read: {error}"
    try:
        return _Check(listing, deadline).run(root)
    except OSError as error:
        return f"cannot be read: {error}"
    finally:
        os.close(root)


class _Check:
    """One pass over a tree's directories; stops at the first difference."""

    def __init__(self, listing: dict[bytes, FileRecord], deadline: Deadline) -> None:
        self._left = listing
        self._deadline = deadline
        self._buffer = memoryview(bytearray(_CHUNK))
        # Files with several names are read once.
        self._known: dict[tuple[int, int], int] = {}

    def run(self, root: int) -> str | None:
        wrong = self._entry(b"", os.fstat(root), root, b".") or self._directory(root)
        if wrong is None and self._left:
            name = next(iter(self._left))
            return f"{os.fsdecode(name)!r} is missing"
        return wrong

    def _directory(self, root: int) -> str | None:
        todo: list[tuple[bytes, int, os.stat_result]] = [(b"", os.dup(root), os.fstat(root))]
        try:
            while todo:
                self._deadline.check()
                path, fd, before = todo.pop()
                try:
                    for child in os.listdir(fd):
                        name = os.fsencode(child)
                        below = path + b"/" + name if path else name
                        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                        wrong = self._entry(below, info, fd, name)
                        if wrong:
                            return wrong
                        if stat.S_ISDIR(info.st_mode):
                            todo.append((below, *open_directory(fd, name)))
                finally:
                    _close(fd, before)
        finally:
            for _, fd, before in todo:
                _close(fd, before)
        return None

    def _entry(self, path: bytes, info: os.stat_result, dirfd: int, name: bytes) -> str | None:
        record = self._left.pop(path, None)
        shown = repr(os.fsdecode(path))
        if record is None:
            return None if stat.S_ISDIR(info.st_mode) else f"{shown} is not in its file list"
        if record.type == "w":
            return None if is_whiteout(info) else f"{shown} is no whiteout"
        is_type = _TYPES.get(record.type)
        if is_type is None or not is_type(info.st_mode):
            return f"{shown} is of another kind"
        if record.type != "l" and stat.S_IMODE(info.st_mode) != record.mode:
            return f"{shown} has another mode"
        if (info.st_uid, info.st_gid) != (record.uid, record.gid):
            return f"{shown} has another owner"
        if info.st_mtime_ns // _SECOND != record.mtime_ns // _SECOND:
            return f"{shown} has another time"
        if record.type == "l" and os.readlink(name, dir_fd=dirfd) != record.link_target:
            return f"{shown} points elsewhere"
        if record.type == "f":
            if info.st_size != record.size:
                return f"{shown} has {info.st_size} bytes where {record.size} were written"
            if self._checksum(info, dirfd, name) != record.crc32:
                return f"{shown} has other bytes than were written"
        return None

    def _checksum(self, info: os.stat_result, dirfd: int, name: bytes) -> int:
        inode = (info.st_dev, info.st_ino)
        if inode in self._known:
            return self._known[inode]
        checksum = 0
        fd = open_file(dirfd, name)
        try:
            while count := os.readv(fd, [self._buffer]):
                self._deadline.check()
                checksum = crc32(self._buffer[:count], checksum)
        finally:
            os.close(fd)
        if info.st_nlink > 1:
            self._known[inode] = checksum
        return checksum


def _close(fd: int, before: os.stat_result) -> None:
    # An unprivileged owner had to open up a directory to look into it.
    if os.fstat(fd).st_mode != before.st_mode:
        os.fchmod(fd, stat.S_IMODE(before.st_mode))
    os.close(fd)
