"""The runtime handlers of this node: containerd's own, with what the node's configuration adds to them.

containerd's CRI tells the handlers it has, and in its verbose answer which is the default and which have a
snapshotter of their own. It does not know what runs inside them: the platform of a handler's guests is the
host's unless the configuration says otherwise (R3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import grpc
import msgspec

from unlade.containerd import ContainerdUnavailable, Handler, Handlers
from unlade.cri.api import images_pb2 as api
from unlade.model import Platform

_DEFAULT_SNAPSHOTTER: Final = "overlayfs"


class _Runtime(msgspec.Struct):
    snapshotter: str = ""


class _Runtimes(msgspec.Struct, rename="camel"):
    default_runtime_name: str = ""
    runtimes: dict[str, _Runtime] = {}


class _Config(msgspec.Struct):
    containerd: _Runtimes = msgspec.field(default_factory=_Runtimes)


_CONFIG = msgspec.json.Decoder(_Config)


def discover(channel: grpc.Channel, configured: Iterable[Handler], *, seconds: float) -> Handlers:
    """Every handler of this node; waits so long for containerd, then raises ContainerdUnavailable."""
    status = channel.unary_unary(
        "/runtime.v1.RuntimeService/Status",
        request_serializer=api.StatusRequest.SerializeToString,
        response_deserializer=api.StatusResponse.FromString,
    )
    try:
        answer: Any = status(api.StatusRequest(verbose=True), timeout=seconds, wait_for_ready=True)
    except grpc.RpcError as error:
        raise ContainerdUnavailable(
            f"containerd's CRI does not answer: {error.details() or error.code().name}",
            next_step="check that containerd runs and that its CRI plugin is on",
        ) from error
    return from_status(answer, configured)


def from_status(answer: api.StatusResponse, configured: Iterable[Handler]) -> Handlers:
    """The handlers that containerd told; those of the configuration instead, where it names them."""
    try:
        told = _CONFIG.decode(answer.info.get("config", "{}")).containerd
    except msgspec.DecodeError:
        told = _Runtimes()  # the verbose answer is for people: nothing promises its form
    names = [handler.name for handler in answer.runtime_handlers if handler.name]
    known = {
        name: Handler(
            name,
            Platform.host(),
            told.runtimes.get(name, _Runtime()).snapshotter or _DEFAULT_SNAPSHOTTER,
        )
        for name in names
    }
    for handler in configured:
        # A guest's platform alone leaves the snapshotter containerd's.
        there = known[handler.name].snapshotter if handler.name in known else _DEFAULT_SNAPSHOTTER
        known[handler.name] = replace(handler, snapshotter=handler.snapshotter or there)
    default = told.default_runtime_name
    if default not in known:
        default = "runc" if "runc" in known or not known else next(iter(known))
        known.setdefault(default, Handler(default, Platform.host(), _DEFAULT_SNAPSHOTTER))
    return Handlers(default, known)
