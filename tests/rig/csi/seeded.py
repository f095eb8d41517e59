"""The node's agent with writable volumes, as a process under the account that deploy/csi gives it.

Tests never run it in their own process nor as the administrator: kill is a real kill, and a right that is
missing from rbac-writable.yaml fails a test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rig.cluster import Rig
from rig.kube import ApiError, Json, until
from rig.pods import Namespace
from tests.rig.csi.conftest import DEPLOY, DRIVER, wait_registered

NAMESPACE, ACCOUNT = "unlade-system", "unlade-csi"
CLASS = "unlade"
UNLADE, STORAGE = "unlade.dev/v1alpha1", "storage.k8s.io/v1"
FILES = (
    "namespace.yaml",
    "rbac.yaml",
    "rbac-writable.yaml",
    "csidriver.yaml",
    "ocisource.yaml",
    "storageclass.yaml",
)
MIB = 1 << 20


def install(rig: Rig) -> Path:
    """What an administrator applies, but for the DaemonSet; a kubeconfig for its account."""
    for name in FILES:
        rig.kubectl("apply", "-f", str(DEPLOY / name))
    until("the kind is served", lambda: _served(rig))
    return rig.account_kubeconfig(NAMESPACE, ACCOUNT)


def _served(rig: Rig) -> bool:
    try:
        return rig.api.list("OCISource", version=UNLADE) == []
    except ApiError:
        return False


class Agent:
    """`unlade node csi --writable` on a rig's node. `kill` is kill -9; `start` it as often as one likes."""

    def __init__(self, rig: Rig, kubeconfig: Path, state: Path) -> None:
        self.rig = rig
        self.state = state
        root = rig.node.kubelet_root
        (root / "plugins" / DRIVER).mkdir(parents=True, exist_ok=True)
        (root / "plugins_registry").mkdir(parents=True, exist_ok=True)
        self._argv = [
            *(sys.executable, "-m", "unlade", "node", "csi", "--writable"),
            f"--socket={root / 'plugins' / DRIVER / 'csi.sock'}",
            f"--registration-socket={root / 'plugins_registry' / f'{DRIVER}-reg.sock'}",
            f"--state={state}",
            f"--node-name={rig.node.name}",
            f"--namespace={NAMESPACE}",
            f"--certs-dir={rig.node.directory / 'certs.d'}",
            f"--kubeconfig={kubeconfig}",
            "--listen=127.0.0.1:0",
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self.log = rig.logs / f"unlade-csi-{time.time_ns()}.log"

    @property
    def writable(self) -> Path:
        """Where the volumes are."""
        return self.state / "csi" / "writable"

    def start(self, *, failpoint: str = "") -> None:
        """Start it and wait until the kubelet knows it."""
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        if failpoint:
            environment["UNLADE_FAILPOINT"] = failpoint
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self._argv, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        if not failpoint:
            # The kubelet may still know the agent that another test has just stopped.
            until("the agent has its directory", self.writable.is_dir, seconds=60)
            wait_registered(self.rig)

    def kill(self) -> None:
        """SIGKILL and wait."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """SIGTERM and wait; a clean end is 0."""
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log.read_text()[-3000:]

    def volumes(self) -> list[str]:
        """The ids of the volumes on the node's disk."""
        return [name for name in os.listdir(self.writable) if name.startswith("w-")]

    def taken(self) -> int:
        """Bytes of disk under the state directory: content once, and each volume's own."""
        done = subprocess.run(["du", "-s", "-B1", "-x", self.state], capture_output=True, check=False)
        return int(done.stdout.split()[0])


def source(namespace: Namespace, name: str, *references: str, **spec: str) -> None:
    """An OCISource."""
    body = {"references": list(references), **spec}
    namespace.create({"apiVersion": UNLADE, "kind": "OCISource", "metadata": {"name": name}, "spec": body})


def claim_spec(name: str, size: str, *, storage_class: str = CLASS) -> Json:
    """The spec of a claim whose volume starts with an OCISource; without one when the name is empty."""
    spec: Json = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": storage_class,
        "resources": {"requests": {"storage": size}},
    }
    if name:
        spec["dataSourceRef"] = {"apiGroup": "unlade.dev", "kind": "OCISource", "name": name}
    return spec


def ephemeral(name: str, size: str = "64Mi") -> Json:
    """A pod's own writable volume that starts with an OCISource."""
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim_spec(name, size)}}}


def by_hand(
    namespace: Namespace, name: str, spec: Json, annotations: Mapping[str, str] | None = None
) -> Json:
    """A claim that is not a pod's own; the volume source that names it."""
    metadata = {"name": name, "annotations": dict(annotations or {})}
    namespace.create(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
    )
    return {"persistentVolumeClaim": {"claimName": name}}


def wait_claim_event(namespace: Namespace, claim: str, reason: str, contains: str = "") -> Json:
    """Wait for an event about a claim."""
    selector = f"involvedObject.name={claim},involvedObject.kind=PersistentVolumeClaim"

    def seen() -> Json | None:
        found = namespace.api.list("Event", namespace.name, fieldSelector=selector)
        return next((e for e in found if e["reason"] == reason and contains in e["message"]), None)

    return until(f"event {reason} {contains!r} on claim {claim}", seen, seconds=60)
