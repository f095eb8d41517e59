"""Content by digest, and the records that keep it: who needs which blob or tree, and for how long.

`DirStore` is an OCI image-layout directory that other tools read. Its neighbours call it through
`ContentStore`; trees, images, leases, grants and mounts are kept in the same database, so that one graph
says what is garbage. Above it: transfer, tree, deliver. Below: the model and the kernel.
"""

from unlade.store.content import BlobInfo, ContentStore, Ingest, Lease, PipelinedIngest
from unlade.store.dirstore import DirStore
from unlade.store.failure import NoSpace, NotInStore, StoreFailure

__all__ = [
    "BlobInfo",
    "ContentStore",
    "DirStore",
    "Ingest",
    "Lease",
    "NoSpace",
    "NotInStore",
    "PipelinedIngest",
    "StoreFailure",
]
