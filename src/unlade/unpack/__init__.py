"""Bytes in, safe tree out: tar streams, compression, whiteouts, caps (hostile content stops here).

`unpack` writes an archive beneath a directory descriptor; `WorkerPool` does the same in processes that can
do nothing else; `write_file` is for raw blobs. Nothing here knows registries, stores or plans.
"""

from typing import TYPE_CHECKING

from unlade.lazy import lazily
from unlade.unpack.policy import RULES_VERSION, Limits, Unpacked, UnpackPolicy
from unlade.unpack.raw import write_file
from unlade.unpack.refusals import (
    CannotWrite,
    CorruptStream,
    LimitExceeded,
    MalformedArchive,
    UnsafeLink,
    UnsafeName,
    UnsupportedEntry,
    WorkerDied,
)

if TYPE_CHECKING:
    from unlade.unpack.archive import unpack
    from unlade.unpack.pool import WorkerPool
else:
    # Who starts workers does not unpack, and workers start none.
    __getattr__ = lazily(__name__, {"archive": "unpack", "pool": "WorkerPool"})

__all__ = [
    "RULES_VERSION",
    "CannotWrite",
    "CorruptStream",
    "LimitExceeded",
    "Limits",
    "MalformedArchive",
    "UnpackPolicy",
    "Unpacked",
    "UnsafeLink",
    "UnsafeName",
    "UnsupportedEntry",
    "WorkerDied",
    "WorkerPool",
    "unpack",
    "write_file",
]
