"""Leases in containerd: what keeps content and snapshots alive until a record does.

A lease has containerd's expiry label, and a label that names a file which its owner keeps locked: that is
how `end_dead` knows, after a crash or a reboot, which leases nobody will ever release. A lease that was
`keep`t has neither: its name is the caller's, and it stays until the caller ends it. `hold` adds before it
looks: once the resource is on the lease, no collection takes it, so a look that finds it is true from then
on. containerd cannot change a lease, so `renew` moves its resources to a new one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from google.protobuf.empty_pb2 import Empty

from unlade.containerd import labels
from unlade.containerd.api import content_pb2, leases_pb2, snapshots_pb2
from unlade.containerd.connection import Containerd, Method
from unlade.containerd.errors import ContainerdError, Exists, Missing
from unlade.containerd.naming import snapshot_name
from unlade.kernel import failpoints
from unlade.model import Digest
from unlade.store import LeaseEnded
from unlade.store.failure import explaining
from unlade.store.locks import OwnerLock

_LEASES: Final = "/containerd.services.leases.v1.Leases"
_CREATE: Final = Method(f"{_LEASES}/Create", leases_pb2.CreateRequest, leases_pb2.CreateResponse)
_DELETE: Final = Method(f"{_LEASES}/Delete", leases_pb2.DeleteRequest, Empty)
_LIST: Final = Method(f"{_LEASES}/List", leases_pb2.ListRequest, leases_pb2.ListResponse)
_ADD: Final = Method(f"{_LEASES}/AddResource", leases_pb2.AddResourceRequest, Empty)
_DROP: Final = Method(f"{_LEASES}/DeleteResource", leases_pb2.DeleteResourceRequest, Empty)
_RESOURCES: Final = Method(
    f"{_LEASES}/ListResources", leases_pb2.ListResourcesRequest, leases_pb2.ListResourcesResponse
)
_INFO: Final = Method(
    "/containerd.services.content.v1.Content/Info", content_pb2.InfoRequest, content_pb2.InfoResponse
)
_STAT: Final = Method(
    "/containerd.services.snapshots.v1.Snapshots/Stat",
    snapshots_pb2.StatSnapshotRequest,
    snapshots_pb2.StatSnapshotResponse,
)
# Longer than the pull of the largest model, shorter than a disk's patience.
DAY: Final = 24 * 3600.0
_SNAPSHOTS: Final = "snapshots/"
_log: Final = logging.getLogger(__name__)


class ContainerdLease:
    """See `Lease`; made by `lease`. `snapshotter` is where `hold_tree` looks."""

    def __init__(self, containerd: Containerd, purpose: str, ttl: float, snapshotter: str) -> None:
        self._containerd = containerd
        self._purpose = purpose
        self._ttl = ttl
        self._snapshotter = snapshotter
        self._id = ""
        self._making = threading.Lock()

    @property
    def id(self) -> str:
        """The lease's name; asking for it makes the lease, if nothing else did."""
        with self._making:
            if not self._id:
                self._id = _create(self._containerd, self._purpose, self._ttl)
            return self._id

    def hold(self, digest: Digest) -> bool:
        """Keep a blob alive; False when it is not in the namespace."""
        return hold_content(self._containerd, self.id, digest)

    def hold_tree(self, key: Digest) -> bool:
        """Keep a tree alive; False when it is not there."""
        return hold_snapshot(
            self._containerd, self.id, self._snapshotter, snapshot_name(self._containerd, key)
        )

    def renew(self, ttl: float) -> None:
        """Move everything to a new lease that ends this many seconds from now.

        What another thread adds to the old one meanwhile is moved by the second look; a call that is in
        flight even then finds its lease gone and fails, it never loses what it made without a word.
        """
        old, new = self.id, _create(self._containerd, self._purpose, ttl)
        self._move(old, new)
        self._id = new
        self._move(old, new)
        _end(self._containerd, old, sync=False)

    def release(self, *, sync: bool = False) -> None:
        """End the lease; idempotent. `sync` waits for a collection: what only it held is then gone."""
        if self._id:
            _end(self._containerd, self._id, sync=sync)
            failpoints.reach("containerd.lease.released")

    def _move(self, old: str, new: str) -> None:
        for resource in _resources(self._containerd, old):
            _add(self._containerd, new, resource)


@contextmanager
def lease(
    containerd: Containerd,
    purpose: str,
    *,
    ttl: float = DAY,
    snapshotter: str = "overlayfs",
    late: bool = False,
) -> Iterator[ContainerdLease]:
    """A lease that ends with the block, with its time, or with this process.

    When the block fails, its end waits for a collection, so that the disk has its space back. `late`: made
    when something is to be held by it, for blocks that often find nothing to do.
    """
    made = ContainerdLease(containerd, purpose, ttl, snapshotter)
    if not late:
        _ = made.id
    failed = True
    try:
        yield made
        failed = False
    finally:
        try:
            made.release(sync=failed)
        except ContainerdError as error:
            # Not worth failing what was done, nor hiding why it failed: the lease ends with its time.
            _log.warning("a lease of containerd's could not be ended: %s", error)


def hold_content(containerd: Containerd, lease_id: str, digest: Digest) -> bool:
    """Put a blob on a lease; False when it is not there."""
    resource = leases_pb2.Resource(id=str(digest), type="content")
    _add(containerd, lease_id, resource)
    try:
        containerd.call(_INFO, content_pb2.InfoRequest(digest=str(digest)), f"look for {digest}")
    except Missing:
        _drop(containerd, lease_id, resource)
        return False
    return True


def hold_snapshot(containerd: Containerd, lease_id: str, snapshotter: str, name: str) -> bool:
    """Put a snapshot on a lease; False when it is not there."""
    resource = leases_pb2.Resource(id=name, type=f"{_SNAPSHOTS}{snapshotter}")
    _add(containerd, lease_id, resource)
    request = snapshots_pb2.StatSnapshotRequest(snapshotter=snapshotter, key=name)
    try:
        containerd.call(_STAT, request, f"look for the snapshot {name}")
    except Missing:
        _drop(containerd, lease_id, resource)
        return False
    return True


def try_hold_snapshot(containerd: Containerd, lease_id: str, snapshotter: str, name: str) -> None:
    """Put a snapshot on a lease, there or not: for callers that look afterwards, and `let_go` if in vain."""
    _add(containerd, lease_id, leases_pb2.Resource(id=name, type=f"{_SNAPSHOTS}{snapshotter}"))


def let_go(containerd: Containerd, lease_id: str, snapshotter: str, name: str) -> None:
    """Take a snapshot off a lease; idempotent."""
    _drop(containerd, lease_id, leases_pb2.Resource(id=name, type=f"{_SNAPSHOTS}{snapshotter}"))


def holders(containerd: Containerd, *, kind: str, resource: str) -> list[str]:
    """The leases in force that hold a resource; `kind` is `content` or `snapshots/<snapshotter>`."""
    now = time.time()
    found = containerd.call(_LIST, leases_pb2.ListRequest(), "list leases").leases
    return [
        lease.id
        for lease in found
        if not labels.has_expired(dict(lease.labels), now)
        and any(held.type == kind and held.id == resource for held in _resources(containerd, lease.id))
    ]


def keep(containerd: Containerd, lease_id: str, purpose: str) -> bool:
    """A lease by a chosen name that outlives this process and reboots, until `end`; False: it was there."""
    request = leases_pb2.CreateRequest(id=lease_id, labels={labels.PURPOSE: purpose[:200]})
    try:
        containerd.call(_CREATE, request, "make a lease")
    except Exists:
        return False
    failpoints.reach("volume.lease.kept")
    return True


def kept(containerd: Containerd, prefix: str) -> list[str]:
    """The names of the leases that begin like this."""
    found = containerd.call(_LIST, leases_pb2.ListRequest(), "list leases").leases
    return sorted(lease.id for lease in found if lease.id.startswith(prefix))


def end(containerd: Containerd, lease_id: str) -> None:
    """End a lease by its name; idempotent. What only it held goes with containerd's next collection."""
    _end(containerd, lease_id, sync=False)
    failpoints.reach("volume.lease.ended")


def end_dead(containerd: Containerd, *, dry_run: bool = False) -> list[str]:
    """End the leases whose owner is gone; their IDs. Leases that are not ours stay."""
    found = containerd.call(_LIST, leases_pb2.ListRequest(), "list leases").leases
    dead = []
    for lease in found:
        owner = Path(lease.labels.get(labels.OWNER, ""))
        if owner.name and not OwnerLock.alive(owner.parent, owner.name):
            if not dry_run:
                _end(containerd, lease.id, sync=False)
            dead.append(lease.id)
    if dry_run:
        return dead
    with explaining(f"use {containerd.state}"):
        for entry in (containerd.state / "owners").iterdir():
            # A name with a dot is still being made by its owner.
            if "." not in entry.name and not OwnerLock.alive(entry.parent, entry.name):
                entry.unlink(missing_ok=True)
    return dead


def collect(containerd: Containerd) -> None:
    """Have containerd collect garbage now, and wait for it: only the end of a lease can ask for that."""
    _end(containerd, _create(containerd, "collect", DAY), sync=True)


def _create(containerd: Containerd, purpose: str, ttl: float) -> str:
    lease_id = f"unlade-{uuid.uuid4().hex}"
    facts = {
        labels.GC_EXPIRE: labels.expires(time.time() + ttl),
        labels.OWNER: str(containerd.state.absolute() / "owners" / containerd.owner.name),
        labels.PURPOSE: purpose[:200],
    }
    with contextlib.suppress(Exists):  # the name is random: it was our own first attempt
        containerd.call(_CREATE, leases_pb2.CreateRequest(id=lease_id, labels=facts), "make a lease")
    failpoints.reach("containerd.lease.created")
    return lease_id


def _end(containerd: Containerd, lease_id: str, *, sync: bool) -> None:
    with contextlib.suppress(Missing):
        containerd.call(_DELETE, leases_pb2.DeleteRequest(id=lease_id, sync=sync), "end a lease")


def _add(containerd: Containerd, lease_id: str, resource: leases_pb2.Resource) -> None:
    try:
        containerd.call(
            _ADD, leases_pb2.AddResourceRequest(id=lease_id, resource=resource), f"hold {resource.id}"
        )
    except Missing as error:
        raise ended() from error


def _drop(containerd: Containerd, lease_id: str, resource: leases_pb2.Resource) -> None:
    with contextlib.suppress(Missing):
        containerd.call(
            _DROP,
            leases_pb2.DeleteResourceRequest(id=lease_id, resource=resource),
            f"let go of {resource.id}",
        )


def _resources(containerd: Containerd, lease_id: str) -> list[leases_pb2.Resource]:
    try:
        request = leases_pb2.ListResourcesRequest(id=lease_id)
        return list(containerd.call(_RESOURCES, request, "list what a lease holds").resources)
    except Missing:
        return []


def ended() -> LeaseEnded:
    """The error for a lease that containerd no longer has."""
    return LeaseEnded("the lease has ended while it was needed", next_step="start again with a longer one")
