"""Local volumes for tests: a storage class without a provisioner, and directories as volumes.

Binding waits for the first consumer, as with every class that knows where a volume is; a claim is Pending
until its pod is scheduled, and a pod really runs with it afterwards. Each volume is a directory of a node.
"""

from __future__ import annotations

import secrets

from rig.cluster import Rig
from rig.kube import Json
from rig.node import Node


class LocalStorage:
    """A storage class of one test, and the volumes made for it."""

    def __init__(self, rig: Rig, *, binding: str = "WaitForFirstConsumer") -> None:
        self.rig = rig
        self.name = f"local-{secrets.token_hex(4)}"
        self.volumes: list[str] = []
        rig.api.create(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": self.name},
                "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": binding,
                "reclaimPolicy": "Retain",
            }
        )

    def add(self, count: int = 1, *, size: str = "1Gi", node: Node | None = None) -> list[str]:
        """Make volumes on a node (the first unless told); their names."""
        where = node or self.rig.node
        names = [f"{self.name}-{len(self.volumes) + index}" for index in range(count)]
        for name in names:
            directory = where.directory / "volumes" / name
            directory.mkdir(parents=True)
            directory.chmod(0o777)
            self.rig.api.create(self._volume(name, str(directory), size, where))
        self.volumes += names
        return names

    def delete(self) -> None:
        """Delete the class and its volumes."""
        for name in self.volumes:
            self.rig.api.delete("PersistentVolume", name)
        self.rig.api.delete("StorageClass", self.name, version="storage.k8s.io/v1")

    def _volume(self, name: str, path: str, size: str, node: Node) -> Json:
        expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": size},
                "accessModes": ["ReadWriteOnce"],
                # Released volumes are not wiped or bound again: a test that wants another makes another.
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": self.name,
                "local": {"path": path},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}},
            },
        }
