"""What a container sees of an inline volume's flags, after its runtime has bound it again (V8).

runc clears every flag of a bind mount that its caller does not name, and the kubelet names `ro` or `rw`
alone. So what must hold inside a pod must not depend on them: read-only is the file system's own, and there
are no set-id bits, file capabilities or devices in the content. `noexec` holds on the node only; docs/csi.md
says so.
"""

from __future__ import annotations

from rig.cluster import Rig
from rig.pods import Namespace
from tests.rig.csi.conftest import inline
from unlade.csi.service import CsiService


def test_read_only_is_not_a_flag_that_a_runtime_can_clear(
    cluster: Rig, namespace: Namespace, service: CsiService
) -> None:
    tool = cluster.registry.push_artifact("flags/tool", {"run": b"#!/bin/sh\necho ran\n"})
    volume = inline(tool.reference)
    del volume["csi"]["readOnly"]
    pod = namespace.run("flags", volumes={"/data": volume})
    pod.wait_ready(seconds=120)
    (line,) = [line for line in pod.exec("cat", "/proc/self/mountinfo").splitlines() if " /data " in line]
    seen, _, system = line.partition(" - ")
    assert system.split()[0] == "overlay"
    assert "ro" in system.split()[2].split(",")
    # As it is today; when a runtime keeps them, the page that says otherwise can go.
    assert not {"nosuid", "nodev", "noexec"} & set(seen.split()[5].split(","))
