"""The open directories of a tree that is being written, found by the names an archive uses.

A place is an open directory. Its canonical path has no link in it and was opened with "refuse": nothing
here ever follows a link, or is followed, by the kernel. What an image's link means (design, decision 9) is
worked out as a name, component by component inside the layer, and then opened the same strict way.

Directories' times are kept without a list of all directories: a place remembers the time its directory had
when it was opened (or that its entry asked for) and puts it back when it is closed. At most `_OPEN` places
are open; the least recently used goes first. Parents without an entry are made here and noted.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from unlade.kernel.beneath import open_beneath
from unlade.unpack.refusals import LimitExceeded, MalformedArchive, UnsafeLink, UnsafeName, show

if TYPE_CHECKING:
    from unlade.unpack.policy import Limits, Rules

_OPEN: Final = 96  # descriptors held; deeper and wider than one directory's neighbourhood
_ALIASES: Final = 4096  # spellings remembered before starting afresh
_MAX_FOLLOWED: Final = 40  # links in one name, as the kernel allows (MAXSYMLINKS)
# Steps through links in one archive. Layers of a merged-/usr image need a few hundred; a chain of long
# link targets used by every entry would otherwise cost thousands of lookups each.
_MAX_LINK_STEPS: Final = 1_000_000
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# With open_beneath no O_NOFOLLOW: it would turn ELOOP, which means a link, into ENOTDIR, which may be a file.
_BENEATH: Final = os.O_RDONLY | os.O_DIRECTORY
# Parents that no entry describes: what everybody's mkdir -p gives, at a time that is the same everywhere.
IMPLICIT_MODE: Final = 0o755
IMPLICIT_MTIME: Final = 0


class Place:
    """One open directory; `prefix` is its canonical path with a slash at the end, empty for the root."""

    __slots__ = ("fd", "mtime_ns", "prefix", "used")

    def __init__(self, fd: int, prefix: bytes, mtime_ns: int | None) -> None:
        self.fd = fd
        self.prefix = prefix
        self.mtime_ns = mtime_ns  # None: leave it alone
        self.used = True


class Places:
    """Finds and makes directories beneath one root; `close` puts their times back."""

    def __init__(self, root: int, rules: Rules, limits: Limits) -> None:
        self.root = Place(os.open(b".", _DIRECTORY, dir_fd=root), b"", None)
        self.implicit: dict[bytes, None] = {}
        self.closed: dict[bytes, int] = {}  # directories that their owner may not enter: modes for the end
        self.noted_bytes = 0
        self._image = rules == "image"
        self._limits = limits
        self._by_path: dict[bytes, Place] = {}
        self._by_spelling: dict[bytes, Place] = {b"": self.root}
        self._link_steps = 0

    def close(self) -> None:
        """Close every place, putting directory times back; idempotent."""
        self._by_spelling.clear()
        while self._by_path:
            self._shut(self._by_path.popitem()[1])
        if self.root.fd >= 0:
            self._shut(self.root)

    def note(self, name: bytes) -> bytes:
        """Account for a name that is kept until the end; raises LimitExceeded."""
        self.noted_bytes += len(name) + 64
        if self.noted_bytes > self._limits.max_noted_bytes:
            raise LimitExceeded("too many whiteouts, parents without entries and links to remember")
        return name

    def parts(self, unsafe_name: bytes) -> list[bytes]:
        """A name's components, by the rules: `.` and empty ones dropped, `..` refused; raises UnsafeName."""
        if len(unsafe_name) > self._limits.max_name:
            raise UnsafeName(f"the name {show(unsafe_name)} is longer than {self._limits.max_name} bytes")
        if unsafe_name.startswith(b"/") and not self._image:
            raise UnsafeName(f"the name {show(unsafe_name)} is absolute")
        if b"\0" in unsafe_name:
            raise UnsafeName(f"the name {show(unsafe_name)} contains NUL")
        parts = [part for part in unsafe_name.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise UnsafeName(f"the name {show(unsafe_name)} contains '..'")
        if len(parts) > self._limits.max_depth:
            raise LimitExceeded(f"{show(unsafe_name)} is more than {self._limits.max_depth} directories deep")
        return parts

    def parent(self, unsafe_parent: bytes) -> Place:
        """The directory that the archive spells so, made when missing, its own parents too."""
        place = self._by_spelling.get(unsafe_parent)
        if place is not None and place.fd >= 0:
            place.used = True
            return place
        path = b"/".join(self.parts(unsafe_parent))
        place = self.directory(path)
        if place is None:
            place = self._make(self._resolve(path) if self._image else path)
        if len(self._by_spelling) > _ALIASES:
            self._by_spelling.clear()
        self._by_spelling[unsafe_parent] = place
        return place

    def existing(self, unsafe_parent: bytes) -> Place | None:
        """As `parent`, but None when there is no such directory."""
        place = self._by_spelling.get(unsafe_parent)
        if place is not None and place.fd >= 0:
            return place
        return self.directory(b"/".join(self.parts(unsafe_parent)))

    def canonical(self, unsafe_parent: bytes) -> bytes:
        """The path a directory name means in this tree, whether or not it exists, with a slash at the end."""
        place = self._by_spelling.get(unsafe_parent)
        if place is not None and place.fd >= 0:
            return place.prefix
        path = b"/".join(self.parts(unsafe_parent))
        if self._image:
            path = self._resolve(path)
        return path + b"/" if path else b""

    def directory(self, path: bytes) -> Place | None:
        """The directory at a path without `..`; links by the rules; None when it is missing."""
        place = self._cached(path)
        if place is not None:
            return place
        try:
            fd = open_beneath(self.root.fd, path, _BENEATH)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            if error.errno == errno.ENOTDIR:
                raise MalformedArchive(f"a parent of an entry in {show(path)} is not a directory") from None
            if error.errno != errno.ELOOP:
                raise
            if not self._image:
                raise UnsafeLink(
                    f"{show(path)} passes through a symbolic link",
                    next_step="an artifact may not write through links; ask its publisher to pack it without",
                ) from None
            resolved = self._resolve(path)
            # A link that nothing stands behind yet: to be made, as its resolved name.
            return None if resolved == path else self.directory(resolved)
        return self.adopt(fd, path, os.fstat(fd).st_mtime_ns)

    def exact(self, path: bytes, *, make: bool = False) -> Place | None:
        """The directory at a canonical path, no link followed; None when something else stands there."""
        place = self._cached(path)
        if place is not None:
            return place
        try:
            fd = open_beneath(self.root.fd, path, _BENEATH)
        except OSError as error:
            if error.errno == errno.ENOENT and make:
                return self._make(path)
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise
        return self.adopt(fd, path, os.fstat(fd).st_mtime_ns)

    def adopt(self, fd: int, path: bytes, mtime_ns: int) -> Place:
        """Take over the descriptor of the directory at a canonical path."""
        while len(self._by_path) >= _OPEN:
            oldest = next(iter(self._by_path))
            place = self._by_path.pop(oldest)
            if place.used:  # a second chance: used since it was last looked at
                place.used = False
                self._by_path[oldest] = place
            else:
                self._shut(place)
        place = self._by_path[path] = Place(fd, path + b"/", mtime_ns)
        return place

    def forget_below(self, path: bytes) -> None:
        """Close the place at a path and all below it, because they are about to be removed."""
        below = path + b"/"
        for known in [known for known in self._by_path if known == path or known.startswith(below)]:
            self._shut(self._by_path.pop(known))
        self.forget_spellings()

    def forget_spellings(self) -> None:
        """Forget which names lead where, because a link changed."""
        self._by_spelling.clear()
        self._by_spelling[b""] = self.root

    def _cached(self, path: bytes) -> Place | None:
        if not path:
            return self.root
        place = self._by_path.get(path)
        if place is not None:
            place.used = True
        return place

    def _make(self, path: bytes) -> Place:
        """Make a directory and its missing parents at a canonical path; outermost first."""
        start = len(path)
        place: Place | None = None
        while place is None:
            start = path.rfind(b"/", 0, start)
            place = self.directory(path[:start]) if start > 0 else self.root
        if path[: max(start, 0)] + b"/" != place.prefix and place is not self.root:
            raise UnsafeLink(f"{show(path)} passes through links in circles")
        depth = start + 1 if start > 0 else 0
        while depth < len(path):
            end = path.find(b"/", depth)
            end = len(path) if end < 0 else end
            name, here = path[depth:end], self.note(path[:end])
            try:
                os.mkdir(name, IMPLICIT_MODE, dir_fd=place.fd)
            except FileExistsError:
                raise UnsafeLink(f"{show(here)} is a link or a file where a directory is needed") from None
            fd = os.open(name, _DIRECTORY, dir_fd=place.fd)
            made = self.adopt(fd, here, IMPLICIT_MTIME)
            os.fchmod(fd, IMPLICIT_MODE)
            self.implicit[here] = None
            self.closed.pop(here, None)
            place = made
            depth = end + 1
        return place

    def _resolve(self, path: bytes) -> bytes:
        """What a path means when links in it resolve inside this tree as if it were the root (image rules).

        Only a name is computed here; it is opened without following links, like every other.
        """
        todo = path.split(b"/")[::-1] if path else []
        done: list[bytes] = []
        followed = 0
        while todo:
            part = todo.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if done:
                    done.pop()
                continue
            self._link_steps += 1
            if self._link_steps > _MAX_LINK_STEPS:
                raise LimitExceeded("too much work to follow this layer's symbolic links")
            target = self._link(b"/".join(done), part)
            if target is None:
                done.append(part)
                if len(done) > self._limits.max_depth:
                    raise LimitExceeded(f"{show(path)} leads too deep through links")
                continue
            followed += 1
            if followed > _MAX_FOLLOWED:
                raise UnsafeLink(f"{show(path)} passes through too many symbolic links")
            if target.startswith(b"/"):
                done.clear()
            todo.extend(reversed(target.split(b"/")))
        return b"/".join(done)

    def _link(self, directory: bytes, name: bytes) -> bytes | None:
        place = self.exact(directory)
        if place is None:
            return None
        try:
            return os.readlink(name, dir_fd=place.fd)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return None
            raise

    def _shut(self, place: Place) -> None:
        fd, place.fd = place.fd, -1
        try:
            if place.mtime_ns is not None:
                os.utime(fd, ns=(place.mtime_ns, place.mtime_ns))
        finally:
            os.close(fd)
