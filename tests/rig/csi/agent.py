"""`unlade node csi` as a process of its own beside a kubelet: started, asked to end, killed, measured."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import urllib3

from rig.cluster import Rig
from rig.kube import until
from tests.rig.csi.conftest import csi_config, wait_registered
from unlade.csi.api import csi_pb2 as api
from unlade.csi.contained import ContainerdHolder
from unlade.csi.holding import DirHolder
from unlade.csi.service import InContainerd
from unlade.kernel import failpoints
from unlade.store import DirStore

_BUCKET: Final = re.compile(
    r'unlade_csi_call_seconds_bucket{call="(\w+)",code="OK",le="([^"]+)"} ([0-9.e+]+)'
)


class Agent:
    """The driver on the first node of a rig; its state is kept from one start to the next."""

    def __init__(
        self, rig: Rig, directory: Path, *options: str, contained: InContainerd | None = None
    ) -> None:
        self._rig = rig
        self.contained = contained
        if contained is not None:
            options += ("--containerd-socket", contained.address, "--containerd-state", str(contained.state))
        config = csi_config(rig, rig.node.directory / f"csi-{directory.name}")
        self.socket = config.socket
        self.state = config.state
        self.log = directory / "agent.log"
        self._home = directory
        self._argv = [
            *(sys.executable, "-m", "unlade", "node", "csi"),
            *("--socket", config.socket, "--registration-socket", config.registration),
            *("--state", str(config.state), "--node-name", rig.node.name),
            *("--certs-dir", str(rig.node.directory / "certs.d")),
            *("--listen", "127.0.0.1:0", "--grace", "5"),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, dies_at: str = "", registered: bool = True) -> None:
        """Start, and wait until it serves; `dies_at` is a failpoint that kills it."""
        environment = {**os.environ, "HOME": str(self._home), failpoints.VARIABLE: dies_at}
        before = len(self.lines())
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stderr=log, env=environment)

        def serving() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()
            return any(line["message"].startswith("serving on") for line in self.lines()[before:])

        until("the driver", serving, seconds=60)
        if registered:
            wait_registered(self._rig)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        return self.wait()

    def wait(self, seconds: float = 60) -> int:
        """The exit code, once it ended."""
        assert self._process is not None
        return self._process.wait(seconds)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End it if it runs."""
        if self._process is not None and self.alive:
            self._process.kill()
            self._process.wait()

    def lines(self) -> list[dict[str, Any]]:
        """The log so far: every line is a JSON object, or this raises."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def metrics(self) -> str:
        """Its numbers, as Prometheus reads them."""
        told = next(line for line in reversed(self.lines()) if "probes on port" in line["message"])
        port = told["message"].rpartition(" ")[2]
        answer = urllib3.request("GET", f"http://127.0.0.1:{port}/metrics", timeout=10, retries=False)
        return answer.data.decode()

    def times(self, call: str = "NodePublishVolume") -> dict[float, int]:
        """Upper bound in seconds → how many calls that succeeded took at most that long, since the start."""
        return {
            float(bound): int(float(count))
            for name, bound, count in _BUCKET.findall(self.metrics())
            if name == call
        }

    def cpu(self) -> float:
        """Seconds of CPU that the process has used: a busy machine does not change it much."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def held(self) -> set[str]:
        """What volumes hold, asked of the store while no driver runs."""
        with ExitStack() as parts:
            store = parts.enter_context(DirStore(self.state / "store"))
            if self.contained is None:
                return DirHolder(store).held()
            containerd = parts.enter_context(self.contained.connect())
            return ContainerdHolder(containerd, store, scope=str(self.state)).held()

    def channel(self) -> grpc.Channel:
        """A connection of the caller's own to the driver."""
        return grpc.insecure_channel(f"unix://{self.socket}")


def publish(channel: grpc.Channel, target: Path, timeout: float = 120, **attributes: str) -> None:
    """One NodePublishVolume, as the kubelet asks it; raises grpc.RpcError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    mode = api.VolumeCapability.AccessMode
    call = channel.unary_unary(
        "/csi.v1.Node/NodePublishVolume",
        request_serializer=api.NodePublishVolumeRequest.SerializeToString,
        response_deserializer=api.NodePublishVolumeResponse.FromString,
    )
    ask = api.NodePublishVolumeRequest(
        volume_id=f"csi-{target.parent.name}",
        target_path=str(target),
        volume_capability=api.VolumeCapability(
            mount=api.VolumeCapability.MountVolume(), access_mode=mode(mode=mode.SINGLE_NODE_READER_ONLY)
        ),
        volume_context={"csi.storage.k8s.io/ephemeral": "true", **attributes},
        readonly=True,
    )
    call(ask, timeout=timeout, wait_for_ready=True)


def unpublish(channel: grpc.Channel, target: Path, timeout: float = 120) -> None:
    """One NodeUnpublishVolume; raises grpc.RpcError."""
    call = channel.unary_unary(
        "/csi.v1.Node/NodeUnpublishVolume",
        request_serializer=api.NodeUnpublishVolumeRequest.SerializeToString,
        response_deserializer=api.NodeUnpublishVolumeResponse.FromString,
    )
    ask = api.NodeUnpublishVolumeRequest(volume_id=f"csi-{target.parent.name}", target_path=str(target))
    call(ask, timeout=timeout, wait_for_ready=True)
