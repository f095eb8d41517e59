"""`unpack`: an archive's bytes in, a tree beneath a directory descriptor out.

The one entrance for tar layers, used in a worker process by `WorkerPool` and in this process where that
is wanted (tests, macOS, tiny packages). When it raises, the destination holds a part of the tree: it is the
caller's private staging directory, and the caller removes it. When it returns, every byte of the stream was
read and hashed; whether `diff_id` is the expected one is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from unlade.model.deadline import Deadline
from unlade.unpack import stream
from unlade.unpack.filelist import FileListWriter
from unlade.unpack.policy import Unpacked, UnpackPolicy
from unlade.unpack.tar import TarReader
from unlade.unpack.writer import Writer

if TYPE_CHECKING:
    from unlade.unpack.stream import NextBlock, Readable


def unpack(
    source: Readable,
    dirfd: int,
    policy: UnpackPolicy,
    *,
    files_out: BinaryIO | None = None,
    deadline: Deadline | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Unpacked:
    """Unpack one archive beneath `dirfd`; raises UnsafeArchive, IntegrityError, StoreError, DeadlineExceeded.

    `files_out` receives the file list (see `filelist`), `on_bytes` the count of every read of the source.
    """
    deadline = deadline if deadline is not None else Deadline.never()
    writer = Writer(dirfd, policy, deadline, FileListWriter(files_out) if files_out is not None else None)

    def consume(next_block: NextBlock) -> int:
        reader = TarReader(next_block, policy.limits)
        writer.run(reader)
        return reader.entries

    try:
        entries, diff_id = stream.run(source, consume, policy.limits, deadline=deadline, on_bytes=on_bytes)
    finally:
        writer.close()
    return writer.unpacked(entries, diff_id)
