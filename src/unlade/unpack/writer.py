"""Entries become files, beneath one directory and by descriptor only.

The writer takes each entry of a `TarReader` and makes it: create new, never open what is there; remove
what has the name already (last wins) without following it; owner, attributes, mode and time through the
descriptor that was created. Content goes from the inflated block straight to write(2), with a checksum on
the way. What an entry may be is decided by the rules: an artifact with a device, an absolute name or a way
through a link is refused whole; an image gets runtimes' behaviour inside its own layer. `run` is called by
`unpack` on the writing thread, once per archive.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import TYPE_CHECKING, Final

from unlade.errors import UnsafeArchive
from unlade.kernel import files
from unlade.kernel.beneath import open_beneath
from unlade.model.deadline import Deadline
from unlade.model.digest import DiffID
from unlade.unpack import raw, safe_path, tar
from unlade.unpack.checksum import crc32
from unlade.unpack.places import Place, Places
from unlade.unpack.policy import Unpacked, UnpackPolicy
from unlade.unpack.refusals import (
    LimitExceeded,
    UnsafeLink,
    UnsafeName,
    UnsupportedEntry,
    cannot_write,
    show,
)
from unlade.unpack.whiteouts import MARK, Whiteouts

if TYPE_CHECKING:
    from unlade.unpack.filelist import FileListWriter
    from unlade.unpack.tar import TarReader

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK: Final = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC
_SETID: Final = stat.S_ISUID | stat.S_ISGID
_OVERLAY: Final = (b"trusted.overlay.", b"user.overlay.")
_CAPABILITY: Final = b"security.capability"


class Writer:
    """Writes one archive's entries beneath a destination: `run` once, then `unpacked`."""

    def __init__(
        self, destination: int, policy: UnpackPolicy, deadline: Deadline, records: FileListWriter | None
    ) -> None:
        self._bytes = 0
        self._pending: dict[bytes, bytes] = {}
        self._skipped: dict[bytes, None] = {}
        self._policy = policy
        self._deadline = deadline
        self._records = records
        self._image = policy.rules == "image"
        self._keep_owner = policy.owners == "keep"
        # A set-id bit on a file whose owner we changed would lend out the wrong identity: ours.
        self._mode_mask = 0o7777 if policy.setid and self._keep_owner else 0o7777 & ~_SETID
        self._destination = destination
        self._base = policy.prefix + b"/" if policy.prefix else b""  # before every name that is reported
        root = raw.descend(destination, safe_path.check(policy.prefix) if policy.prefix else ())
        try:
            self._places = Places(root, policy.rules, policy.limits)
        finally:
            os.close(root)
        self._whiteouts = Whiteouts(self._places)
        self._uid, self._gid = os.geteuid(), os.getegid()
        # Bits that creation may lose (the umask; everything under a default ACL): set again by fchmod.
        # Under a setgid directory new files get its group, and directories the bit itself.
        self._lost_bits = _creation_loses(self._places.root.fd) | ~0o777
        self._inherits = bool(os.fstat(self._places.root.fd).st_mode & stat.S_ISGID)
        self._links: list[bytes] = []  # symbolic links of an artifact, judged at the end
        self._has_root = False
        self._removed_directory = False

    def run(self, reader: TarReader) -> None:
        """Write every entry, then what can only be done at the end."""
        name = b""
        try:
            try:
                while reader.advance():
                    name = reader.name
                    self._deadline.check()
                    self._entry(reader)
                    name = b""  # a header that cannot be read is not this entry's fault
                self._finish()
            finally:
                self.close()
        except OSError as error:
            raise cannot_write(error, name or None) from error
        except UnsafeArchive as error:
            if name and show(name) not in error.message:
                error.message += f" (entry {show(name)})"
            raise

    def close(self) -> None:
        """Close every descriptor, putting directories' times back; idempotent."""
        self._places.close()

    def unpacked(self, entries: int, diff_id: DiffID) -> Unpacked:
        """The account of a finished run."""
        base = self._base
        implicit = self._places.implicit if self._has_root else {b"": None, **self._places.implicit}
        return Unpacked(
            entries=entries,
            bytes=self._bytes,
            diff_id=diff_id,
            whiteouts=tuple(base + name for name in self._whiteouts.hidden),
            opaques=tuple((base + name).rstrip(b"/") for name in self._whiteouts.opaque),
            pending_links=tuple((base + name, base + target) for name, target in self._pending.items()),
            implicit_dirs=tuple((base + name).rstrip(b"/") for name in implicit),
            skipped=tuple(base + name for name in self._skipped),
        )

    def _entry(self, reader: TarReader) -> None:
        unsafe_name = reader.name.rstrip(b"/")
        unsafe_parent, _, name = unsafe_name.rpartition(b"/")
        if (
            name in (b"", b".", b"..")
            or unsafe_name[0] == 0x2F
            or len(unsafe_name) > self._policy.limits.max_name
        ):
            # Not the plain relative name that nearly every entry has.
            if not reader.name:
                raise UnsafeName("an entry without a name")
            parts = self._places.parts(reader.name)
            if not parts:
                self._root(reader)
                return
            unsafe_parent, name = b"/".join(parts[:-1]), parts[-1]
            unsafe_name = b"/".join(parts)
        if self._image and MARK in unsafe_name and self._whiteouts.take(unsafe_name, unsafe_parent, name):
            return
        place = self._places.parent(unsafe_parent)
        kind = reader.kind
        if kind == tar.FILE:
            self._file(reader, place, name)
        elif kind == tar.DIRECTORY:
            self._directory(reader, place, name)
        elif kind == tar.SYMLINK:
            self._symlink(reader, place, name)
        elif kind == tar.HARD_LINK:
            self._hard_link(reader, place, name)
        else:
            self._device(place, name)

    def _file(self, reader: TarReader, place: Place, name: bytes) -> None:
        mode = reader.mode & self._mode_mask
        try:
            fd = os.open(name, _NEW_FILE, mode & 0o777, dir_fd=place.fd)
        except FileExistsError:
            self._clear(place, name)
            fd = os.open(name, _NEW_FILE, mode & 0o777, dir_fd=place.fd)
        try:
            size, checksum = reader.size, 0
            if size:
                left = size
                while left:
                    piece = reader.piece()
                    left -= len(piece)
                    checksum = crc32(piece, checksum)
                    while (written := os.write(fd, piece)) < len(piece):
                        piece = piece[written:]
                    if left:
                        self._deadline.check()
            uid, gid = self._dress(fd, reader, mode)
            os.utime(fd, ns=(reader.mtime_ns, reader.mtime_ns))
        finally:
            os.close(fd)
        self._bytes += size
        if self._pending:
            self._pending.pop(place.prefix + name, None)
        if self._records is not None:
            path = self._base + place.prefix + name
            self._records.add("f", path.decode("latin-1"), mode, uid, gid, reader.mtime_ns, size, checksum)

    def _directory(self, reader: TarReader, place: Place, name: bytes) -> None:
        path = place.prefix + name
        mode = reader.mode & self._mode_mask
        # Entered and written by us until the end, whatever its mode: only then is the mode its own.
        first_mode = mode & 0o777 | stat.S_IRWXU
        known: Place | None = None
        again = replaced = False
        try:
            os.mkdir(name, first_mode, dir_fd=place.fd)
        except FileExistsError:
            if stat.S_ISDIR(os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_mode):
                known = self._places.directory(path)
                assert known is not None, "it was there a line ago and is ours alone"
                _strip_xattrs(known.fd)
                again = True
            else:
                self._clear(place, name)
                os.mkdir(name, first_mode, dir_fd=place.fd)
                replaced = True
        if (self._pending.pop(path, None) is not None or replaced) and self._image:
            # Something else had this name in the layer before, and ended any lower directory's content.
            self._whiteouts.hide(path)
        self._places.implicit.pop(path, None)
        self._places.closed.pop(path, None)
        if known is None:
            fd = os.open(name, _DIRECTORY, dir_fd=place.fd)
            known = self._places.adopt(fd, path, reader.mtime_ns)
        known.mtime_ns = reader.mtime_ns
        uid, gid = self._dress(known.fd, reader, mode | stat.S_IRWXU, again=again)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            self._places.closed[path if again else self._places.note(path)] = mode
        if mode & stat.S_ISGID:
            self._inherits = True
        if self._records is not None:
            self._records.add("d", (self._base + path).decode("latin-1"), mode, uid, gid, reader.mtime_ns)

    def _root(self, reader: TarReader) -> None:
        """An entry for the destination itself: its attributes, and never anything but a directory."""
        if reader.kind != tar.DIRECTORY:
            # CVE-2021-29136: the root as a link or file would redirect everything after it.
            raise UnsafeName(f"the root {show(reader.name)} is not a directory")
        root = self._places.root
        mode = reader.mode & self._mode_mask
        if not self._image:
            mode |= stat.S_IRWXU  # an artifact has no say in whether its reader may enter
        uid, gid = self._dress(root.fd, reader, mode, again=True)
        if mode & stat.S_ISGID:
            self._inherits = True
        root.mtime_ns = reader.mtime_ns
        self._has_root = True
        if self._records is not None:
            self._records.add("d", self._policy.prefix.decode("latin-1"), mode, uid, gid, reader.mtime_ns)

    def _symlink(self, reader: TarReader, place: Place, name: bytes) -> None:
        target = reader.link
        path = place.prefix + name
        if not target or b"\0" in target or len(target) > self._policy.limits.max_name:
            raise UnsafeLink(f"the link {show(path)} has a target that is empty or too long")
        if not self._image:
            self._check_target(path, target)
            self._links.append(self._places.note(path))
        try:
            os.symlink(target, name, dir_fd=place.fd)
        except FileExistsError:
            self._clear(place, name)
            os.symlink(target, name, dir_fd=place.fd)
        uid, gid = self._uid, self._gid
        if self._keep_owner:
            uid, gid = reader.uid, reader.gid
            if self._inherits or uid != self._uid or gid != self._gid:
                os.chown(name, uid, gid, dir_fd=place.fd, follow_symlinks=False)
        if reader.xattrs:
            for key, value in self._allowed_xattrs(reader.xattrs):
                try:
                    files.set_link_xattr(place.fd, name, key, value)
                except OSError as error:
                    # A link has no user.* attributes; what it may have, the file system may lack.
                    if error.errno not in (errno.ENOTSUP, errno.EPERM):
                        raise
        os.utime(name, ns=(reader.mtime_ns, reader.mtime_ns), dir_fd=place.fd, follow_symlinks=False)
        self._pending.pop(path, None)
        if self._records is not None:
            shown, link = (self._base + path).decode("latin-1"), target.decode("latin-1")
            self._records.add("l", shown, 0o777, uid, gid, reader.mtime_ns, 0, 0, link)

    def _hard_link(self, reader: TarReader, place: Place, name: bytes) -> None:
        path = place.prefix + name
        unsafe_target = reader.link
        if not unsafe_target:
            raise UnsafeLink(f"the hard link {show(path)} has no target")
        try:
            parts = self._places.parts(unsafe_target)
        except UnsafeName as error:
            raise UnsafeLink(f"the hard link {show(path)} leads out: {error}") from None
        if not parts:
            raise UnsafeLink(f"the hard link {show(path)} names the root")
        unsafe_parent, target_name = b"/".join(parts[:-1]), parts[-1]
        target = self._places.canonical(unsafe_parent) + target_name
        if target == path:
            raise UnsafeLink(f"the hard link {show(path)} names itself")
        if not self._link(unsafe_parent, target_name, place, name):
            if not self._image:
                raise UnsafeLink(f"the hard link {show(path)} has no target {show(target)}")
            # A file of a lower layer, perhaps: whoever stacks the layers knows. This name is free for it.
            self._clear(place, name)
            self._pending[self._places.note(path)] = self._places.note(target)
        else:
            self._pending.pop(path, None)
        if self._records is not None:
            shown, link = (self._base + path).decode("latin-1"), (self._base + target).decode("latin-1")
            self._records.add("h", shown, 0, 0, 0, 0, 0, 0, link)

    def _link(self, unsafe_parent: bytes, target_name: bytes, place: Place, name: bytes) -> bool:
        """Make a hard link inside the tree; False when its target does not exist. Links are not followed."""
        for attempt in range(2):
            source = self._places.existing(unsafe_parent)
            if source is None:
                return False
            if source.prefix + target_name in self._pending:
                return False
            try:
                os.link(target_name, name, src_dir_fd=source.fd, dst_dir_fd=place.fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
            except FileExistsError:
                if attempt:
                    raise
                self._clear(place, name)  # may take the target with it; then the next try says so
            except OSError as error:
                if error.errno == errno.EPERM:
                    raise UnsafeLink(f"{show(place.prefix + name)} is a hard link to a directory") from None
                raise
            else:
                return True
        return False

    def _device(self, place: Place, name: bytes) -> None:
        path = place.prefix + name
        if not self._image:
            raise UnsupportedEntry(
                f"{show(path)} is a device or FIFO, which an artifact may not contain",
                next_step="the publisher must leave it out",
            )
        # Trees are mounted nodev: a node would be dead anyway. It hides what lies below, as it should.
        self._clear(place, name)
        self._whiteouts.hide(path)
        self._pending.pop(path, None)
        self._skipped[self._places.note(path)] = None
        if self._records is not None:
            self._records.add("x", (self._base + path).decode("latin-1"))

    def _clear(self, place: Place, name: bytes) -> None:
        """Remove what has this name, of any kind, following nothing."""
        try:
            mode = os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            self._removed_directory = True
            self._places.forget_below(place.prefix + name)
            files.remove_tree(place.fd, name)
        else:
            os.unlink(name, dir_fd=place.fd)
            if stat.S_ISLNK(mode):
                self._places.forget_spellings()

    def _dress(self, fd: int, reader: TarReader, mode: int, *, again: bool = False) -> tuple[int, int]:
        """Owner, then attributes, then mode: chown clears set-id bits and capabilities.

        What creation already gave is not set again, unless this is not the first entry of the name.
        """
        uid, gid = self._uid, self._gid
        if self._keep_owner:
            uid, gid = reader.uid, reader.gid
            if uid != self._uid or gid != self._gid or self._inherits or again:
                os.fchown(fd, uid, gid)
        if reader.xattrs:
            for key, value in self._allowed_xattrs(reader.xattrs):
                try:
                    os.setxattr(fd, key, value)
                except OSError as error:
                    if error.errno in (errno.E2BIG, errno.ERANGE) or (
                        # ext4 has one block for them and says so when that is full, disk space or not.
                        error.errno == errno.ENOSPC and len(value) > 2048
                    ):
                        raise LimitExceeded(
                            f"the attribute {show(key)} of {show(reader.name)} is too large"
                        ) from error
                    if error.errno != errno.ENOTSUP and not (error.errno == errno.EPERM and self._uid):
                        raise
        if mode & self._lost_bits or self._inherits or again:
            os.fchmod(fd, mode)
        return uid, gid

    def _allowed_xattrs(self, xattrs: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Attributes that policy keeps. overlayfs's own are never an archive's to set: they would forge
        opaque directories and redirects. `system.` (ACLs) and labels are the node's business."""
        if not self._policy.xattrs or sys.platform != "linux":
            return []
        namespaces = (b"user.", b"trusted.", _CAPABILITY) if self._image else (b"user.",)
        return [
            (key, value)
            for key, value in xattrs.items()
            if key.startswith(namespaces)
            and not key.startswith(_OVERLAY)
            and b"\0" not in key
            and (key != _CAPABILITY or (self._mode_mask & _SETID))
        ]

    def _check_target(self, path: bytes, target: bytes) -> None:
        """Refuse an artifact's link that points out of the tree by its text alone."""
        depth = (self._base + path).count(b"/")
        for part in target.split(b"/"):
            depth += -1 if part == b".." else part not in (b"", b".")
            if depth < 0:
                break
        if target.startswith(b"/") or depth < 0:
            raise _points_out(path, target)

    def _is_free(self, path: bytes) -> bool:
        """Whether a link that waits for a lower layer can still be made: parent there, name not taken."""
        parent, _, name = path.rpartition(b"/")
        place = self._places.exact(parent)
        if place is None:
            return False
        try:
            os.stat(name, dir_fd=place.fd, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False

    def _finish(self) -> None:
        """What can only be done once every entry is there."""
        places = self._places
        if self._removed_directory:
            # Names noted below a directory that was replaced since are no longer true.
            places.implicit = {path: None for path in places.implicit if places.exact(path) is not None}
        self._pending = {path: target for path, target in self._pending.items() if self._is_free(path)}
        for path in self._links:
            # By the kernel, through every link on the way: text alone cannot tell where links lead.
            self._deadline.check()
            try:
                os.close(open_beneath(self._destination, self._base + path, _LOOK, links="beneath"))
            except OSError as error:
                if error.errno == errno.EXDEV:
                    raise _points_out(path, b"a name outside") from None
                if error.errno not in (
                    errno.ENOENT,
                    errno.ELOOP,
                    errno.ENOTDIR,
                    errno.EACCES,
                    errno.ENAMETOOLONG,
                ):
                    raise
        self._whiteouts.prune()
        if self._policy.whiteouts == "overlay":
            for path in self._whiteouts.settle(self._deadline):
                if self._records is not None:
                    self._records.add("w", (self._base + path).decode("latin-1"))
        # Deepest first: a parent that closes too soon would hide its children.
        for path in sorted(places.closed, reverse=True):
            place = places.exact(path)
            if place is not None:
                os.fchmod(place.fd, places.closed[path])
        if self._records is not None:
            self._records.flush()


def _points_out(path: bytes, target: bytes) -> UnsafeLink:
    return UnsafeLink(
        f"the link {show(path)} points out of the tree, to {show(target)}",
        next_step="the publisher must use relative links that stay inside",
    )


def _creation_loses(directory: int) -> int:
    """Permission bits that a new file may lack although it was created with them."""
    if sys.platform == "linux":
        try:
            os.getxattr(directory, "system.posix_acl_default")
        except OSError:
            pass
        else:
            return 0o777
    return files.current_umask()


def _strip_xattrs(fd: int) -> None:
    """Take an earlier entry's attributes off a directory that gets a new one."""
    if sys.platform != "linux":
        return
    for key in os.listxattr(fd):
        if key.startswith(("user.", "trusted.", "security.capability")):
            os.removexattr(fd, key)
