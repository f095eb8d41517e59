"""Putting parts together: which directory each one is unpacked into, and how they are laid over another.

A `Target` is the staging of what will be delivered: a tree of the store, or a directory of the caller's
own. One part goes straight into it; several get scratch directories inside it and are merged in order by
renames. The parts of one source merge with their whiteouts; sources merge with each other without, so no
reference can hide another's files (V17). A subset (`only`) is cut out of a source before it is merged.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final, Generic, Protocol, TypeVar

import msgspec

from unlade.errors import NothingProduced
from unlade.kernel.files import remove_tree
from unlade.model import Deadline, DiffID, Digest
from unlade.planning import Plan, Step, subset
from unlade.unpack import Unpacked
from unlade.unpack.filelist import FileListWriter

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Merging asks what a layer hides, never what it was made from.
_NO_ARCHIVE: Final = DiffID(Digest.of(b""))


class Directory(Protocol):
    """A directory being filled, and where its file list goes when one is kept."""

    @property
    def dirfd(self) -> int:
        """The directory."""

    @property
    def files_out(self) -> BinaryIO | None:
        """Takes a record per entry."""


_S = TypeVar("_S", bound=Directory)


class Target(Directory, Protocol[_S]):
    """The staging of a delivery."""

    def scratch(self) -> _S:
        """A directory beside it for one part; gone with the staging."""

    def merge(self, scratch: _S, unpacked: Unpacked, *, deadline: Deadline) -> None:
        """Move a filled scratch directory over what is there so far."""


@dataclass(slots=True)
class Part:
    """One archive, or a run of single files; `unpacked` tells what became of it once it is there."""

    steps: list[Step]
    number: int = 0
    place: Directory | None = None
    unpacked: Unpacked | None = None
    size: int = 0
    entries: int = 0
    _parents: set[bytes] = field(default_factory=lambda: {b""})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def directory(self) -> Directory:
        """Where it goes."""
        assert self.place is not None
        return self.place

    @property
    def effect(self) -> Unpacked:
        """What merging must know. Single files have directories without entries of their own."""
        return self.unpacked or Unpacked(0, 0, _NO_ARCHIVE, implicit_dirs=tuple(sorted(self._parents)))

    def add_file(self, path: str, info: os.stat_result, crc32: int) -> None:
        """Note a single file that was written; thread-safe."""
        name = path.encode("utf-8", "surrogateescape")
        with self._lock:
            self.size += info.st_size
            self.entries += 1
            parent = name.rpartition(b"/")[0]
            while parent not in self._parents:
                self._parents.add(parent)
                parent = parent.rpartition(b"/")[0]
            if self.directory.files_out is not None:
                writer = FileListWriter(self.directory.files_out)
                mode = stat.S_IMODE(info.st_mode)
                text = name.decode("latin-1")
                writer.add("f", text, mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_size, crc32)
                writer.flush()


class Assembly(Generic[_S]):
    """The parts of one plan and their places in one target."""

    def __init__(self, plan: Plan, target: Target[_S]) -> None:
        self._plan = plan
        self._target = target
        self._groups = [
            _parts(step for step in plan.active() if step.source == i) for i in range(len(plan.sources))
        ]
        self.parts = [part for group in self._groups for part in group]
        self._direct = len(self.parts) == 1 and not any(source.only for source in plan.sources)
        self._scratch: dict[int, _S] = {}
        for number, part in enumerate(self.parts):
            if self._direct:
                part.place = target
            else:
                part.place = self._scratch[number] = target.scratch()
            part.number = number

    def merge(self, deadline: Deadline) -> None:
        """Lay everything over each other, in order; call it once every part is there."""
        if self._direct:
            return
        several = sum(1 for group in self._groups if group) > 1
        for source, group in zip(self._plan.sources, self._groups, strict=True):
            if not group:
                continue
            if several or source.only:
                self._merge_source(group, source.only, deadline)
            else:
                for part in group:
                    self._target.merge(self._scratch[part.number], part.effect, deadline=deadline)

    def measure(self, deadline: Deadline) -> tuple[int, int]:
        """Bytes and entries of the result; call it after `merge`. What was replaced or cut does not count."""
        if self._direct:
            return self.parts[0].size, self.parts[0].entries
        return _measure(self._target.dirfd, set(), deadline)

    def _merge_source(self, group: Sequence[Part], only: tuple[str, ...], deadline: Deadline) -> None:
        from unlade.tree import merge_into
        from unlade.tree.listing import Listing

        base = self._scratch[group[0].number]
        implicit = set(group[0].effect.implicit_dirs)
        if len(group) > 1:
            listed = Listing() if base.files_out is not None else None
            for part in group:
                if listed is not None and part.directory.files_out is not None:
                    part.directory.files_out.seek(0)
                    listed.add_layer(part.directory.files_out, part.effect)
                if part is not group[0]:
                    merge_into(base.dirfd, part.directory.dirfd, part.effect, deadline=deadline)
                    implicit &= set(part.effect.implicit_dirs)
            if listed is not None and base.files_out is not None:
                base.files_out.seek(0)
                base.files_out.truncate()
                listed.write(base.files_out)
        if only:
            kept = _keep_only(base.dirfd, only, deadline)
            if base.files_out is not None:
                _filter_list(base.files_out, kept)
        told = Unpacked(0, 0, _NO_ARCHIVE, implicit_dirs=tuple(sorted(implicit)))
        self._target.merge(base, told, deadline=deadline)


def _parts(steps: Iterator[Step]) -> list[Part]:
    parts: list[Part] = []
    for step in steps:
        if step.action == "file" and parts and parts[-1].steps[0].action == "file":
            parts[-1].steps.append(step)
        else:
            parts.append(Part([step]))
    return parts


def _filter_list(files: BinaryIO, kept: set[bytes]) -> None:
    from unlade.tree.listing import Listing

    files.seek(0)
    wanted = [record for record in Listing.of(files) if record.path in kept]
    files.seek(0)
    files.truncate()
    writer = FileListWriter(files)
    for record in wanted:
        writer.add(*msgspec.structs.astuple(record))
    writer.flush()


def _keep_only(root: int, only: tuple[str, ...], deadline: Deadline) -> set[bytes]:
    """Remove what the globs do not name; directories stay where something below them does."""
    kept: set[bytes] = set()
    if not _prune(root, b"", only, kept, deadline):
        raise NothingProduced(
            f"nothing in the content matches {', '.join(only)}", next_step="`unlade plan REF` lists the paths"
        )
    return kept


def _prune(fd: int, prefix: bytes, only: tuple[str, ...], kept: set[bytes], deadline: Deadline) -> bool:
    any_kept = False
    for entry in os.listdir(fd):
        deadline.check()
        name = os.fsencode(entry)
        path = prefix + name
        if subset.matches(only, os.fsdecode(path)):
            kept.update(_everything_below(fd, name, path))
            any_kept = True
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            child = os.open(name, _DIRECTORY, dir_fd=fd)
            try:
                inside = _prune(child, path + b"/", only, kept, deadline)
            finally:
                os.close(child)
            if inside:
                kept.add(path)
                any_kept = True
                continue
        remove_tree(fd, name)
    return any_kept


def _measure(fd: int, seen: set[int], deadline: Deadline) -> tuple[int, int]:
    """Bytes and entries below a directory; a file of several names has its bytes once."""
    size = entries = 0
    for name in os.listdir(fd):
        deadline.check()
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        entries += 1
        if stat.S_ISDIR(info.st_mode):
            try:
                child = os.open(name, _DIRECTORY, dir_fd=fd)
            except PermissionError:
                continue  # a directory that its unprivileged owner closed to himself
            try:
                inside = _measure(child, seen, deadline)
            finally:
                os.close(child)
            size, entries = size + inside[0], entries + inside[1]
        elif stat.S_ISREG(info.st_mode) and info.st_ino not in seen:
            if info.st_nlink > 1:
                seen.add(info.st_ino)
            size += info.st_size
    return size, entries


def _everything_below(dirfd: int, name: bytes, path: bytes) -> Iterator[bytes]:
    yield path
    if stat.S_ISDIR(os.stat(name, dir_fd=dirfd, follow_symlinks=False).st_mode):
        fd = os.open(name, _DIRECTORY, dir_fd=dirfd)
        try:
            for entry in os.listdir(fd):
                child = os.fsencode(entry)
                yield from _everything_below(fd, child, path + b"/" + child)
        finally:
            os.close(fd)
