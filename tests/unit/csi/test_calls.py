"""The driver's calls beside publishing: registration, and what makes no sense or is not served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.fakes.driver import MODE, Driver
from tests.unit.csi.conftest import refused
from unlade.csi.api import csi_pb2 as api
from unlade.csi.api import registration_pb2
from unlade.errors import InvalidInput

pytestmark = pytest.mark.root
CODE = grpc.StatusCode


def test_calls_that_make_no_sense(driver: Driver, tmp_path: Path) -> None:
    capability = api.VolumeCapability(
        mount=api.VolumeCapability.MountVolume(), access_mode=MODE(mode=MODE.SINGLE_NODE_WRITER)
    )
    block = api.VolumeCapability(
        block=api.VolumeCapability.BlockVolume(), access_mode=MODE(mode=MODE.SINGLE_NODE_WRITER)
    )
    shared = api.VolumeCapability(
        mount=api.VolumeCapability.MountVolume(), access_mode=MODE(mode=MODE.MULTI_NODE_MULTI_WRITER)
    )
    right: dict[str, Any] = {
        "volume_id": "v",
        "target_path": str(driver.target("web")),
        "volume_capability": capability,
    }
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"volume_id": ""}, "volume_id"),
        ({"target_path": ""}, "target_path"),
        ({"target_path": "relative/path"}, "absolute"),
        ({"volume_capability": None}, "volume_capability"),
        ({"volume_capability": block}, "block"),
        ({"volume_capability": shared}, "one node"),
    ]
    for wrong, words in wrongs:
        with pytest.raises(grpc.RpcError) as error:
            driver.call("Node", "NodePublishVolume", **{**right, **wrong})
        refused(error, CODE.INVALID_ARGUMENT, words)
    for odd in ("../../etc/passwd", "a/b", "x" * 4000, "\u2603"):
        with pytest.raises(grpc.RpcError) as error:
            driver.call("Node", "NodePublishVolume", **{**right, "volume_id": odd})
        refused(error, CODE.INVALID_ARGUMENT, "reference")
        driver.call("Node", "NodeUnpublishVolume", volume_id=odd, target_path=right["target_path"])
    driver.nothing_left()


def test_writable_volumes_where_they_are_not_served(driver: Driver) -> None:
    target = driver.target("web")
    capability = api.VolumeCapability(
        mount=api.VolumeCapability.MountVolume(), access_mode=MODE(mode=MODE.SINGLE_NODE_WRITER)
    )
    with pytest.raises(grpc.RpcError) as error:
        driver.call(
            "Node",
            "NodePublishVolume",
            volume_id="w-1",
            target_path=str(target),
            volume_capability=capability,
        )
    refused(error, CODE.FAILED_PRECONDITION, "--writable")
    with pytest.raises(grpc.RpcError) as error:
        driver.call("Controller", "ControllerGetCapabilities")
    assert error.value.code() == CODE.UNIMPLEMENTED
    # One that was published before they were turned off: its pod can end.
    target.mkdir()
    driver.call("Node", "NodeUnpublishVolume", volume_id="w-1", target_path=str(target))
    assert not target.exists()


def test_a_socket_s_path_has_a_limit(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(InvalidInput, match="too long"):
        Driver(long).start()


def test_registration(driver: Driver) -> None:
    told = driver.info()
    assert (told.type, told.name, told.endpoint) == ("CSIPlugin", "oci.unlade.dev", driver.config.socket)
    assert list(told.supported_versions) == ["1.0.0"]
    for status in (
        registration_pb2.RegistrationStatus(plugin_registered=True),
        registration_pb2.RegistrationStatus(error="no"),
    ):
        driver.register("NotifyRegistrationStatus", status, registration_pb2.RegistrationStatusResponse)
    assert driver.call("Identity", "GetPluginInfo").name == "oci.unlade.dev"
    assert driver.call("Identity", "Probe").ready.value
    assert driver.call("Node", "NodeGetInfo").accessible_topology.segments == {
        "oci.unlade.dev/node": "node-1"
    }
    text = driver.service.metrics.text().decode()
    assert 'unlade_csi_call_seconds_count{call="Probe",code="OK"} 1.0' in text
