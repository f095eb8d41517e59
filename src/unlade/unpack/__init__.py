"""Bytes in, safe tree out: tar streams, compression, whiteouts, caps (hostile content stops here).

`unpack` writes an archive beneath a directory descriptor; `WorkerPool` does the same in processes that can
do nothing else; `write_file` is for raw blobs. Nothing here knows registries, stores or plans.
"""

from typing import TYPE_CHECKING, Any

from unlade.unpack.archive import unpack
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
    from unlade.unpack.pool import WorkerPool

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


def __getattr__(name: str) -> Any:
    # The worker imports this package too, and has no use for what starts workers.
    if name != "WorkerPool":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unlade.unpack.pool import WorkerPool

    return WorkerPool
