"""Layers of an image that containerd holds but did not unpack, applied by containerd's own diff service.

containerd unpacks what is made for its host. A guest of another platform gets its image fetched only, and
the first container would then be kept waiting for the unpacking, longer than a kubelet waits. So it is done
in the pull: for each layer without a snapshot an active one is prepared under a lease on top of the layers
below, the blob is applied, what was applied is compared with the diff ID, and the snapshot is committed under
its chain ID, as containerd itself would have done. The config's label keeps the topmost one alive. A process
that dies leaves an active snapshot under a lease whose owner is gone. Called by `ordinary`.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec

from unlade.containerd import labels, leases
from unlade.containerd.api import diff_pb2, snapshots_pb2, types_pb2
from unlade.containerd.connection import Containerd, Method
from unlade.containerd.content import ContainerdStore
from unlade.containerd.errors import Exists
from unlade.containerd.snapshots import ContainerdTrees
from unlade.errors import IntegrityError
from unlade.kernel import failpoints
from unlade.model import Deadline, Descriptor, Digest, Manifest, decode_manifest
from unlade.store import Lease

_APPLY: Final = Method(
    "/containerd.services.diff.v1.Diff/Apply", diff_pb2.ApplyRequest, diff_pb2.ApplyResponse
)
_PREPARE: Final = Method(
    "/containerd.services.snapshots.v1.Snapshots/Prepare",
    snapshots_pb2.PrepareSnapshotRequest,
    snapshots_pb2.PrepareSnapshotResponse,
)
# The largest layers take minutes to unpack on a slow disk; the caller's deadline is the true bound.
_APPLY_SECONDS: Final = 3600.0
# What containerd takes for layers of a file system; anything else in a manifest is not unpacked.
LAYERS: Final = ("application/vnd.oci.image.layer.", "application/vnd.docker.image.rootfs.")


class _RootFS(msgspec.Struct):
    diff_ids: list[str] = []


class _Config(msgspec.Struct):
    rootfs: _RootFS = msgspec.field(default_factory=_RootFS)


_CONFIG: Final = msgspec.json.Decoder(_Config)


class Unpacker:
    """Unpacks into the snapshotters of one containerd; thread-safe."""

    def __init__(self, containerd: Containerd) -> None:
        self._containerd = containerd
        self._content = ContainerdStore(containerd)

    def unpack(self, manifest: Digest, snapshotter: str, *, deadline: Deadline) -> bool:
        """Have every layer of an image in a snapshotter; False when all of them were there.

        Raises NotInStore when containerd lacks a blob, IntegrityError when a layer is not what the config
        says. Idempotent.
        """
        config, layers, diffs = self._read(manifest)
        chain = chain_ids(diffs)
        if not chain:
            return False
        top = chain[-1]
        snapshots = ContainerdTrees(self._containerd, snapshotter)
        with (
            self._containerd.locks.hold(f"unpack-{snapshotter}-{top.hex}", deadline=deadline),
            leases.lease(self._containerd, f"unpack {manifest}", snapshotter=snapshotter) as lease,
        ):
            made = False
            for number, layer in enumerate(layers):
                deadline.check()
                if self._there(lease, snapshotter, chain[number]):
                    continue
                below = str(chain[number - 1]) if number else ""
                self._apply(snapshots, layer, diffs[number], chain[number], below, lease, deadline)
                made = True
            self._content.label(config, {f"{labels.GC_SNAPSHOT}.{snapshotter}": str(top)})
            failpoints.reach("containerd.unpack.kept")
        return made

    def _read(self, manifest: Digest) -> tuple[Digest, Sequence[Descriptor], Sequence[Digest]]:
        document = decode_manifest(self._content.read(manifest), content_type=None)
        if not isinstance(document, Manifest):
            raise IntegrityError(f"{manifest} is no manifest", next_step="pull it again")
        layers = [layer for layer in document.layers if layer.media_type.startswith(LAYERS)]
        try:
            rootfs = _CONFIG.decode(self._content.read(document.config.digest)).rootfs
        except msgspec.DecodeError as error:
            raise IntegrityError(
                f"the config of {manifest} cannot be read: {error}", next_step="ask the image's author"
            ) from error
        diffs = [Digest.parse(text) for text in rootfs.diff_ids]
        if len(diffs) != len(layers):
            raise IntegrityError(
                f"{manifest} has {len(layers)} layers, its config names {len(diffs)}",
                next_step="ask the image's author",
            )
        return document.config.digest, layers, diffs

    def _there(self, lease: Lease, snapshotter: str, name: Digest) -> bool:
        return leases.hold_snapshot(self._containerd, lease.id, snapshotter, str(name))

    def _apply(
        self,
        snapshots: ContainerdTrees,
        layer: Descriptor,
        diff: Digest,
        name: Digest,
        below: str,
        lease: Lease,
        deadline: Deadline,
    ) -> None:
        active = f"unlade-{uuid.uuid4().hex}"
        request = snapshots_pb2.PrepareSnapshotRequest(
            snapshotter=snapshots.snapshotter,
            key=active,
            parent=below,
            labels={labels.SNAPSHOT_OF: str(name)},
        )
        try:
            mounts = self._containerd.call(_PREPARE, request, "prepare a snapshot", lease=lease.id).mounts
        except Exists:
            # A snapshotter that loads lazily has the layer without our help.
            if self._there(lease, snapshots.snapshotter, name):
                return
            raise
        failpoints.reach("containerd.unpack.prepared")
        try:
            applied = self._containerd.call(
                _APPLY,
                diff_pb2.ApplyRequest(diff=_described(layer), mounts=mounts),
                f"unpack {layer.digest}",
                lease=lease.id,
                deadline=deadline,
                seconds=_APPLY_SECONDS,
            ).applied
            failpoints.reach("containerd.unpack.applied")
            if applied.digest != str(diff):
                raise IntegrityError(
                    f"the layer {layer.digest} unpacks to {applied.digest}, its config says {diff}",
                    next_step="ask the image's author",
                )
            snapshots.commit(active, str(name), {labels.SNAPSHOT_OF: str(name)}, lease)
            failpoints.reach("containerd.unpack.committed")
        finally:
            # A committed snapshot is no longer there under its active key.
            snapshots.remove(active)
        self._content.label(layer.digest, {labels.UNCOMPRESSED: str(diff)})


def chain_ids(diffs: Sequence[Digest]) -> list[Digest]:
    """The names of the snapshots of layers that lie upon one another (image-spec, "Layer ChainID")."""
    chain: list[Digest] = []
    for diff in diffs:
        if not chain:
            chain.append(diff)
            continue
        text = f"{chain[-1]} {diff}".encode()
        chain.append(Digest("sha256", hashlib.sha256(text).hexdigest()))
    return chain


def _described(layer: Descriptor) -> types_pb2.Descriptor:
    return types_pb2.Descriptor(
        media_type=layer.media_type,
        digest=str(layer.digest),
        size=layer.size,
        annotations=dict(layer.annotations),
    )
