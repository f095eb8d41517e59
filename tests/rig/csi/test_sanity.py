"""csi-sanity, the specification's own test suite, against the driver with all its services.

Every spec that is skipped must be skipped for a capability that the driver does not claim; the list is here,
and a skip for another reason, or one that no longer happens, fails the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from rig import engines
from tests.fakes.driver import Driver
from tests.fakes.registry import FakeRegistry
from unlade.model.mediatypes import ANNOTATION_TITLE

# The specification knows nothing of stores: CI asks once.
STORES = ("directory", "containerd") if os.environ.get("UNLADE_FULL") == "1" else ("directory",)
# What csi-sanity says when it skips → the capability that the driver does not claim, and why not.
SKIPPED = {
    # PUBLISH_UNPUBLISH_VOLUME: volumes are directories of one node; there is nothing to attach.
    "ControllerPublishVolume not supported": 7,
    "ControllerUnpublishVolume not supported": 1,
    "Controller Publish, UnpublishVolume not supported": 2,
    # STAGE_UNSTAGE_VOLUME: mounting costs less than remembering that a volume was staged.
    "NodeStageVolume not supported": 3,
    "NodeUnstageVolume not supported": 2,
    # MODIFY_VOLUME: a volume has no properties but its size.
    "ControllerModifyVolume not supported": 6,
    "Modify volume not supported": 1,
    "Modify Volume not supported": 1,
    # Alpha: GET_SNAPSHOT, GET_VOLUME_HEALTH, LIST_VOLUME_HEALTH, GET_STORAGE_HEALTH,
    # SNAPSHOT_ACCESSIBILITY_CONSTRAINTS. No kubelet or sidecar asks for them yet; health is told by
    # NodeGetVolumeStats, which kubelets read.
    "GetSnapshot not supported": 3,
    "ControllerGetVolumeHealth not supported": 2,
    "ControllerListVolumeHealth not supported": 1,
    "NodeGetVolumeHealth not supported": 2,
    "NodeGetStorageHealth not supported": 1,
    "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS not supported": 1,
    # GROUP_CONTROLLER_SERVICE: snapshots of several volumes at one moment.
    "GroupControllerService not supported": 6,
}


@pytest.mark.parametrize("store", STORES)
def test_csi_sanity_has_no_failure_and_skips_what_is_not_claimed(
    tmp_path: Path, request: pytest.FixtureRequest, store: str
) -> None:
    contained = request.getfixturevalue("contained") if store == "containerd" else None
    # A short path: sockets' names are limited to some hundred characters.
    with tempfile.TemporaryDirectory(prefix="csi-") as short, FakeRegistry() as registry:
        base = Path(short)
        blob = registry.put_blob("team/seed", b"seed", "application/octet-stream", {ANNOTATION_TITLE: "file"})
        registry.put_artifact("team/seed", "v1", [blob], "application/vnd.example.content.v1")
        parameters = tmp_path / "parameters.yaml"
        parameters.write_text(f"reference: {registry.reference('team/seed', 'v1')}\n")
        report = tmp_path / "report.json"
        with Driver(base, registry, writable=True, containerd=contained) as driver:
            ran = subprocess.run(
                [
                    engines.binary("csi-sanity"),
                    f"--csi.endpoint={driver.config.socket}",
                    f"--csi.mountdir={base / 'mount'}",
                    f"--csi.stagingdir={base / 'staging'}",
                    f"--csi.testvolumeparameters={parameters}",
                    f"--csi.testvolumesize={64 << 20}",
                    f"--csi.testvolumeexpandsize={96 << 20}",
                    f"--ginkgo.json-report={report}",
                    "--ginkgo.no-color",
                ],
                check=False,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert ran.returncode == 0, ran.stdout[-20000:]
            assert driver.service.writable is not None
            assert driver.service.writable.volumes() == []
            driver.nothing_left()
    specs = [
        spec
        for suite in json.loads(report.read_text())
        for spec in suite["SpecReports"]
        if spec["LeafNodeType"] == "It"
    ]
    states = Counter(spec["State"] for spec in specs)
    skipped = Counter(spec["Failure"]["Message"] for spec in specs if spec["State"] == "skipped")
    assert dict(skipped) == SKIPPED
    # One spec is pending in csi-sanity itself.
    assert states == {
        "passed": len(specs) - sum(SKIPPED.values()) - 1,
        "skipped": sum(SKIPPED.values()),
        "pending": 1,
    }
