"""Content by digest, and the records that keep it: who needs which blob or tree, and for how long.

`DirStore` is an OCI image-layout directory that other tools read. Its neighbours call it through
`ContentStore`; trees, images, leases, grants and mounts are kept in the same database, so that one graph
says what is garbage. Above it: transfer, tree, deliver. Below: the model and the kernel.
"""

from typing import TYPE_CHECKING

from unlade.lazy import lazily

if TYPE_CHECKING:
    from unlade.store.content import BlobInfo, ContentStore, Ingest, Lease, PipelinedIngest
    from unlade.store.dirstore import DirStore
    from unlade.store.failure import NoSpace, NotInStore, StoreFailure
    from unlade.store.fsck import Problem
    from unlade.store.gc import GCReport, collect, remove_image
    from unlade.store.images import ImageRecord, ImageSize, IncompleteContent
    from unlade.store.leases import LeaseEnded, LeaseInfo
    from unlade.store.mounts import MountRecord
    from unlade.store.upkeep import Tidied, Upkeep, Usage
else:
    __getattr__ = lazily(
        __name__,
        {
            "content": "BlobInfo ContentStore Ingest Lease PipelinedIngest",
            "dirstore": "DirStore",
            "failure": "NoSpace NotInStore StoreFailure",
            "fsck": "Problem",
            "gc": "GCReport collect remove_image",
            "images": "ImageRecord ImageSize IncompleteContent",
            "leases": "LeaseEnded LeaseInfo",
            "mounts": "MountRecord",
            "upkeep": "Tidied Upkeep Usage",
        },
    )

__all__ = [
    "BlobInfo",
    "ContentStore",
    "DirStore",
    "GCReport",
    "ImageRecord",
    "ImageSize",
    "IncompleteContent",
    "Ingest",
    "Lease",
    "LeaseEnded",
    "LeaseInfo",
    "MountRecord",
    "NoSpace",
    "NotInStore",
    "PipelinedIngest",
    "Problem",
    "StoreFailure",
    "Tidied",
    "Upkeep",
    "Usage",
    "collect",
    "remove_image",
]
