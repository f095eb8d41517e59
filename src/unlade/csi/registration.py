"""Telling the kubelet of this driver: the registration socket that its plugin watcher finds.

The kubelet watches a directory, connects to every socket in it, asks GetInfo and tells the result by
NotifyRegistrationStatus. The standard node-driver-registrar does the same on a driver's behalf; with this
none is needed. A socket that is made anew (rename) makes the kubelet register again, which is what a
replaced driver wants.
"""

from __future__ import annotations

import logging
from typing import Final

from unlade.csi import DRIVER_NAME
from unlade.csi.api import registration_pb2 as api

_log = logging.getLogger(__name__)
SERVICE: Final = "pluginregistration.Registration"
# The CSI versions, not ours: the kubelet takes plugins of major version 1.
_VERSIONS: Final = ("1.0.0",)


class Registration:
    """Answers the kubelet's plugin watcher; `endpoint` is the driver's socket as the kubelet sees it."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        # Empty until the kubelet has spoken; then "registered", or its complaint.
        self.told = ""

    def info(self, _: api.InfoRequest) -> api.PluginInfo:
        """What kind of plugin this is and where it listens."""
        return api.PluginInfo(
            type="CSIPlugin", name=DRIVER_NAME, endpoint=self._endpoint, supported_versions=_VERSIONS
        )

    def notified(self, status: api.RegistrationStatus) -> api.RegistrationStatusResponse:
        """What became of it. A refusal is logged, and ours to answer: the kubelet tries again by itself."""
        self.told = "registered" if status.plugin_registered else status.error
        if status.plugin_registered:
            _log.info("registered with the kubelet")
        else:
            _log.error("the kubelet refused to register the driver: %s", status.error)
        return api.RegistrationStatusResponse()
