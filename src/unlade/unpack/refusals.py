"""Why an archive, or a part of it, is refused: the typed errors of this room.

::

    UnsafeArchive
    ├── UnsafeName         a name that is no plain relative path
    ├── UnsafeLink         a link, or a way through one, that the rules do not allow
    ├── UnsupportedEntry   a kind of entry that has no place in a tree (devices in artifacts, sparse files)
    ├── MalformedArchive   bytes that are no well-formed tar archive
    └── LimitExceeded      more entries, bytes, depth, ratio or memory than the policy grants
    IntegrityError
    └── CorruptStream      a compressed stream that is cut short, fails its checksum or carries junk
    StoreError
    ├── CannotWrite        the file system refused (full, read-only, not permitted)
    └── WorkerDied         the unpack process ended without an answer; worth one more try

They cross the process boundary by their `code`, so every code here is unique.
"""

from __future__ import annotations

import errno
import os

from unlade.errors import IntegrityError, StoreError, UnsafeArchive


class UnsafeName(UnsafeArchive):
    """A name that is no plain relative path: absolute, `..`, NUL, empty, too long."""

    code = "unsafe-name"


class UnsafeLink(UnsafeArchive):
    """A link that leads out, or a write that would pass through one."""

    code = "unsafe-link"


class UnsupportedEntry(UnsafeArchive):
    """A kind of entry that is not put into a tree."""

    code = "unsupported-entry"


class MalformedArchive(UnsafeArchive):
    """Not a well-formed tar archive."""

    code = "malformed-archive"


class LimitExceeded(UnsafeArchive):
    """More than the policy's limits grant."""

    code = "limit-exceeded"


class CorruptStream(IntegrityError):
    """A compressed stream that ends early, fails its checksum, or is followed by junk."""

    code = "corrupt-stream"


class CannotWrite(StoreError):
    """The file system under the destination refused."""

    code = "cannot-write"


class WorkerDied(StoreError):
    """The unpack process ended without an answer."""

    code = "worker-died"
    retryable = True


def show(unsafe_name: bytes) -> str:
    """A name for an error message: printable, and short whatever its length."""
    # ascii() rather than a codec: codecs are loaded from files, which the confined worker cannot open.
    return ascii(os.fsdecode(unsafe_name[:200])) + ("…" if len(unsafe_name) > 200 else "")


def cannot_write(error: OSError, unsafe_name: bytes | None = None) -> StoreError | UnsafeArchive:
    """Translate what the file system said about one entry, once."""
    where = f" for {show(unsafe_name)}" if unsafe_name is not None else ""
    if error.errno in (errno.ENAMETOOLONG, errno.EILSEQ):
        return UnsafeName(f"the file system does not take this name{where}: {error.strerror}")
    steps = {
        errno.ENOSPC: "free some space, then try again",
        errno.EDQUOT: "free some space or raise the quota, then try again",
        errno.EROFS: "choose a destination that can be written",
        errno.EPERM: "run as root to keep owners and attributes, or choose the squash policy",
        errno.EACCES: "choose a destination that you may write",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
    code = error.errno or 0
    return CannotWrite(
        f"cannot write{where}: {error.strerror or error}",
        next_step=steps.get(code, ""),
        retryable=code in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO),
    )
