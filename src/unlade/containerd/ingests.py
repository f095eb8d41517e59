"""What containerd is taking in right now: how far its own pulls are.

containerd names the ingest of a blob by kind and digest (`layer-sha256:…`). A blob that is whole is no ingest
any more and stands in the content store. Reads only; nothing here keeps or moves content.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from unlade.containerd.api import content_pb2
from unlade.containerd.connection import Containerd, Method
from unlade.containerd.content import ContainerdStore
from unlade.model import Digest

_STATUSES: Final = Method(
    "/containerd.services.content.v1.Content/ListStatuses",
    content_pb2.ListStatusesRequest,
    content_pb2.ListStatusesResponse,
)


def ingested(containerd: Containerd, digests: Collection[Digest]) -> dict[Digest, int]:
    """The bytes that containerd has of each of these blobs; those it has nothing of are left out."""
    answer = containerd.call(_STATUSES, content_pb2.ListStatusesRequest(), "list containerd's ingests")
    active = {status.ref.rpartition("-")[2]: status.offset for status in answer.statuses}
    store = ContainerdStore(containerd)
    found: dict[Digest, int] = {}
    for digest in digests:
        if (offset := active.get(str(digest))) is not None:
            found[digest] = offset
        elif (info := store.stat(digest)) is not None:
            found[digest] = info.size
    return found
