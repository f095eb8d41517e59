"""The manifests of deploy/csi: taken by the API server as they are, and running as a DaemonSet (V21).

The agent's image is made from this checkout. Paths of the machine are replaced by the rig's own, and the
image's name; all else is as shipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig import agent_image
from rig.cluster import Rig
from rig.kube import Json, until
from rig.pods import Namespace
from tests.rig.csi.conftest import DEPLOY, inline, wait_registered
from unlade.mount.table import read_table

SYSTEM = "unlade-system"
APPS = "apps/v1"
NEEDED = ("namespace.yaml", "csidriver.yaml", "rbac.yaml")


def test_every_manifest_is_accepted(cluster: Rig) -> None:
    cluster.kubectl("apply", "-f", str(DEPLOY / "namespace.yaml"))
    for path in sorted(DEPLOY.glob("*.yaml")):
        cluster.kubectl("apply", "--validate=strict", "--dry-run=server", "-f", str(path))


def test_the_option_for_containerd_is_accepted(cluster: Rig, tmp_path: Path) -> None:
    """What the README's sed makes: one argument and three mounts more, each at the host's own path."""
    plain = (DEPLOY / "daemonset.yaml").read_text()
    told = tmp_path / "daemonset.yaml"
    told.write_text(plain.replace("#containerd# ", ""))
    cluster.kubectl("apply", "-f", str(DEPLOY / "namespace.yaml"))
    answer = cluster.kubectl("apply", "--validate=strict", "--dry-run=server", "-o", "json", "-f", str(told))
    spec = json.loads(answer)["spec"]["template"]["spec"]
    (agent,) = spec["containers"]
    assert "--containerd-socket=/run/containerd/containerd.sock" in agent["args"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
    assert mounts == paths
    assert {"/run/containerd", "/var/lib/containerd", "/run/unlade"} <= set(paths.values())


@pytest.fixture(scope="module", params=["directory", "containerd"])
def installed(
    cluster: Rig, tmp_path_factory: pytest.TempPathFactory, full: bool, request: pytest.FixtureRequest
) -> Iterator[Rig]:
    """The driver, installed as its README says, with either store."""
    if not full:
        pytest.skip("takes a minute; run with UNLADE_FULL=1")
    if not agent_image.fits():
        pytest.skip("this environment's packages do not run on Debian's Python")
    scratch = tmp_path_factory.mktemp("image")
    image = agent_image.push(cluster.registry, scratch)
    node = cluster.node
    (node.directory / "agent").mkdir(exist_ok=True)
    text = (DEPLOY / "daemonset.yaml").read_text()
    for shipped, here in (
        # In this order: the rig's own paths hold the second of the names.
        ("/var/lib/unlade", str(node.directory / "agent")),
        ("/var/lib/kubelet", str(node.kubelet_root)),
        ("path: /etc/containerd/certs.d", f"path: {node.directory / 'certs.d'}"),
        ("unlade:0.1.0", image.reference),
    ):
        assert shipped in text
        text = text.replace(shipped, here)
    if request.param == "containerd":
        text = text.replace("#containerd# ", "")
        (node.directory / "csi-locks").mkdir(exist_ok=True)
        for shipped, here in (
            (r"(?<==)/run/containerd/containerd\.sock$", str(node.containerd_socket)),
            (r"(?<=ath: )/run/containerd$", str(node.containerd_socket)),
            (r"(?<=ath: )/var/lib/containerd$", f"{node.directory}/containerd/root"),
            (r"(?<= path: )/run/unlade$", f"{node.directory}/csi-locks"),
        ):
            text, count = re.subn(shipped, here, text, flags=re.MULTILINE)
            assert count, shipped
    for name in NEEDED:
        cluster.kubectl("apply", "-f", str(DEPLOY / name))
    manifest = scratch / "daemonset.yaml"
    manifest.write_text(text)
    cluster.kubectl("apply", "--validate=strict", "-f", str(manifest))
    yield cluster
    cluster.kubectl("delete", "-f", str(manifest), "--wait=true", "--cascade=foreground")


def _agents(rig: Rig) -> list[Json]:
    found = rig.api.list("Pod", SYSTEM, labelSelector="app.kubernetes.io/name=unlade-csi")
    return [
        pod
        for pod in found
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        and "deletionTimestamp" not in pod["metadata"]
    ]


def _wait_agent(rig: Rig, *, other_than: str = "") -> str:
    """The UID of an agent that is ready; when none is, the log of what there is."""

    def ready() -> str:
        return next((uid for uid in (p["metadata"]["uid"] for p in _agents(rig)) if uid != other_than), "")

    try:
        return until("the agent is ready", ready, seconds=90)
    except AssertionError as error:
        error.add_note(rig.kubectl("-n", SYSTEM, "logs", "daemonset/unlade-csi", "--tail=30"))
        raise


def test_the_daemonset_serves_and_is_replaced_under_running_pods(
    installed: Rig, namespace: Namespace
) -> None:
    before = _wait_agent(installed)
    wait_registered(installed)
    artifact = installed.registry.push_artifact("deployed/model", {"f": b"deployed", "d/g": b"part"})
    read = "while :; do cat /data/f /part/g >/dev/null || exit 1; done"
    volumes = {"/data": inline(artifact.reference), "/part": inline(artifact.pinned, subPath="d")}
    reader = namespace.run("reader", command=read, volumes=volumes)
    reader.wait_ready()
    change = {"spec": {"template": {"metadata": {"annotations": {"changed": "yes"}}}}}
    installed.api.patch("DaemonSet", "unlade-csi", change, SYSTEM, version=APPS)
    _wait_agent(installed, other_than=before)
    after = namespace.run("after", command="cat /data/f /part/g", volumes=volumes)
    after.wait("Succeeded")
    assert after.logs() == "deployedpart"
    state = reader.read()["status"]["containerStatuses"][0]
    assert (state["restartCount"], list(state["state"])) == (0, ["running"])
    uid = reader.read()["metadata"]["uid"]
    assert any(uid.encode() in entry.path for entry in read_table())
    reader.delete()
    until(
        "its mounts are gone",
        lambda: not any(uid.encode() in entry.path for entry in read_table()),
    )


def test_the_account_has_no_rights(cluster: Rig) -> None:
    for verb, what in (("get", "secrets"), ("list", "pods"), ("create", "events"), ("get", "nodes")):
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "metadata": {},
            "spec": {
                "user": f"system:serviceaccount:{SYSTEM}:unlade-csi",
                "groups": [
                    "system:serviceaccounts",
                    f"system:serviceaccounts:{SYSTEM}",
                    "system:authenticated",
                ],
                "resourceAttributes": {"verb": verb, "resource": what, "namespace": "default"},
            },
        }
        assert cluster.api.create(review)["status"]["allowed"] is False, (verb, what)
