"""CSIStorageCapacity: what the scheduler is told about the room on this node (E9).

One object for each storage class of ours, in the agent's namespace, owned by the Node object, so that it goes
with the node. It is written when it changed by more than a hundredth, or by what matters: from some room to
none. Rounded down to that, so that a busy disk does not write all day. Spec: storage.k8s.io/v1.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from unlade.controllers import claims, quantities
from unlade.controllers.api import ApiError, ApiServer
from unlade.controllers.objects import METADATA
from unlade.errors import UnladeError

log = logging.getLogger(__name__)

# The disk has other users: look at it this often, beyond every change of ours.
EVERY: Final = 60.0
_STEPS: Final = 100
_PATH: Final = "/apis/storage.k8s.io/v1/namespaces/{namespace}/csistoragecapacities"
_MIB: Final = 1 << 20


class Capacity:
    """Publishes the room of one node; `run` on a thread of its own."""

    def __init__(self, server: ApiServer, *, node: str, namespace: str, room: Callable[[], int]) -> None:
        self._server = server
        self._node = node
        self._path = _PATH.format(namespace=namespace)
        self._namespace = namespace
        self._room = room
        self._due = threading.Event()
        self._lock = threading.Lock()
        self._told: dict[str, int] = {}
        self._owner: dict[str, str] | None = None

    def wake(self) -> None:
        """Something changed: look again now."""
        self._due.set()

    def run(self, stop: threading.Event, classes: Callable[[], Iterable[str]]) -> None:
        """Publishes until `stop` is set (and `wake` called)."""
        while not stop.is_set():
            try:
                self.publish(set(classes()))
            except UnladeError as error:
                log.warning("storage capacity: %s", error)
            self._due.wait(EVERY)
            self._due.clear()

    def publish(self, classes: set[str]) -> None:
        """Writes what changed since it was last written; one caller at a time."""
        room = rounded(self._room())
        with self._lock:
            for name in sorted(classes):
                if not same(self._told.get(name), room):
                    self._put(name, room)
                    self._told[name] = room
            for name in [name for name in self._told if name not in classes]:
                self._remove(name)
                del self._told[name]

    def _put(self, storage_class: str, room: int) -> None:
        body = self._body(storage_class, room)
        try:
            self._server.read("POST", self._path, body=body)
        except ApiError as error:
            if error.status != 409:
                raise
            change = {"capacity": body["capacity"], "maximumVolumeSize": body["maximumVolumeSize"]}
            path = f"{self._path}/{body['metadata']['name']}"
            self._server.read("PATCH", path, body=change, content_type="application/merge-patch+json")

    def _remove(self, storage_class: str) -> None:
        try:
            self._server.read("DELETE", f"{self._path}/{self._object_name(storage_class)}")
        except ApiError as error:
            if error.status != 404:
                raise

    def _body(self, storage_class: str, room: int) -> dict[str, Any]:
        size = quantities.write(room)
        return {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "CSIStorageCapacity",
            "metadata": {
                "name": self._object_name(storage_class),
                "namespace": self._namespace,
                "labels": {claims.NODE_LABEL: claims.node_label(self._node)},
                "ownerReferences": [self._node_owner()],
            },
            "nodeTopology": {"matchLabels": {claims.TOPOLOGY_KEY: self._node}},
            "storageClassName": storage_class,
            "capacity": size,
            "maximumVolumeSize": size,
        }

    def _node_owner(self) -> dict[str, str]:
        if self._owner is None:
            found = METADATA.decode(self._server.read("GET", f"/api/v1/nodes/{self._node}"))
            uid = found.metadata.uid
            self._owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": uid}
        return self._owner

    def _object_name(self, storage_class: str) -> str:
        # Both names may be long: their hash is not.
        text = f"{self._node}/{storage_class}"
        return f"unlade-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def rounded(room: int) -> int:
    """Down to whole mebibytes."""
    return room // _MIB * _MIB


def same(told: int | None, room: int) -> bool:
    """Whether what was told is near enough."""
    if told is None or (told == 0) != (room == 0):
        return False
    return abs(told - room) * _STEPS <= told
