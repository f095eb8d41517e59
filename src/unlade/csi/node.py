"""CSI's Node service: the calls that a kubelet makes on its own node.

It checks what the specification wants checked and hands each call to whom the volume belongs: ids with the
prefix of writable volumes to `Writable`, every other to `Inline`. There is no staging: a mount of a shared
tree costs less than remembering that it was staged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from unlade.csi import TOPOLOGY_KEY, WRITABLE_PREFIX
from unlade.csi.api import csi_pb2 as api
from unlade.csi.attributes import InvalidAttribute, mount_context
from unlade.csi.statuses import NotServed
from unlade.csi.volumes import Inline, Publish
from unlade.csi.writable import Writable
from unlade.mount import unpublish

_Mode = api.VolumeCapability.AccessMode
_Rpc = api.NodeServiceCapability.RPC
_Unit = api.VolumeUsage
# Ways to open a volume that is written by several nodes, which a node's own directory cannot be.
_MANY_NODES: Final = frozenset({_Mode.MULTI_NODE_SINGLE_WRITER, _Mode.MULTI_NODE_MULTI_WRITER})


@dataclass(frozen=True, slots=True)
class Call:
    """What a call's frame knows: how many seconds are left, and whether its caller still waits."""

    seconds: float | None
    alive: Callable[[], bool]


class Node:
    """Answers the node's calls; raises UnladeError, which the server turns into a status."""

    def __init__(self, node_id: str, inline: Inline, writable: Writable | None = None) -> None:
        self._node_id = node_id
        self._inline = inline
        self._writable = writable

    def publish(self, ask: api.NodePublishVolumeRequest, call: Call) -> api.NodePublishVolumeResponse:
        """Mount a volume at its target."""
        _need(ask.volume_id, "volume_id")
        target = _path(ask.target_path, "target_path")
        capability = ask.volume_capability
        if not ask.HasField("volume_capability"):
            raise InvalidAttribute("volume_capability is missing")
        if capability.HasField("block"):
            raise InvalidAttribute("block volumes are not served", next_step="use volumeMode: Filesystem")
        if capability.access_mode.mode in _MANY_NODES:
            raise InvalidAttribute(
                "a volume of this driver is written on one node alone", next_step="use ReadWriteOnce"
            )
        flags = list(capability.mount.mount_flags)
        if ask.volume_id.startswith(WRITABLE_PREFIX):
            readonly = ask.readonly or capability.access_mode.mode in (
                _Mode.SINGLE_NODE_READER_ONLY,
                _Mode.MULTI_NODE_READER_ONLY,
            )
            self._writing().publish(
                ask.volume_id,
                target,
                readonly=readonly,
                executable="noexec" not in flags,
                alone=capability.access_mode.mode == _Mode.SINGLE_NODE_SINGLE_WRITER,
                context=mount_context(flags),
            )
        else:
            self._inline.publish(
                Publish(
                    volume_id=ask.volume_id,
                    target=target,
                    attributes=dict(ask.volume_context),
                    flags=flags,
                    secrets=dict(ask.secrets),
                    seconds=call.seconds,
                    alive=call.alive,
                )
            )
        return api.NodePublishVolumeResponse()

    def unpublish(self, ask: api.NodeUnpublishVolumeRequest, _: Call) -> api.NodeUnpublishVolumeResponse:
        """Take a volume away from its target; what is gone already is no error."""
        _need(ask.volume_id, "volume_id")
        target = _path(ask.target_path, "target_path")
        if ask.volume_id.startswith(WRITABLE_PREFIX) and self._writable is not None:
            self._writable.unpublish(ask.volume_id, target)
        elif ask.volume_id.startswith(WRITABLE_PREFIX):
            # Published before writable volumes were turned off: the pod must be able to end.
            unpublish(target)
        else:
            self._inline.unpublish(ask.volume_id, target)
        return api.NodeUnpublishVolumeResponse()

    def stats(self, ask: api.NodeGetVolumeStatsRequest, _: Call) -> api.NodeGetVolumeStatsResponse:
        """What a volume holds, and whether it is well."""
        _need(ask.volume_id, "volume_id")
        path = os.path.normpath(_need(ask.volume_path, "volume_path"))
        if ask.volume_id.startswith(WRITABLE_PREFIX):
            own = self._writing().stats(ask.volume_id, path)
            usage = [
                _usage(_Unit.BYTES, own.total, own.used, own.available),
                _usage(_Unit.INODES, own.inodes, own.inodes_used, own.inodes_free),
            ]
            problem = ""
        else:
            shared = self._inline.stats(ask.volume_id, path)
            # Read-only content fills its volume exactly; the disk's own numbers are the node's affair.
            usage = [
                _usage(_Unit.BYTES, shared.size, shared.size, 0),
                _usage(_Unit.INODES, shared.entries, shared.entries, 0),
            ]
            problem = shared.problem
        condition = api.VolumeCondition(abnormal=bool(problem), message=problem or "mounted")
        return api.NodeGetVolumeStatsResponse(usage=usage, volume_condition=condition)

    def expand(self, ask: api.NodeExpandVolumeRequest, _: Call) -> api.NodeExpandVolumeResponse:
        """Let a writable volume's file system have the size that its record has."""
        _need(ask.volume_id, "volume_id")
        path = os.path.normpath(_need(ask.volume_path, "volume_path"))
        if not ask.volume_id.startswith(WRITABLE_PREFIX):
            # Sizes of read-only content are its own; an unknown id is one of ours that is not there.
            self._inline.stats(ask.volume_id, path)
            raise NotServed("a read-only volume has the size of its content")
        writable = self._writing()
        size = ask.capacity_range.required_bytes or writable.get(ask.volume_id).size
        expanded = writable.expand(ask.volume_id, size, limit=ask.capacity_range.limit_bytes)
        return api.NodeExpandVolumeResponse(capacity_bytes=expanded.size)

    def capabilities(self, _: api.NodeGetCapabilitiesRequest, __: Call) -> api.NodeGetCapabilitiesResponse:
        """Which of the optional calls are served."""
        kinds = [_Rpc.GET_VOLUME_STATS, _Rpc.VOLUME_CONDITION]
        if self._writable is not None:
            kinds += [_Rpc.EXPAND_VOLUME, _Rpc.SINGLE_NODE_MULTI_WRITER]
        return api.NodeGetCapabilitiesResponse(
            capabilities=[api.NodeServiceCapability(rpc=_Rpc(type=kind)) for kind in kinds]
        )

    def info(self, _: api.NodeGetInfoRequest, __: Call) -> api.NodeGetInfoResponse:
        """Which node this is; volumes of the driver are reachable on their own node alone."""
        topology = api.Topology(segments={TOPOLOGY_KEY: self._node_id})
        return api.NodeGetInfoResponse(node_id=self._node_id, accessible_topology=topology)

    def _writing(self) -> Writable:
        if self._writable is None:
            raise NotServed(
                "this node serves no writable volumes", next_step="start the node's agent with --writable"
            )
        return self._writable


def _usage(unit: api.VolumeUsage.Unit, total: int, used: int, available: int) -> api.VolumeUsage:
    return api.VolumeUsage(unit=unit, total=total, used=used, available=available)


def _need(value: str, name: str) -> str:
    if not value:
        raise InvalidAttribute(f"{name} is missing")
    return value


def _path(text: str, name: str) -> str:
    _need(text, name)
    if not os.path.isabs(text) or "\0" in text:
        raise InvalidAttribute(f"{name} {text[:200]!r} is not an absolute path")
    return os.path.normpath(text)
