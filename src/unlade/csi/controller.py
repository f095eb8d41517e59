"""CSI's Controller service over the writable volumes of this node.

It runs on every node and speaks for that node alone: volumes are accessible where they were made, and the
standard external-provisioner drives it in its mode for node-local drivers (`--node-deployment`, with strict
topology), as the specification describes; our own provisioner does not come this way. Content is named by a
storage class's parameters (that provisioner hands a foreign `dataSourceRef` to nobody), or copied from a
snapshot or volume. Lists are in the order of ids, and a page's token is the last id of the page before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf import timestamp_pb2, wrappers_pb2

from unlade.csi import TOPOLOGY_KEY
from unlade.csi.api import csi_pb2 as api
from unlade.csi.attributes import InvalidAttribute, parse
from unlade.csi.credentials import from_secret
from unlade.csi.node import Call
from unlade.csi.server import Answer
from unlade.csi.statuses import Overtaken
from unlade.csi.writable import NoRoom, Snapshot, Volume, Writable, images, is_snapshot, is_writable
from unlade.csi.writable.volumes import DEFAULT_SIZE
from unlade.model import Deadline

_Mode = api.VolumeCapability.AccessMode
_Rpc = api.ControllerServiceCapability.RPC
_MODES: Final = frozenset(
    {
        _Mode.SINGLE_NODE_WRITER,
        _Mode.SINGLE_NODE_READER_ONLY,
        _Mode.SINGLE_NODE_SINGLE_WRITER,
        _Mode.SINGLE_NODE_MULTI_WRITER,
    }
)
_CAPABILITIES: Final = (
    _Rpc.CREATE_DELETE_VOLUME,
    _Rpc.LIST_VOLUMES,
    _Rpc.GET_CAPACITY,
    _Rpc.CREATE_DELETE_SNAPSHOT,
    _Rpc.LIST_SNAPSHOTS,
    _Rpc.CLONE_VOLUME,
    _Rpc.EXPAND_VOLUME,
    _Rpc.SINGLE_NODE_MULTI_WRITER,
)
# What the specification gives names and ids.
_MOST_BYTES: Final = 128

T = TypeVar("T", Volume, Snapshot)


class BadToken(Overtaken):
    """A page's token that this driver did not give out; CSI wants it told as an aborted list."""

    code = "bad-token"


@dataclass(frozen=True, slots=True)
class Controller:
    """Answers the controller's calls; raises UnladeError, which the server turns into a status."""

    writable: Writable
    node_id: str

    def create(self, ask: api.CreateVolumeRequest, call: Call) -> api.CreateVolumeResponse:
        """Make a volume, or find it made."""
        _name(ask.name)
        _capabilities(ask.volume_capabilities)
        self._on_this_node(ask.accessibility_requirements)
        required, limit = _sizes(ask.capacity_range)
        origin = self._origin(ask.volume_content_source)
        deadline = Deadline.after(call.seconds) if call.seconds is not None else None
        credentials = None
        if ask.secrets and not origin:
            credentials = from_secret(dict(ask.secrets), parse(ask.parameters).references)
        volume = self.writable.create(
            ask.name,
            required,
            dict(ask.parameters),
            limit=limit,
            origin=origin,
            credentials=credentials,
            deadline=deadline,
        )
        return api.CreateVolumeResponse(volume=self._told(volume))

    def delete(self, ask: api.DeleteVolumeRequest, _: Call) -> api.DeleteVolumeResponse:
        """Delete a volume; what is gone already is no error."""
        _need(ask.volume_id, "volume_id")
        self.writable.delete(ask.volume_id)
        return api.DeleteVolumeResponse()

    def validate(
        self, ask: api.ValidateVolumeCapabilitiesRequest, _: Call
    ) -> api.ValidateVolumeCapabilitiesResponse:
        """Whether a volume can be used so."""
        _need(ask.volume_id, "volume_id")
        if not ask.volume_capabilities:
            raise InvalidAttribute("volume_capabilities are missing")
        self.writable.get(ask.volume_id)
        try:
            _capabilities(ask.volume_capabilities)
        except InvalidAttribute as error:
            return api.ValidateVolumeCapabilitiesResponse(message=error.message)
        confirmed = api.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=ask.volume_context,
            volume_capabilities=ask.volume_capabilities,
            parameters=ask.parameters,
        )
        return api.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    def volumes(self, ask: api.ListVolumesRequest, _: Call) -> api.ListVolumesResponse:
        """The volumes of this node, a page at a time."""
        ready = [volume for volume in self.writable.volumes() if volume.state == "ready"]
        page, token = _page(ready, ask.max_entries, ask.starting_token)
        entries = [api.ListVolumesResponse.Entry(volume=self._told(volume)) for volume in page]
        return api.ListVolumesResponse(entries=entries, next_token=token)

    def capacity(self, ask: api.GetCapacityRequest, _: Call) -> api.GetCapacityResponse:
        """What can still be promised on this node; nothing for another one."""
        segments = ask.accessible_topology.segments
        if segments and segments.get(TOPOLOGY_KEY) != self.node_id:
            return api.GetCapacityResponse(available_capacity=0)
        available = self.writable.room().available
        return api.GetCapacityResponse(
            available_capacity=available,
            maximum_volume_size=wrappers_pb2.Int64Value(value=min(available, images.MAX_SIZE)),
            minimum_volume_size=wrappers_pb2.Int64Value(value=images.MIN_SIZE),
        )

    def capabilities(
        self, _: api.ControllerGetCapabilitiesRequest, __: Call
    ) -> api.ControllerGetCapabilitiesResponse:
        """Which of the optional calls are served."""
        kinds = [api.ControllerServiceCapability(rpc=_Rpc(type=kind)) for kind in _CAPABILITIES]
        return api.ControllerGetCapabilitiesResponse(capabilities=kinds)

    def snapshot(self, ask: api.CreateSnapshotRequest, _: Call) -> api.CreateSnapshotResponse:
        """Copy a volume as it is now, or find it copied."""
        _name(ask.name)
        _need(ask.source_volume_id, "source_volume_id")
        if ask.parameters:
            raise InvalidAttribute(
                f"unknown parameter {min(ask.parameters)!r}", next_step="a snapshot class has none here"
            )
        return api.CreateSnapshotResponse(
            snapshot=_snapshot(self.writable.snapshot(ask.name, ask.source_volume_id))
        )

    def delete_snapshot(self, ask: api.DeleteSnapshotRequest, _: Call) -> api.DeleteSnapshotResponse:
        """Delete a snapshot; what is gone already is no error."""
        _need(ask.snapshot_id, "snapshot_id")
        self.writable.delete_snapshot(ask.snapshot_id)
        return api.DeleteSnapshotResponse()

    def snapshots(self, ask: api.ListSnapshotsRequest, _: Call) -> api.ListSnapshotsResponse:
        """The snapshots of this node, a page at a time; of one volume, or the one of an id, where named."""
        found = [
            snapshot
            for snapshot in self.writable.snapshots()
            if ask.snapshot_id in ("", snapshot.id) and ask.source_volume_id in ("", snapshot.volume)
        ]
        page, token = _page(found, ask.max_entries, ask.starting_token)
        entries = [api.ListSnapshotsResponse.Entry(snapshot=_snapshot(one)) for one in page]
        return api.ListSnapshotsResponse(entries=entries, next_token=token)

    def expand(self, ask: api.ControllerExpandVolumeRequest, _: Call) -> api.ControllerExpandVolumeResponse:
        """Let a volume grow, in use or not."""
        _need(ask.volume_id, "volume_id")
        if not ask.HasField("capacity_range"):
            raise InvalidAttribute("capacity_range is missing")
        required, limit = _sizes(ask.capacity_range)
        grown = self.writable.expand(ask.volume_id, required, limit=limit)
        return api.ControllerExpandVolumeResponse(
            capacity_bytes=grown.size, node_expansion_required=grown.pending
        )

    def _told(self, volume: Volume) -> api.Volume:
        source = None
        if is_snapshot(volume.origin):
            part = api.VolumeContentSource.SnapshotSource(snapshot_id=volume.origin)
            source = api.VolumeContentSource(snapshot=part)
        elif volume.origin:
            source = api.VolumeContentSource(
                volume=api.VolumeContentSource.VolumeSource(volume_id=volume.origin)
            )
        return api.Volume(
            volume_id=volume.id,
            capacity_bytes=volume.size,
            content_source=source,
            accessible_topology=[api.Topology(segments={TOPOLOGY_KEY: self.node_id})],
        )

    def _on_this_node(self, wanted: api.TopologyRequirement) -> None:
        places = [*wanted.requisite, *wanted.preferred]
        if places and not any(place.segments.get(TOPOLOGY_KEY) == self.node_id for place in places):
            raise NoRoom(
                f"the volume is wanted on another node than {self.node_id}",
                next_step="run the provisioner with --node-deployment and --strict-topology",
            )

    def _origin(self, source: api.VolumeContentSource) -> str:
        kind = source.WhichOneof("type")
        if kind == "snapshot":
            _need(source.snapshot.snapshot_id, "snapshot_id")
            return source.snapshot.snapshot_id
        if kind == "volume":
            _need(source.volume.volume_id, "volume_id")
            return source.volume.volume_id
        return ""


def controller_of(writable: Writable, node_id: str) -> Mapping[str, Answer]:
    """The service's calls by name, for `CsiServer`."""
    controller = Controller(writable, node_id)
    return {
        "CreateVolume": controller.create,
        "DeleteVolume": controller.delete,
        "ValidateVolumeCapabilities": controller.validate,
        "ListVolumes": controller.volumes,
        "GetCapacity": controller.capacity,
        "ControllerGetCapabilities": controller.capabilities,
        "CreateSnapshot": controller.snapshot,
        "DeleteSnapshot": controller.delete_snapshot,
        "ListSnapshots": controller.snapshots,
        "ControllerExpandVolume": controller.expand,
    }


def _snapshot(snapshot: Snapshot) -> api.Snapshot:
    created = timestamp_pb2.Timestamp()
    created.FromNanoseconds(int(snapshot.created * 1e9))
    return api.Snapshot(
        snapshot_id=snapshot.id,
        source_volume_id=snapshot.volume,
        size_bytes=snapshot.size,
        creation_time=created,
        ready_to_use=True,
    )


def _page(items: Sequence[T], most: int, token: str) -> tuple[Sequence[T], str]:
    """The items after the token, `most` of them (0: all), and the token of the page after."""
    if most < 0:
        raise InvalidAttribute("max_entries is negative")
    if token and not (is_snapshot(token) or is_writable(token)):
        raise BadToken("the starting_token is none of ours", next_step="list again without one")
    # By order, not by place: what was deleted or made between two pages moves nothing.
    rest = [item for item in items if item.id > token]
    if not most or len(rest) <= most:
        return rest, ""
    return rest[:most], rest[most - 1].id


def _capabilities(capabilities: Iterable[api.VolumeCapability]) -> None:
    asked = list(capabilities)
    if not asked:
        raise InvalidAttribute("volume_capabilities are missing")
    for capability in asked:
        if capability.WhichOneof("access_type") is None:
            raise InvalidAttribute("a volume capability has no access type")
        if capability.HasField("block"):
            raise InvalidAttribute("block volumes are not served", next_step="use volumeMode: Filesystem")
        if capability.access_mode.mode not in _MODES:
            raise InvalidAttribute(
                "a volume of this driver is used on one node alone",
                next_step="use ReadWriteOnce or ReadWriteOncePod",
            )


def _sizes(asked: api.CapacityRange) -> tuple[int, int]:
    required, limit = asked.required_bytes, asked.limit_bytes
    if required < 0 or limit < 0 or (limit and required > limit):
        raise InvalidAttribute(f"capacity_range {required} to {limit} is no range")
    # A limit alone is a size that may be had, as long as it is less than the usual one.
    return (required or min(limit, DEFAULT_SIZE) if limit else required), limit


def _need(value: str, name: str) -> None:
    if not value:
        raise InvalidAttribute(f"{name} is missing")


def _name(name: str) -> None:
    _need(name, "name")
    if len(name.encode()) > _MOST_BYTES:
        raise InvalidAttribute(f"a name has at most {_MOST_BYTES} bytes", next_step="choose a shorter one")
