"""CSI's Identity service: who this driver is, what it can do, and whether it is ready."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf import wrappers_pb2

from unlade import __version__
from unlade.csi import DRIVER_NAME
from unlade.csi.api import csi_pb2 as api


class Identity:
    """Answers the three calls; `controller`: writable volumes are served too."""

    def __init__(self, *, controller: bool, ready: Callable[[], str]) -> None:
        self._controller = controller
        self._ready = ready

    def info(self, _: api.GetPluginInfoRequest) -> api.GetPluginInfoResponse:
        """The driver's name and version."""
        return api.GetPluginInfoResponse(name=DRIVER_NAME, vendor_version=__version__)

    def capabilities(self, _: api.GetPluginCapabilitiesRequest) -> api.GetPluginCapabilitiesResponse:
        """Volumes live on one node; those that can be written grow while they are in use."""
        if not self._controller:
            return api.GetPluginCapabilitiesResponse()
        service, expansion = api.PluginCapability.Service, api.PluginCapability.VolumeExpansion
        return api.GetPluginCapabilitiesResponse(
            capabilities=[
                api.PluginCapability(service=service(type=service.CONTROLLER_SERVICE)),
                api.PluginCapability(service=service(type=service.VOLUME_ACCESSIBILITY_CONSTRAINTS)),
                api.PluginCapability(volume_expansion=expansion(type=expansion.ONLINE)),
            ]
        )

    def probe(self, _: api.ProbeRequest) -> api.ProbeResponse:
        """Whether calls can be answered now."""
        return api.ProbeResponse(ready=wrappers_pb2.BoolValue(value=not self._ready()))
