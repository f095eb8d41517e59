"""A kubelet's side of the CSI driver, for tests: calls over the real socket, and pods' directories.

    with Driver(tmp_path, registry) as driver:
        pod = driver.publish("web", reference=str(registry.reference("a/b", "v1")))
        assert (pod / "file").read_bytes() == b"…"
        driver.unpublish("web")

The driver runs in this process behind its own sockets; `restart` makes a new one on the same state, and
`reboot` takes all mounts away first, as a machine does that was switched off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from tests.fakes.registry import FakeRegistry
from unlade.containerd import Containerd, labels, leases
from unlade.containerd.api import snapshots_pb2
from unlade.containerd.connection import Method
from unlade.containerd.images import ImageRecords
from unlade.csi.api import csi_pb2 as api
from unlade.csi.api import registration_pb2
from unlade.csi.pods import PodEvents
from unlade.csi.service import CsiConfig, CsiService, InContainerd, Shared
from unlade.mount import is_mount_point, unpublish
from unlade.registry import RegistryConfig
from unlade.store import collect

MODE = api.VolumeCapability.AccessMode


class Driver:
    """A context manager; every mount below its directory is gone afterwards."""

    def __init__(
        self,
        directory: Path,
        *registries: FakeRegistry,
        events: PodEvents | None = None,
        shared: Callable[[], Shared] | None = None,
        **settings: Any,
    ) -> None:
        self.pods = directory / "pods"
        self.pods.mkdir(exist_ok=True)
        self._events = events
        self._shared = shared
        self.config = CsiConfig(
            socket=str(directory / "csi.sock"),
            registration=str(directory / "reg.sock"),
            state=directory / "state",
            node_id="node-1",
            registry=RegistryConfig(
                plain_http=frozenset(registry.host for registry in registries), attempts=1, answer_timeout=5.0
            ),
            **settings,
        )
        self.service = CsiService(self.config, events=events, shared=shared)
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.lose_mounts()

    def start(self, **changes: Any) -> None:
        """A new driver on the same state, with settings changed."""
        self.config = replace(self.config, **changes)
        self.service = CsiService(self.config, events=self._events, shared=self._shared)
        self.service.start()
        self.connect()

    def connect(self) -> None:
        """Talk to whatever driver listens on the socket: ours, or a process that a test started."""
        if self._channel is not None:
            self._channel.close()
        self._channel = grpc.insecure_channel(f"unix://{self.config.socket}")

    def stop(self) -> None:
        """End the driver as SIGTERM does; idempotent."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.service.close(1.0)

    def restart(self, **changes: Any) -> None:
        """The driver replaced; mounts stay."""
        self.stop()
        self.start(**changes)

    def reboot(self, **changes: Any) -> None:
        """The machine restarted: records are left, mounts are not."""
        self.stop()
        self.lose_mounts()
        self.start(**changes)

    def lose_mounts(self) -> None:
        """Every mount in the pods' directories goes, and its mount point with it."""
        for target in self.pods.glob("*/*/mount"):
            if is_mount_point(str(target)):
                unpublish(str(target))

    def call(self, service: str, name: str, timeout: float = 30.0, **fields: Any) -> Any:
        """One call; raises grpc.RpcError."""
        assert self._channel is not None
        method = self._channel.unary_unary(
            f"/csi.v1.{service}/{name}",
            request_serializer=getattr(api, f"{name}Request").SerializeToString,
            response_deserializer=getattr(api, f"{name}Response").FromString,
        )
        return method(getattr(api, f"{name}Request")(**fields), timeout=timeout, wait_for_ready=True)

    def register(self, name: str, request: Any, response: Any) -> Any:
        """One call of the kubelet's plugin watcher."""
        with grpc.insecure_channel(f"unix://{self.config.registration}") as channel:
            method = channel.unary_unary(
                f"/pluginregistration.Registration/{name}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=response.FromString,
            )
            return method(request, timeout=10.0)

    def info(self) -> registration_pb2.PluginInfo:
        """What the driver tells the plugin watcher."""
        answer: registration_pb2.PluginInfo = self.register(
            "GetInfo", registration_pb2.InfoRequest(), registration_pb2.PluginInfo
        )
        return answer

    def target(self, pod: str, volume: str = "data") -> Path:
        """Where a pod's volume is mounted; its parent is made, as the kubelet does."""
        target = self.pods / pod / volume / "mount"
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def publish(
        self,
        pod: str,
        *,
        volume: str = "data",
        secrets: dict[str, str] | None = None,
        flags: tuple[str, ...] = (),
        timeout: float = 30.0,
        context: dict[str, str] | None = None,
        **attributes: str,
    ) -> Path:
        """Publish an inline volume of a pod; the directory (or file) where it is."""
        target = self.target(pod, volume)
        about = {
            "csi.storage.k8s.io/ephemeral": "true",
            "csi.storage.k8s.io/pod.name": pod,
            "csi.storage.k8s.io/pod.namespace": "default",
            "csi.storage.k8s.io/pod.uid": f"uid-{pod}",
            "csi.storage.k8s.io/serviceAccount.name": "default",
        }
        self.call(
            "Node",
            "NodePublishVolume",
            timeout=timeout,
            volume_id=f"csi-{pod}-{volume}",
            target_path=str(target),
            volume_capability=api.VolumeCapability(
                mount=api.VolumeCapability.MountVolume(mount_flags=flags),
                access_mode=MODE(mode=MODE.SINGLE_NODE_WRITER),
            ),
            secrets=secrets or {},
            volume_context={**about, **(context or {}), **attributes},
        )
        return target

    def unpublish(self, pod: str, *, volume: str = "data", timeout: float = 30.0) -> None:
        """Unpublish it; the kubelet then removes the pod's directories."""
        self.call(
            "Node",
            "NodeUnpublishVolume",
            timeout=timeout,
            volume_id=f"csi-{pod}-{volume}",
            target_path=str(self.target(pod, volume)),
        )

    def stats(self, pod: str, *, volume: str = "data") -> api.NodeGetVolumeStatsResponse:
        """What the kubelet asks every minute."""
        answer: api.NodeGetVolumeStatsResponse = self.call(
            "Node",
            "NodeGetVolumeStats",
            volume_id=f"csi-{pod}-{volume}",
            volume_path=str(self.target(pod, volume)),
        )
        return answer

    def records(self) -> list[str]:
        """The names of the records on disk."""
        return sorted(os.listdir(self.config.state / "csi" / "volumes"))

    def leases(self) -> list[str]:
        """The leases of volumes in the store."""
        assert self.service.holder is not None
        return sorted(name for name in self.service.holder.held() if name.startswith("csi:"))

    def collect(self) -> int:
        """Forget every image and collect: what is left is what volumes hold. Returns how many trees went."""
        store = self.service.store
        assert store is not None
        if self.config.containerd is not None:
            return collect_contained(self.config.containerd)
        for record in store.images.all():
            store.images.delete(record.reference, record.handler)
        return collect(store).trees

    def lose_content(self) -> int:
        """Take away even what volumes hold, as nobody should; returns how many trees went."""
        holder, names = self.service.holder, self.leases()
        assert holder is not None
        self.lose_mounts()
        for name in names:
            holder.release(name)
        return self.collect()

    def nothing_left(self) -> None:
        """No record, lease or mount of a volume is there."""
        assert self.records() == []
        assert self.leases() == []
        assert [str(path) for path in self.pods.glob("*/*/mount") if is_mount_point(str(path))] == []


def collect_contained(settings: InContainerd) -> int:
    """Remove every image, as a kubelet does whose disk is full, and have containerd collect."""
    with settings.connect() as containerd:
        records = ImageRecords(containerd)
        for row in records.all():
            records.delete(row.name)
        before = contained_trees(containerd, settings.snapshotter)
        leases.collect(containerd)
        return len(before - contained_trees(containerd, settings.snapshotter))


def contained_trees(containerd: Containerd, snapshotter: str) -> set[str]:
    """The keys of the trees that containerd has."""
    method = Method(
        "/containerd.services.snapshots.v1.Snapshots/List",
        snapshots_pb2.ListSnapshotsRequest,
        snapshots_pb2.ListSnapshotsResponse,
    )
    request = snapshots_pb2.ListSnapshotsRequest(snapshotter=snapshotter, filters=[f'labels."{labels.TREE}"'])
    pages = containerd.stream(method, request, "list snapshots")
    return {info.labels[labels.TREE] for page in pages for info in page.info}
