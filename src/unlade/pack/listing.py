"""What a directory on disk holds, as the sorted list of entries that a tar of it will have.

Owns the walk and every decision about what may be packed: names are bytes and sorted as bytes, so that
the order in which a file system returns them never shows; permissions are reduced to "may be executed or
not" unless the caller keeps them, so that neither umask nor checkout tool changes a digest. The
invariant: a listing says exactly what will be written, sizes included, so that a tar's length is known
before its first byte is read.

Links: a symbolic link is kept as it is written; where the layer will be an artifact's it must stay inside
the tree, because every puller that takes care refuses the others. Two names of one file are two files in
an artifact (other tools look for a hard link's target in their working directory) and a hard link in an
image.

Called by `layer.pack_tree` and, for a tar on standard output, by the command line.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from unlade.errors import InvalidInput

Kind = Literal["dir", "file", "symlink", "hardlink"]

# Pullers refuse entries with more directories above them (unpack.Limits.max_depth); so does a push.
MAX_DEPTH = 128
# What image layers reserve: a name with this prefix deletes another file when the layer is unpacked.
WHITEOUT_PREFIX = b".wh."


class UnpackableSource(InvalidInput):
    """Something in the directory cannot be packed; the message names it."""

    code = "unpackable-source"


class SourceChanged(InvalidInput):
    """A file changed between being listed and being read; nothing was published."""

    code = "source-changed"
    retryable = True


@dataclass(frozen=True, slots=True)
class PackPolicy:
    """How a tree is turned into entries; the defaults give one digest on every machine."""

    prefix: bytes = b""
    """A directory name put before every entry (and itself an entry); empty: the tree is the root."""
    mtime: int = 0
    """Every entry's time, in seconds, unless `keep_times`."""
    keep_modes: bool = False
    keep_times: bool = False
    keep_owners: bool = False
    hard_links: bool = False
    contained_links: bool = True
    """Refuse symbolic links that lead out of the tree (artifacts)."""
    refuse_whiteouts: bool = False
    """Refuse names that an image layer would read as deletions."""
    exclude: Callable[[bytes], bool] | None = None
    """Leaves out every entry (and all below it) whose path relative to the directory this accepts."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry to be: its name in the archive, and for a file the path its bytes are read from."""

    name: bytes
    kind: Kind
    mode: int
    size: int = 0
    link: bytes = b""
    mtime: int = 0
    uid: int = 0
    gid: int = 0
    path: bytes = b""
    identity: tuple[int, int, int] = (0, 0, 0)
    """Device, inode and mtime in ns when listed: reading checks them again."""


def list_tree(directory: str | bytes | os.PathLike[str], policy: PackPolicy) -> list[Entry]:
    """Every entry of the directory, parents before children, in the order of their names' bytes.

    Raises UnpackableSource for what no layer can hold. An empty directory gives an empty list.
    """
    root = os.fsencode(directory)
    try:
        info = os.stat(root)
    except OSError as error:
        raise UnpackableSource(
            f"{os.fsdecode(root)}: {error.strerror}", next_step="name an existing directory"
        ) from error
    if not stat.S_ISDIR(info.st_mode):
        raise UnpackableSource(f"{os.fsdecode(root)} is not a directory", next_step="name a directory")
    lister = _Lister(root, policy)
    if policy.prefix:
        lister.entries.append(lister.attributes(policy.prefix, "dir", info))
    lister.walk(root, policy.prefix, b"", 0)
    return lister.entries


class _Lister:
    def __init__(self, root: bytes, policy: PackPolicy) -> None:
        self.root = root
        self.policy = policy
        self.entries: list[Entry] = []
        self._first_name: dict[tuple[int, int], bytes] = {}

    def walk(self, path: bytes, name: bytes, relative: bytes, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise UnpackableSource(
                f"{os.fsdecode(path)} is more than {MAX_DEPTH} directories deep",
                next_step="look for a loop of mounts",
            )
        try:
            with os.scandir(path) as found:
                children = sorted(found, key=lambda child: child.name)
        except OSError as error:
            raise _unreadable(path, error) from error
        for child in children:
            child_relative = relative + b"/" + child.name if relative else child.name
            if self.policy.exclude is not None and self.policy.exclude(child_relative):
                continue
            child_name = name + b"/" + child.name if name else child.name
            if self.policy.refuse_whiteouts and child.name.startswith(WHITEOUT_PREFIX):
                raise UnpackableSource(
                    f"{os.fsdecode(child.path)}: an image layer reads this name as a deletion",
                    next_step="rename it, or push an artifact (without --image)",
                )
            try:
                info = child.stat(follow_symlinks=False)
            except OSError as error:
                raise _unreadable(child.path, error) from error
            mode = info.st_mode
            if stat.S_ISDIR(mode):
                self.entries.append(self.attributes(child_name, "dir", info))
                self.walk(child.path, child_name, child_relative, depth + 1)
            elif stat.S_ISREG(mode):
                self.entries.append(self._file(child.path, child_name, info))
            elif stat.S_ISLNK(mode):
                self.entries.append(self._symlink(child.path, child_name, child_relative, info))
            else:
                raise UnpackableSource(
                    f"{os.fsdecode(child.path)} is {_special(mode)}, which no layer can hold",
                    next_step="remove it: only directories, files and links are packed",
                )

    def _file(self, path: bytes, name: bytes, info: os.stat_result) -> Entry:
        if self.policy.hard_links and info.st_nlink > 1:
            key = (info.st_dev, info.st_ino)
            first = self._first_name.setdefault(key, name)
            if first != name:
                return self.attributes(name, "hardlink", info, link=first)
        return self.attributes(
            name,
            "file",
            info,
            size=info.st_size,
            path=path,
            identity=(info.st_dev, info.st_ino, info.st_mtime_ns),
        )

    def _symlink(self, path: bytes, name: bytes, relative: bytes, info: os.stat_result) -> Entry:
        try:
            target = os.readlink(path)
        except OSError as error:
            raise _unreadable(path, error) from error
        if self.policy.contained_links and not _stays_inside(relative, target):
            raise UnpackableSource(
                f"{os.fsdecode(path)} links to {os.fsdecode(target)}, outside the directory",
                next_step="make the link relative and inside, remove it, or push an image with --image",
            )
        return self.attributes(name, "symlink", info, link=target)

    def attributes(
        self,
        name: bytes,
        kind: Kind,
        info: os.stat_result,
        *,
        size: int = 0,
        link: bytes = b"",
        path: bytes = b"",
        identity: tuple[int, int, int] = (0, 0, 0),
    ) -> Entry:
        policy = self.policy
        return Entry(
            name,
            kind,
            _mode(kind, info.st_mode, policy.keep_modes),
            size,
            link,
            int(info.st_mtime) if policy.keep_times else policy.mtime,
            info.st_uid if policy.keep_owners else 0,
            info.st_gid if policy.keep_owners else 0,
            path,
            identity,
        )


def _mode(kind: Kind, mode: int, keep: bool) -> int:
    if kind == "symlink":
        return 0o777
    if keep:
        return stat.S_IMODE(mode)
    # As git does: the owner's execute bit is the only one that belongs to the content.
    return 0o755 if kind == "dir" or mode & stat.S_IXUSR else 0o644


def _stays_inside(relative: bytes, target: bytes) -> bool:
    """Whether a link at `relative`, read as text, leads to a place below the root."""
    if target.startswith(b"/"):
        return False
    depth = relative.count(b"/")
    for part in target.split(b"/"):
        if part == b"..":
            depth -= 1
            if depth < 0:
                return False
        elif part not in (b"", b"."):
            depth += 1
    return True


def _special(mode: int) -> str:
    if stat.S_ISSOCK(mode):
        return "a socket"
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    return "a device"


def _unreadable(path: bytes, error: OSError) -> InvalidInput:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return SourceChanged(f"{os.fsdecode(path)} vanished while it was read", next_step="push again")
    return UnpackableSource(
        f"{os.fsdecode(path)}: {error.strerror}", next_step="make it readable or leave it out"
    )
