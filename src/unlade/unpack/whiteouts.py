"""Whiteouts: how a layer says that something below it is gone (image-spec, "Whiteouts").

`.wh.name` hides one name of lower layers, `.wh..wh..opq` everything lower layers have in that directory.
Neither touches what its own layer holds, in whatever order the entries come: they are collected, and
settled once at the end, in linear time. In overlay form a whiteout is a character device 0:0 and an opaque
directory has `trusted.overlay.opaque`; in record form nothing is written and the lists are the result.
Used by the writer for images only; in an artifact such names are plain data.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from unlade.kernel import files
from unlade.unpack.refusals import UnsafeName, show

if TYPE_CHECKING:
    from unlade.model.deadline import Deadline
    from unlade.unpack.places import Places

MARK: Final = b".wh."
_OPAQUE: Final = b".wh..wh..opq"
# What aufs kept for itself and old Docker versions packed along: nothing of the image.
_AUFS: Final = (b".wh..wh.aufs", b".wh..wh.orph", b".wh..wh.plnk")
_OPAQUE_XATTR: Final = "trusted.overlay.opaque"


class Whiteouts:
    """The whiteouts of one layer."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.hidden: dict[bytes, None] = {}
        self.opaque: dict[bytes, None] = {}

    def take(self, raw: bytes, unsafe_parent: bytes, name: bytes) -> bool:
        """Whether an entry was a whiteout and is done with; raises UnsafeName for a malformed one."""
        parts = self._places.parts(raw)
        if parts[0] in _AUFS:
            return True
        if any(part.startswith(MARK) for part in parts[:-1]):
            raise UnsafeName(f"{show(raw)} lies below a whiteout")
        if not name.startswith(MARK):
            return False
        # The directory is made if need be, as an overlay needs it: over a lower layer's link it replaces it.
        parent = self._places.parent(unsafe_parent).prefix
        if name == _OPAQUE:
            if parent[:-1] not in self.opaque:
                self.opaque[self._places.note(parent[:-1])] = None
            return True
        hidden = name[len(MARK) :]
        # `.wh.`, `.wh..` and `.wh...` would hide a directory's own name; a whiteout of a whiteout is none.
        if hidden in (b"", b".", b"..") or hidden.startswith(MARK):
            raise UnsafeName(f"{show(raw)} is no valid whiteout")
        self.hide(parent + hidden)
        return True

    def hide(self, path: bytes) -> None:
        """Hide one name of lower layers."""
        if path not in self.hidden:
            self.hidden[self._places.note(path)] = None

    def prune(self) -> None:
        """Take away directories that were made only to hold whiteouts and are hidden themselves."""
        implicit = self._places.implicit
        if not implicit:
            return
        hidden = set(self.hidden)
        gone = [path for path in implicit if path in hidden or _is_below(path, hidden)]
        for path in sorted(gone, key=lambda path: path.count(b"/"), reverse=True):
            parent, _, name = path.rpartition(b"/")
            place = self._places.exact(parent)
            if place is None:
                continue
            self._places.forget_below(path)
            try:
                os.rmdir(name, dir_fd=place.fd)
            except OSError as error:
                # Something of the layer is in it: it stays, and hides the lower one by being opaque.
                if error.errno != errno.ENOTEMPTY:
                    raise
            else:
                del implicit[path]

    def settle(self, deadline: Deadline) -> Iterator[bytes]:
        """Put them into overlayfs's form; yields the names of the nodes that were made."""
        # Opaque directories first, and whiteouts from the root down: what lies below an opaque directory
        # or below a whiteout is hidden already. A node there would be worse than useless: overlay lists
        # the names of whiteouts in a directory that it does not merge, and then does not find them.
        opaque = set(self.opaque)
        for path in self.hidden:
            if path not in opaque and self._is_own_directory(path):
                # The layer has the name itself. A directory must not merge with the one it replaces.
                opaque.add(path)
        for path in opaque:
            deadline.check()
            self._mark_opaque(path)
        for path in sorted(self.hidden, key=lambda path: path.count(b"/")):
            deadline.check()
            if path in opaque or _is_below(path, opaque):
                continue
            parent, _, name = path.rpartition(b"/")
            place = self._places.exact(parent, make=True)
            if place is None:
                continue  # this layer has a link, file or whiteout where the parent was: nothing left to hide
            try:
                os.stat(name, dir_fd=place.fd, follow_symlinks=False)
            except FileNotFoundError:
                files.make_whiteout(place.fd, name)
                yield path

    def _is_own_directory(self, path: bytes) -> bool:
        parent, _, name = path.rpartition(b"/")
        place = self._places.exact(parent)
        if place is None:
            return False
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def _mark_opaque(self, path: bytes) -> None:
        place = self._places.exact(path, make=True)
        if place is not None:
            os.setxattr(place.fd, _OPAQUE_XATTR, b"y")


def _is_below(path: bytes, directories: set[bytes]) -> bool:
    if b"" in directories:
        return True
    parent = path.rpartition(b"/")[0]
    while parent:
        if parent in directories:
            return True
        parent = parent.rpartition(b"/")[0]
    return False
