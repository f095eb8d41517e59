"""The provisioner against a server that misbehaves, with a node's volumes in memory (E7, E9)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from tests.fakes.kube_api import Answer, Cut, FakeKubeApi, Request, status
from tests.fakes.kube_api import wait_for as _wait_for
from unlade.controllers import claims
from unlade.controllers.api import ApiServer
from unlade.controllers.provisioner import Provisioner
from unlade.controllers.throttle import TokenBucket
from unlade.errors import RegistryError, StoreError
from unlade.model import Deadline
from unlade.registry import CredentialSource

NODE = "node-1"
PVC, PV = "persistentvolumeclaims", "persistentvolumes"
# Long, because failures are tried again after a pause that doubles, on a machine that may be busy.
wait_for = partial(_wait_for, seconds=30.0)
DIGEST = "r.test/model@sha256:" + "a" * 64


@dataclass(frozen=True)
class Made:
    id: str
    name: str
    size: int
    parameters: Mapping[str, str]
    owner: str
    origin: str = ""
    state: str = "ready"
    digests: tuple[str, ...] = (DIGEST,)
    warnings: tuple[str, ...] = ()
    bound: bool = False


@dataclass(frozen=True)
class Grown:
    size: int
    pending: bool


@dataclass(frozen=True)
class Room:
    available: int


class NoRoom(StoreError):
    code = "no-room"


@dataclass
class Volumes:
    """A node's volumes in memory; `fail` may raise in the place of a call."""

    all: dict[str, Made] = field(default_factory=dict)
    fail: Callable[[str], None] = lambda _call: None
    pending: bool = False
    available: int = 1 << 40

    def create(
        self,
        name: str,
        size: int,
        parameters: Mapping[str, str],
        *,
        limit: int = 0,
        origin: str = "",
        owner: str = "",
        credentials: CredentialSource | None = None,
        deadline: Deadline | None = None,
    ) -> Made:
        self.fail("create")
        return self.all.setdefault(f"w-{name}", Made(f"w-{name}", name, size, parameters, owner, origin))

    def bind(self, volume_id: str) -> None:
        self.fail("bind")
        self.all[volume_id] = replace(self.all[volume_id], bound=True)

    def delete(self, volume_id: str) -> None:
        self.fail("delete")
        self.all.pop(volume_id, None)

    def expand(self, volume_id: str, size: int) -> Grown:
        self.fail("expand")
        self.all[volume_id] = replace(self.all[volume_id], size=max(size, self.all[volume_id].size))
        return Grown(self.all[volume_id].size, self.pending)

    def volumes(self) -> Sequence[Made]:
        return list(self.all.values())

    def room(self) -> Room:
        return Room(self.available)


class Running:
    def __init__(self, server: ApiServer, volumes: Volumes, **options: Any) -> None:
        limit = TokenBucket(0, 1)
        self.it = Provisioner(server, volumes, node=NODE, namespace="agents", limit=limit, **options)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.it.run, args=(self.stop,), daemon=True)
        self.thread.start()
        wait_for(lambda: self.it.synced)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def volumes() -> Volumes:
    return Volumes()


@pytest.fixture
def running(api: FakeKubeApi, server: ApiServer, volumes: Volumes) -> Iterator[Callable[..., Running]]:
    api.put("nodes", {"metadata": {"name": NODE}})
    api.put("storageclasses", storage_class())
    started: list[Running] = []

    def start(**options: Any) -> Running:
        started.append(Running(server, volumes, **options))
        return started[-1]

    yield start
    for one in started:
        if one.thread.is_alive():
            one.end()


def storage_class(**parameters: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "unlade"},
        "provisioner": claims.DRIVER,
        "reclaimPolicy": "Delete",
        "parameters": parameters,
    }


def claim(
    name: str = "c", *, node: str = NODE, annotations: Mapping[str, str] | None = None, **spec: Any
) -> Any:
    told = {claims.SELECTED_NODE: node, claims.PROVISIONERS[0]: claims.DRIVER, **(annotations or {})}
    return {
        "metadata": {"name": name, "namespace": "ns", "annotations": told},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "unlade",
            "resources": {"requests": {"storage": "1Gi"}},
            **spec,
        },
        "status": {"phase": "Pending"},
    }


REFERENCE = {"unlade.dev/reference": "r.test/model:v1"}
SOURCE_REF = {"apiGroup": "unlade.dev", "kind": "OCISource", "name": "model"}


def bound(api: FakeKubeApi, name: str = "c") -> Any:
    """What the cluster's binder does once there is a volume."""
    [volume] = [one for one in api.all(PV).values() if one["spec"]["claimRef"]["name"] == name]
    found = api.all(PVC)[f"ns/{name}"]
    found["spec"]["volumeName"] = volume["metadata"]["name"]
    found["status"] = {"phase": "Bound", "capacity": dict(volume["spec"]["capacity"])}
    api.put(PVC, found)
    api.put(PV, {**volume, "status": {"phase": "Bound"}})
    return volume


def release(api: FakeKubeApi, name: str = "c") -> None:
    """The claim is deleted, and the binder has seen it."""
    api.delete(PVC, "ns", name)
    for volume in api.all(PV).values():
        if volume["spec"]["claimRef"]["name"] == name:
            api.put(PV, {**volume, "status": {"phase": "Released"}})


def events(api: FakeKubeApi) -> list[tuple[str, str]]:
    return [(event["reason"], event["message"]) for event in api.all("events").values()]


def wait_event(api: FakeKubeApi, reason: str, contains: str = "") -> None:
    wait_for(lambda: any(r == reason and contains in m for r, m in events(api)), what=f"{reason} {contains}")


def test_from_claim_to_volume_and_back(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    running()
    made = api.put(PVC, claim(annotations=REFERENCE))
    wait_for(lambda: len(api.all(PV)) == 1)
    [volume] = api.all(PV).values()
    uid = made["metadata"]["uid"]
    assert volume["metadata"]["name"] == f"pvc-{uid}"
    assert volume["spec"]["claimRef"]["uid"] == uid
    assert volume["spec"]["capacity"] == {"storage": "1Gi"}
    [term] = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "oci.unlade.dev/node", "operator": "In", "values": [NODE]}]
    wait_for(lambda: claims.DIGEST in api.all(PVC)["ns/c"]["metadata"]["annotations"])
    assert volumes.all[f"w-pvc-{uid}"].parameters == {"reference": "r.test/model:v1"}
    wait_event(api, "ProvisioningSucceeded", DIGEST)
    wait_for(lambda: volumes.all[f"w-pvc-{uid}"].bound)
    bound(api)
    release(api)
    wait_for(lambda: volumes.all == {} and api.all(PV) == {})


def test_what_is_not_ours_is_left_alone(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    running()
    api.put(PVC, claim("elsewhere", node="node-2", annotations=REFERENCE))
    foreign = claim("foreign", annotations=REFERENCE)
    foreign["metadata"]["annotations"][claims.PROVISIONERS[0]] = "example.test/other"
    api.put(PVC, foreign)
    api.put(PVC, claim("ours", annotations=REFERENCE))
    wait_for(lambda: len(api.all(PV)) == 1)
    assert len(volumes.all) == 1


def test_a_source_by_data_source_ref(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    running()
    api.put(PVC, claim(dataSourceRef=SOURCE_REF))
    wait_event(api, "ProvisioningFailed", "there is no OCISource ns/model")
    spec = {"references": ["r.test/a:1", "r.test/b:1"], "pullPolicy": "Always", "unpack": "never"}
    api.put("ocisources", {"metadata": {"name": "model", "namespace": "ns"}, "spec": spec})
    wait_for(lambda: len(volumes.all) == 1)
    [made] = volumes.all.values()
    told = {"references": "r.test/a:1 r.test/b:1", "pullPolicy": "Always", "unpack": "never"}
    assert made.parameters == told


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"volumeMode": "Block"}, "block volumes"),
        ({"accessModes": ["ReadWriteMany"]}, "ReadWriteMany"),
        ({"selector": {"matchLabels": {"a": "b"}}}, "selector"),
        ({"storageClassName": "gone"}, "storage class"),
        ({"dataSourceRef": {"apiGroup": "x.test", "kind": "Thing", "name": "t"}}, "content twice"),
        ({"dataSourceRef": {**SOURCE_REF, "namespace": "other"}}, "another namespace"),
        ({"resources": {"requests": {"storage": "many"}}}, "not a quantity"),
    ],
)
def test_what_cannot_be_is_told_with_the_next_step(
    api: FakeKubeApi, volumes: Volumes, running: Any, spec: Any, message: str
) -> None:
    running()
    api.put(PVC, claim(annotations=REFERENCE, **spec))
    wait_event(api, "ProvisioningFailed", message)
    assert all("next:" in text for _, text in events(api))
    assert volumes.all == {}


def test_a_class_that_names_its_content_has_the_last_word(
    api: FakeKubeApi, volumes: Volumes, running: Any
) -> None:
    api.put("storageclasses", storage_class(reference="r.test/fixed:1"))
    running()
    api.put(PVC, claim("own", annotations=REFERENCE))
    wait_event(api, "ProvisioningFailed", "names its content")
    api.put(PVC, claim("plain"))
    wait_for(lambda: [made.parameters for made in volumes.all.values()] == [{"reference": "r.test/fixed:1"}])


def test_without_room_the_scheduler_is_asked_again(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    def full(_call: str) -> None:
        raise NoRoom("no room", next_step="ask for less")

    volumes.fail = full
    running()
    api.put(PVC, claim(annotations=REFERENCE))
    wait_for(lambda: claims.SELECTED_NODE not in api.all(PVC)["ns/c"]["metadata"]["annotations"])
    wait_event(api, "ProvisioningFailed", "no room; next: ask for less")


def test_failures_are_tried_again(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    left = {"create": 2, "bind": 1, "POST": 2, "PATCH": 1}

    def fail(call: str) -> None:
        if left.get(call, 0) > 0:
            left[call] -= 1
            raise RegistryError(f"{call} failed", next_step="wait")

    def fault(request: Request) -> Answer | None:
        if request.path.startswith("/api/v1/persistentvolumes") and left.get(request.verb, 0) > 0:
            left[request.verb] -= 1
            # The first is done and its answer lost, which looks the same from here as not done.
            if left[request.verb] == 1:
                api.write(request, PV, "", None)
            raise Cut
        return None

    volumes.fail, api.fault = fail, fault
    running()
    api.put(PVC, claim(annotations=REFERENCE))
    wait_for(lambda: len(api.all(PV)) == 1 and all(made.bound for made in volumes.all.values()))
    assert len(volumes.all) == 1
    bound(api)
    release(api)
    wait_for(lambda: volumes.all == {} and api.all(PV) == {})


def test_a_kept_volume_outlives_its_object(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    api.put("storageclasses", {**storage_class(), "reclaimPolicy": "Retain"})
    running()
    api.put(PVC, claim(annotations=REFERENCE))
    wait_for(lambda: len(api.all(PV)) == 1 and all(made.bound for made in volumes.all.values()))
    volume = bound(api)
    release(api)
    api.put(
        "events", {"metadata": {"name": "a-moment-later", "namespace": "ns"}, "reason": "", "message": ""}
    )
    assert len(volumes.all) == 1
    [name] = api.all(PV)
    assert name == f"/{volume['metadata']['name']}"
    found = api.all(PV)[name]
    api.put(PV, {**found, "metadata": {**found["metadata"], "deletionTimestamp": "2026-11-15T00:00:00Z"}})
    wait_for(lambda: api.all(PV) == {})
    assert len(volumes.all) == 1, "the data stays"


def test_a_live_claim_is_believed_before_a_phase(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    running(resync=0.2)
    api.put(PVC, claim(annotations=REFERENCE))
    wait_for(lambda: len(api.all(PV)) == 1 and all(made.bound for made in volumes.all.values()))
    bound(api)
    [volume] = api.all(PV).values()
    api.put(PV, {**volume, "status": {"phase": "Released"}})
    before = api.count("GET", f"{PVC}/c")
    wait_for(lambda: api.count("GET", f"{PVC}/c") > before + 3)
    assert len(volumes.all) == 1


def test_what_a_killed_agent_left_is_adopted_or_deleted(
    api: FakeKubeApi, server: ApiServer, volumes: Volumes, running: Any
) -> None:
    live = api.put(PVC, claim("live", annotations=REFERENCE))
    moved = api.put(PVC, claim("moved", node="node-2", annotations=REFERENCE))
    for owner, uid in (
        ("live", live["metadata"]["uid"]),
        ("moved", moved["metadata"]["uid"]),
        ("gone", "u3"),
    ):
        volumes.create(f"pvc-{uid}", 1, {}, owner=f"claim ns/{owner}")
    volumes.create("pvc-u4", 1, {}, owner="claim ns/gone")
    volumes.bind("w-pvc-u4")
    volumes.create("by-a-sidecar", 1, {})
    with_object = volumes.create("pvc-u5", 1, {}, owner="claim ns/bound")
    api.put(PV, {"metadata": {"name": "pvc-u5"}, "spec": {}})
    running()
    wait_for(lambda: len(volumes.all) == 4)
    assert set(volumes.all) == {
        f"w-pvc-{live['metadata']['uid']}",
        "w-pvc-u4",
        "w-by-a-sidecar",
        with_object.id,
    }
    wait_for(lambda: volumes.all[with_object.id].bound)


@pytest.mark.parametrize("pending", [False, True])
def test_growth(api: FakeKubeApi, volumes: Volumes, running: Any, pending: bool) -> None:
    running(resync=0.3)
    api.put(PVC, claim(annotations=REFERENCE))
    wait_for(lambda: len(api.all(PV)) == 1 and all(made.bound for made in volumes.all.values()))
    bound(api)
    volumes.pending = pending
    found = api.all(PVC)["ns/c"]
    found["spec"]["resources"] = {"requests": {"storage": "2.5Gi"}}
    api.put(PVC, found)
    if pending:
        wait_event(api, "FileSystemResizeRequired")
        writes = api.count("PATCH", "/status")
        wait_for(lambda: api.all(PVC)["ns/c"]["status"]["conditions"][0]["type"] == "FileSystemResizePending")
        [volume] = api.all(PV).values()
        assert volume["spec"]["capacity"] == {"storage": "1Gi"}
        assert api.count("PATCH", "/status") == writes == 1, "told once"
        volumes.pending = False
    wait_for(lambda: api.all(PVC)["ns/c"]["status"]["capacity"] == {"storage": "2560Mi"})
    wait_for(lambda: next(iter(api.all(PV).values()))["spec"]["capacity"] == {"storage": "2560Mi"})
    assert "conditions" not in api.all(PVC)["ns/c"]["status"]
    wait_event(api, "Resized", "2560Mi")


def test_copies_of_a_claim_on_this_node(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    running()
    api.put(PVC, claim("source", annotations=REFERENCE))
    wait_for(lambda: len(api.all(PV)) == 1 and all(made.bound for made in volumes.all.values()))
    handle = bound(api, "source")["spec"]["csi"]["volumeHandle"]
    api.put(PVC, claim("copy", dataSource={"kind": "PersistentVolumeClaim", "name": "source"}))
    wait_for(lambda: [made.origin for made in volumes.all.values()] == ["", handle])


def test_capacity_is_published_and_not_too_often(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    made = running()
    wait_for(lambda: len(api.all("csistoragecapacities")) == 1)
    [shown] = api.all("csistoragecapacities").values()
    assert (shown["storageClassName"], shown["capacity"]) == ("unlade", "1Ti")
    assert shown["nodeTopology"] == {"matchLabels": {"oci.unlade.dev/node": NODE}}
    assert shown["metadata"]["ownerReferences"][0]["kind"] == "Node"
    writes = api.count("PATCH", "csistoragecapacities")
    volumes.available -= 1 << 20
    for _ in range(3):
        made.it.capacity.publish({"unlade"})
    assert api.count("PATCH", "csistoragecapacities") == writes
    volumes.available = 0
    made.it.capacity.publish({"unlade"})
    [shown] = api.all("csistoragecapacities").values()
    assert shown["capacity"] == "0"
    made.it.capacity.publish(set())
    assert api.all("csistoragecapacities") == {}


def test_a_new_class_has_its_capacity_at_once(api: FakeKubeApi, running: Any) -> None:
    running()
    wait_for(lambda: len(api.all("csistoragecapacities")) == 1)
    api.put("storageclasses", {**storage_class(), "metadata": {"name": "another"}})
    wait_for(lambda: len(api.all("csistoragecapacities")) == 2)
    api.delete("storageclasses", "", "another")
    wait_for(lambda: len(api.all("csistoragecapacities")) == 1)


def test_stopping_ends_a_fetch_under_way(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    made = running()
    begun = threading.Event()
    create = volumes.create

    def slow(*args: Any, deadline: Deadline, **options: Any) -> Made:
        begun.set()
        deadline.wait(60)
        return create(*args, deadline=deadline, **options)

    volumes.create = slow  # type: ignore[method-assign,assignment]
    api.put(PVC, claim(annotations=REFERENCE))
    assert begun.wait(10)
    made.end()
    assert volumes.all == {}


def test_a_refused_answer_is_no_event(api: FakeKubeApi, volumes: Volumes, running: Any) -> None:
    refused = [3]

    def fault(request: Request) -> Answer | None:
        if request.path.endswith(f"{PVC}/c") and request.verb == "GET" and refused[0]:
            refused[0] -= 1
            return status(503, "ServiceUnavailable")
        return None

    api.fault = fault
    running()
    api.put(PVC, claim(annotations=REFERENCE))
    wait_for(lambda: len(api.all(PV)) == 1)
    assert all(reason == "ProvisioningSucceeded" for reason, _ in events(api))
