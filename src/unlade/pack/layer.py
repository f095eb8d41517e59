"""A directory or a file as a blob that can be pushed: its descriptor, and its bytes from any offset.

The invariant: a layer's descriptor is exact before anything is sent (registries want the digest first),
no layer is ever whole in memory, and equal content gives equal bytes on every machine.

Where the bytes come from was measured (docs/architecture.md, "Push"): a compressed tar is spooled to an
unlinked temporary file, because deflating twice costs far more than writing once; an uncompressed tar and
a plain file are read twice instead, because hashing runs at disk speed and a copy of a 100 GB model is
not always affordable. A file that changes between the two readings ends the push with SourceChanged.

Called by `publish`, by packages, and by whoever builds manifests of their own.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Final, Self, cast

import msgspec

from unlade.errors import UnladeError
from unlade.model import Deadline, Descriptor, DiffID, Digest, mediatypes
from unlade.pack.compress import BLOCK_SIZE, Block, Compression, compress, media_suffix
from unlade.pack.listing import Entry, PackPolicy, SourceChanged, UnpackableSource, list_tree
from unlade.pack.tar import TarLayout, in_blocks

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# What ORAS reads from a packed directory's annotations.
ANNOTATION_UNPACK: Final = "io.deis.oras.content.unpack"
ANNOTATION_CONTENT_DIGEST: Final = "io.deis.oras.content.digest"
# The type of a file whose format nobody named: bytes (RFC 2046).
OCTET_STREAM: Final = "application/octet-stream"


class Layer:
    """A blob ready to be sent; a context manager, because it may hold a temporary file."""

    def __init__(
        self,
        descriptor: Descriptor,
        opener: Callable[[int], BinaryIO],
        *,
        diff_id: DiffID | None = None,
        entries: tuple[Entry, ...] = (),
        spool: _Spool | None = None,
    ) -> None:
        self.descriptor = descriptor
        self.diff_id = diff_id
        """The digest of the uncompressed tar; None for a plain file."""
        self.entries = entries
        self._opener = opener
        self._spool = spool

    def annotate(self, annotations: Mapping[str, str]) -> None:
        """Add annotations to the descriptor: some, like the content's digest, are known only now."""
        merged = {**self.descriptor.annotations, **annotations}
        self.descriptor = msgspec.structs.replace(self.descriptor, annotations=merged)

    def open(self, offset: int = 0, /) -> BinaryIO:
        """A reader of the blob's bytes from `offset` on; the caller closes it. May be called many times."""
        return self._opener(offset)

    def close(self) -> None:
        """Free the temporary file, if there is one; idempotent."""
        if self._spool is not None:
            self._spool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pack_tree(
    directory: str | bytes | os.PathLike[str],
    *,
    policy: PackPolicy | None = None,
    compression: Compression = "gzip",
    level: int | None = None,
    media_type: str = mediatypes.OCI_LAYER,
    annotations: Mapping[str, str] | None = None,
    deadline: Deadline | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Layer:
    """One tar of the directory as a layer; `media_type` is the plain tar's, compression adds its suffix.

    `on_bytes` hears of tar bytes as they are hashed. Raises UnpackableSource or SourceChanged.
    """
    entries = list_tree(directory, policy or PackPolicy())
    layout = TarLayout(entries)
    deadline = deadline or Deadline.never()
    diff = hashlib.sha256()

    def tar_blocks() -> Iterator[bytearray]:
        for block in in_blocks(layout.chunks(), BLOCK_SIZE):
            deadline.check()
            diff.update(block)
            if on_bytes is not None:
                on_bytes(len(block))
            yield block

    if compression == "none":
        for _ in tar_blocks():
            pass
        diff_id = DiffID(Digest("sha256", diff.hexdigest()))
        descriptor = _descriptor(media_type, diff_id, layout.size, annotations)
        return Layer(descriptor, layout.open, diff_id=diff_id, entries=tuple(entries))
    spool = _Spool()
    try:
        for piece in compress(tar_blocks(), compression, level):
            spool.write(piece)
        spool.flush()
    except BaseException:
        spool.close()
        raise
    diff_id = DiffID(Digest("sha256", diff.hexdigest()))
    descriptor = _descriptor(media_type + media_suffix(compression), spool.digest, spool.size, annotations)
    return Layer(descriptor, spool.open, diff_id=diff_id, entries=tuple(entries), spool=spool)


def pack_file(
    path: str | bytes | os.PathLike[str],
    *,
    media_type: str = OCTET_STREAM,
    annotations: Mapping[str, str] | None = None,
    deadline: Deadline | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Layer:
    """A file as it is, hashed now and read again when sent; raises SourceChanged when it differs by then."""
    name = os.fsencode(path)
    deadline = deadline or Deadline.never()
    sha = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_SIZE))
    try:
        with open(name, "rb", buffering=0) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise UnpackableSource(f"{os.fsdecode(name)} is not a file", next_step="name a file")
            while count := file.readinto(buffer):
                deadline.check()
                sha.update(buffer[:count])
                if on_bytes is not None:
                    on_bytes(count)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise UnpackableSource(
            f"{os.fsdecode(name)}: {error.strerror}", next_step="name a file that can be read"
        ) from error
    if _identity(after) != _identity(info):
        raise _changed(name)

    def reopen(offset: int) -> BinaryIO:
        file: BinaryIO | None = None
        with suppress(OSError):
            file = open(name, "rb")  # noqa: SIM115 - the caller closes what it asked for
            if _identity(os.fstat(file.fileno())) == _identity(info):
                file.seek(offset)
                return file
        if file is not None:
            file.close()
        raise _changed(name)

    descriptor = _descriptor(media_type, Digest("sha256", sha.hexdigest()), info.st_size, annotations)
    return Layer(descriptor, reopen)


def _descriptor(
    media_type: str, digest: Digest, size: int, annotations: Mapping[str, str] | None
) -> Descriptor:
    return Descriptor(media_type=media_type, digest=digest, size=size, annotations=dict(annotations or {}))


def _identity(info: os.stat_result) -> tuple[int, int, int, int]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _changed(name: bytes) -> UnladeError:
    return SourceChanged(
        f"{os.fsdecode(name)} changed while it was pushed", next_step="push again when nothing writes to it"
    )


class _Spool:
    """An unlinked temporary file that hashes what is written to it."""

    def __init__(self) -> None:
        with _explained():
            self._file = cast("BinaryIO", tempfile.TemporaryFile(prefix="unlade-push-"))  # noqa: SIM115
        self._sha = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> Digest:
        return Digest("sha256", self._sha.hexdigest())

    def write(self, data: Block) -> None:
        self._sha.update(data)
        self.size += len(data)
        with _explained():
            self._file.write(data)

    def flush(self) -> None:
        with _explained():
            self._file.flush()

    def open(self, offset: int) -> BinaryIO:
        return io.BufferedReader(_FileWindow(self._file.fileno(), offset), BLOCK_SIZE)

    def close(self) -> None:
        # Closing flushes: on a full disk that fails once more, and the file is gone all the same.
        with suppress(OSError):
            self._file.close()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnpackableSource(
            f"the compressed layer cannot be kept in {tempfile.gettempdir()}: {error.strerror}",
            next_step="set TMPDIR to a place with more room, or push with --compression none",
        ) from error


class _FileWindow(io.RawIOBase):
    """Reads a shared descriptor by position, so that several readers never disturb one another."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd = fd
        self._offset = offset

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        count = os.preadv(self._fd, [buffer], self._offset)
        self._offset += count
        return count
