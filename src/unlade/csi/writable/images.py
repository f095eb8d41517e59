"""The file behind a volume: an ext4 of exactly the size that was promised, in a sparse file.

Sparse, not preallocated: a pod that asks for 100 GiB and writes ten megabytes costs ten, which is what makes
a hundred volumes of one model cheap. What keeps promises then is `room`: every volume's unwritten bytes
count as taken, so volumes alone can never fill the disk. The file system in the file is made by us and never
comes from a registry: the kernel parses only what it wrote itself (docs/threats.md).

Needs mkfs.ext4, e2fsck and resize2fs (e2fsprogs). The upper directory gets the attributes of the tree's
root while the file system is made, so making a volume mounts nothing.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

from unlade.errors import StoreError
from unlade.kernel import failpoints, loops
from unlade.kernel.files import remove_tree
from unlade.store.failure import explaining
from unlade.store.layout import sync_directory
from unlade.tree.attributes import copy_attributes

IMAGE: Final = "image"
_STAGED: Final = "image.new"
_TEMPLATE: Final = "template"
UPPER: Final = "upper"
WORK: Final = "work"

BLOCK: Final = 4096
# Below this a journal, inode tables and the resize reserve leave nothing to write to.
MIN_SIZE: Final = 16 << 20
# What ext4 with 4 KiB blocks can be.
MAX_SIZE: Final = 16 << 40
# Journals are written round and round, so each volume's disk use comes to include its journal: 4 MiB (the
# smallest) is plenty for what one pod does to metadata, and a big volume can afford more.
_SMALL_JOURNAL: Final = 4
_JOURNAL: Final = 32
_BIG: Final = 4 << 30
# A fresh image's inode tables need not be zeroed: in a sparse file they are zeros.
_MKFS: Final = "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0"
_COPY_CHUNK: Final = 8 << 20


class ToolFailed(StoreError):
    """mkfs.ext4, e2fsck or resize2fs is missing or failed."""

    code = "file-system-tool"


def round_size(size: int) -> int:
    """The size a volume gets when this many bytes are asked for: whole blocks, and not absurdly small."""
    return max(MIN_SIZE, -(-size // BLOCK) * BLOCK)


def make(home: Path, size: int, root: str) -> None:
    """Make the image; `root` is the directory whose attributes the volume's root shall have. Durable."""
    staged, template = home / _STAGED, home / _TEMPLATE
    with explaining(f"make the file system of {home.name}"):
        remove_tree_at(template)
        template.mkdir(mode=0o700)
        for name in (UPPER, WORK):
            (template / name).mkdir(mode=0o755)
        _adopt(root, template / UPPER)
        fd = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            failpoints.reach("csi.writable.image-sized")
            journal = f"size={_JOURNAL if size >= _BIG else _SMALL_JOURNAL}"
            _run("mkfs.ext4", "-q", "-F", "-b", str(BLOCK), "-m", "0", "-J", journal, "-E", _MKFS,
                 "-d", str(template), str(staged))  # fmt: skip
            failpoints.reach("csi.writable.image-formatted")
            os.fsync(fd)
        finally:
            os.close(fd)
        remove_tree_at(template)
        _settle(home)


def copy(source: Path, home: Path) -> None:
    """Copy an image into a directory, holes left holes, blocks shared where the disk can. Durable.

    Nobody may write to the source meanwhile: see `filesystem.still`.
    """
    staged = home / _STAGED
    with explaining(f"copy {source}"):
        target = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not loops.clone(fd, target):
                    _copy_data(fd, target)
            finally:
                os.close(fd)
            failpoints.reach("csi.writable.image-copied")
            os.fsync(target)
        finally:
            os.close(target)
        _settle(home)


def extend(home: Path, size: int) -> None:
    """Make the file larger; the file system in it stays as it is. Durable, idempotent."""
    with explaining(f"extend the image of {home.name}"):
        fd = os.open(home / IMAGE, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
                os.fsync(fd)
        finally:
            os.close(fd)
    failpoints.reach("csi.writable.image-extended")


def grow_unmounted(home: Path) -> None:
    """Let the file system fill its file; nobody may have it mounted. Safe to repeat after a crash."""
    image = str(home / IMAGE)
    # resize2fs wants a fresh check. It exits with 1 when it corrected something (a journal replayed).
    _run("e2fsck", "-f", "-p", image, fine=(0, 1))
    failpoints.reach("csi.writable.image-checked")
    _run("resize2fs", image)
    failpoints.reach("csi.writable.image-grown")


def usable(home: Path) -> int:
    """Bytes that a pod can write into the image as it is now, from its superblock."""
    with open(home / IMAGE, "rb") as image:
        image.seek(1024)
        block = image.read(1024)
    low = struct.unpack_from("<I", block, 12)[0]
    high = struct.unpack_from("<I", block, 0x158)[0]
    size = 1024 << struct.unpack_from("<I", block, 24)[0]
    return int(((high << 32) | low) * size)


def allocated(home: Path) -> int:
    """Bytes of disk that the image takes; 0 when there is none."""
    try:
        return os.stat(home / IMAGE).st_blocks * 512
    except FileNotFoundError:
        return 0


def remove(home: Path) -> None:
    """Remove the image and whatever its making left; idempotent."""
    for name in (_STAGED, IMAGE):
        (home / name).unlink(missing_ok=True)
    remove_tree_at(home / _TEMPLATE)


def remove_tree_at(path: Path) -> None:
    """Remove a directory and all below it, following no link."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_tree(fd, os.fsencode(path.name))
    finally:
        os.close(fd)


def _settle(home: Path) -> None:
    os.rename(home / _STAGED, home / IMAGE)
    failpoints.reach("csi.writable.image-renamed")
    sync_directory(home)


def _adopt(source: str, target: Path) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    source_fd = os.open(source, flags)
    try:
        target_fd = os.open(target, flags)
        try:
            copy_attributes(source_fd, target_fd, os.fstat(source_fd))
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)


def _copy_data(source: int, target: int) -> None:
    end = os.fstat(source).st_size
    os.ftruncate(target, end)
    at = 0
    while at < end:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        hole = os.lseek(source, at, os.SEEK_HOLE)
        os.lseek(source, at, os.SEEK_SET)
        os.lseek(target, at, os.SEEK_SET)
        while at < hole:
            sent = os.sendfile(target, source, None, min(_COPY_CHUNK, hole - at))
            if sent == 0:
                return
            at += sent


def _run(tool: str, *arguments: str, fine: tuple[int, ...] = (0,)) -> None:
    # A service's PATH may lack the directories of administrators' tools, where these are.
    program = shutil.which(tool, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if program is None:
        raise ToolFailed(f"{tool} is not installed", next_step="install e2fsprogs on the node")
    done = subprocess.run([program, *arguments], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode not in fine:
        text = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise ToolFailed(
            f"{tool} failed ({done.returncode}): {text[-400:]}",
            next_step="look at the node's disk and at the kernel's log",
        )
