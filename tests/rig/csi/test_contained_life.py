"""What is of containerd alone where it is the driver's store: who shares, who collects, and its absence.

The driver's own promises upon it are in `test_contained.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.fakes.driver import Driver, contained_trees
from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.daemon import Daemon
from tests.rig.node.client import Client
from tests.unit.csi.conftest import Put, fake, put, refused
from tests.unit.csi.test_lives import CALLERS, NAMES, files, life
from unlade.containerd import leases
from unlade.containerd.images import ImageRecords
from unlade.containerd.inventory import take
from unlade.cri.service import NodeConfig, NodeService
from unlade.csi import service as csi_service
from unlade.csi.service import InContainerd, Shared
from unlade.model import Digest
from unlade.model.mediatypes import OCI_LAYER
from unlade.registry import NoCredentials, RegistryConfig

pytestmark = pytest.mark.root
__all__ = ["fake", "put"]
CODE = grpc.StatusCode
DATA = os.urandom(400_000)


def served(registry: FakeRegistry) -> int:
    """Bytes of blobs that the registry has sent."""
    return sum(request.sent for request in registry.seen("GET", "/blobs/"))


class Both:
    """The image service and the driver in one process, upon one containerd."""

    def __init__(self, daemon: Daemon, tmp_path: Path, *registries: FakeRegistry) -> None:
        self.config = NodeConfig(
            socket=str(tmp_path / "image.sock"),
            containerd=daemon.address,
            state=tmp_path / "locks",
            registry=RegistryConfig(plain_http=frozenset(one.host for one in registries)),
            credentials=NoCredentials(),
        )
        self.images = NodeService(self.config)
        self.contained = InContainerd(address=daemon.address, state=tmp_path / "locks")
        self.driver = Driver(tmp_path, *registries, shared=self._shared)
        self.client = Client(self.config.socket)

    def _shared(self) -> Shared:
        assert self.images.artifacts is not None
        return Shared(self.images.artifacts.containerd)

    def start(self) -> None:
        self.images.start()
        self.driver.start()

    def stop(self) -> None:
        self.driver.stop()
        self.images.close()

    def restart(self) -> None:
        self.stop()
        self.images = NodeService(self.config)
        self.start()

    def trees(self) -> set[str]:
        with self.contained.connect() as containerd:
            return contained_trees(containerd, "overlayfs")

    def collect(self) -> None:
        with self.contained.connect() as containerd:
            leases.collect(containerd)


@pytest.fixture
def both(daemon: Daemon, tmp_path: Path, fake: FakeRegistry) -> Iterator[Both]:
    made = Both(daemon, tmp_path, fake)
    made.start()
    try:
        yield made
    finally:
        for image in made.client.images():
            made.client.remove(image)
        made.stop()
        made.driver.lose_mounts()
        made.collect()


def test_a_native_volume_and_a_csi_volume_are_one_copy(both: Both, fake: FakeRegistry, put: Put) -> None:
    """Pulled once over the network, written once to the disk, whichever comes first."""
    for first in ("native", "csi"):
        put("team/model", first, {"weights": DATA + first.encode()})
        name = str(fake.reference("team/model", first))
        fake.clear_log()
        before = both.trees()
        for turn in range(2):
            if (first == "native") == (turn == 0):
                both.client.pull(name)
            else:
                mounted = both.driver.publish(f"pod-{first}", reference=name)
        assert (mounted / "weights").read_bytes() == DATA + first.encode()
        assert served(fake) < len(DATA) * 1.1, first
        assert len(both.trees() - before) == 1, first
        # What the kubelet lists is one image, and it is there by its name for native volumes.
        assert both.client.status(name) is not None
        both.driver.unpublish(f"pod-{first}")


def test_the_kubelet_removes_images_and_no_volume_notices(both: Both, fake: FakeRegistry, put: Put) -> None:
    put("team/model", "v1", {"weights": DATA})
    name = str(fake.reference("team/model", "v1"))
    before, known = both.trees(), both.client.images()
    mounted = both.driver.publish("pod", reference=name)
    (image,) = set(both.client.images()) - set(known)
    assert both.client.status(name) is None, "no name may lead to what only a volume wanted"
    both.client.remove(image)
    both.collect()
    assert image not in both.client.images()
    assert (mounted / "weights").read_bytes() == DATA
    # It is here, so it is used again, and on the shelf again.
    fake.clear_log()
    second = both.driver.publish("second", reference=name)
    assert (second / "weights").read_bytes() == DATA
    assert served(fake) == 0
    assert image in both.client.images()
    for pod in ("pod", "second"):
        both.driver.unpublish(pod)
    both.collect()
    assert len(both.trees() - before) == 1
    both.client.remove(image)
    both.collect()
    assert both.trees() == before


def test_the_image_service_ends_no_volume_s_lease(both: Both, fake: FakeRegistry, put: Put) -> None:
    put("team/model", "v1", {"weights": DATA})
    mounted = both.driver.publish("pod", reference=str(fake.reference("team/model", "v1")))
    for image in both.client.images():
        both.client.remove(image)
    both.restart()
    both.collect()
    assert (mounted / "weights").read_bytes() == DATA
    assert len(both.driver.leases()) == 1


def test_what_is_cached_outlives_a_restart_of_all(both: Both, fake: FakeRegistry, put: Put) -> None:
    """An image without a name is whole, and the image service does not tidy it away."""
    put("team/model", "v1", {"weights": DATA})
    name = str(fake.reference("team/model", "v1"))
    both.driver.publish("pod", reference=name)
    both.driver.unpublish("pod")
    listed = both.client.images()
    both.restart()
    both.collect()
    assert both.client.images() == listed
    fake.clear_log()
    assert (both.driver.publish("next", reference=name) / "weights").read_bytes() == DATA
    assert served(fake) == 0


def test_an_ordinary_image_is_a_volume_and_stays_an_image(
    both: Both, daemon: Daemon, fake: FakeRegistry
) -> None:
    """The tree that a volume shows is never what a container is started from."""
    import io
    import json
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        entry = tarfile.TarInfo("etc/app.conf")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"text"))
    layer = out.getvalue()
    rootfs = {"type": "layers", "diff_ids": [str(Digest.of(layer))]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    fake.put_image("team/app", "v1", [fake.put_blob("team/app", layer, OCI_LAYER)], config)
    name = str(fake.reference("team/app", "v1"))
    mounted = both.driver.publish("pod", reference=name)
    assert (mounted / "etc" / "app.conf").read_bytes() == b"text"
    assert both.client.status(name) is None
    daemon.without_tls(fake.host)
    pulled = both.client.pull(name)
    assert pulled == str(Digest.of(config))
    with both.contained.connect() as containerd:
        listed = take(containerd, "runc").holdings
    shown = {(one.references[0], one.options.split(" ")[0]): one for one in listed if one.references}
    assert {(name, ""), (name, "volume")} <= shown.keys(), "`unlade images` tells them apart"
    assert shown[name, "volume"].shared == 0
    found = both.client.status(name)
    assert found is not None
    assert found.id == pulled


def test_cached_content_survives_collections_and_not_its_removal(
    driver: Driver, contained: InContainerd, fake: FakeRegistry, put: Put
) -> None:
    """Never means never, also when the kubelet has taken it; a moved tag is seen then (V2)."""
    put("team/model", "v1", {"weights": b"one"})
    name = str(fake.reference("team/model", "v1"))
    driver.publish("first", reference=name)
    driver.unpublish("first")
    with contained.connect() as containerd:
        leases.collect(containerd)
        leases.end_dead(containerd)
        put("team/model", "v1", {"weights": b"two"})
        fake.clear_log()
        cached = driver.publish("second", reference=name, pullPolicy="Never")
        assert (cached / "weights").read_bytes() == b"one"
        assert fake.requests == []
        driver.unpublish("second")
        assert driver.collect() == 1
    with pytest.raises(grpc.RpcError) as error:
        driver.publish("third", reference=name, pullPolicy="Never")
    refused(error, CODE.UNAVAILABLE, "never")
    fresh = driver.publish("fourth", reference=name, pullPolicy="IfNotPresent")
    assert (fresh / "weights").read_bytes() == b"two"


def test_records_of_what_the_kubelet_took_go_too(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/model", "v1", {"weights": b"one"})
    driver.publish("pod", reference=str(fake.reference("team/model", "v1")))
    driver.unpublish("pod")
    store = driver.service.store
    assert store is not None
    assert len(store.images.all()) == 1
    driver.collect()
    driver.restart()
    store = driver.service.store
    assert store is not None
    assert store.images.all() == []
    assert [entry.name for entry in store.layout.trees.iterdir()] == []


def test_another_registry_must_show_the_bytes(
    tmp_path: Path, contained: InContainerd, fake: FakeRegistry, put: Put
) -> None:
    """V5: a manifest that names somebody's layers is not the layers."""
    put("team/model", "v1", {"weights": DATA})
    with (
        FakeRegistry() as thief,
        Driver(tmp_path, fake, thief, containerd=contained) as driver,
    ):
        driver.publish("owner", reference=str(fake.reference("team/model", "v1")))
        blob = thief.put_blob(
            "mine/model", DATA, "application/octet-stream", {"org.opencontainers.image.title": "weights"}
        )
        thief.put_artifact("mine/model", "v1", [blob], "application/vnd.example.content.v1")
        del thief.repository("mine/model").blobs[str(blob.digest)]
        with pytest.raises(grpc.RpcError) as error:
            driver.publish("thief", reference=str(thief.reference("mine/model", "v1")))
        refused(error, CODE.NOT_FOUND)
        assert len(driver.records()) == 1


def test_containerd_may_be_away(daemon: Daemon, driver: Driver, fake: FakeRegistry, put: Put) -> None:
    """What is mounted stays, unpublishing succeeds, publishing fails so that it is tried again."""
    put("team/model", "v1", {"weights": DATA})
    put("team/other", "v1", {"file": b"x"})
    name = str(fake.reference("team/model", "v1"))
    other = str(fake.reference("team/other", "v1"))
    mounted = driver.publish("stays", reference=name)
    gone = driver.publish("goes", reference=name)
    daemon.stop(kill=True)
    try:
        began = time.monotonic()
        driver.unpublish("goes")
        assert time.monotonic() - began < 10
        assert not gone.exists()
        assert (mounted / "weights").read_bytes() == DATA
        driver.publish("stays", reference=name)
        assert not driver.stats("stays").volume_condition.abnormal
        with pytest.raises(grpc.RpcError) as error:
            driver.publish("new", reference=other, timeout=100)
        refused(error, CODE.UNAVAILABLE, "containerd", "next:")
        # And an agent that is started meanwhile serves.
        driver.restart()
        driver.publish("stays", reference=name)
        driver.unpublish("stays")
        assert not mounted.exists()
    finally:
        daemon.start()
    assert (driver.publish("new", reference=other) / "file").read_bytes() == b"x"
    assert len(driver.leases()) == 3
    driver.restart()
    assert len(driver.leases()) == len(driver.records()) == 1


def test_what_was_away_at_the_start_is_looked_at_later(
    daemon: Daemon, driver: Driver, fake: FakeRegistry, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csi_service, "_TIDY_SOON", 0.2)
    put("team/model", "v1", {"weights": DATA})
    driver.publish("goes", reference=str(fake.reference("team/model", "v1")))
    daemon.stop()
    try:
        driver.unpublish("goes")
        driver.restart()
    finally:
        daemon.start()
    end = time.monotonic() + 30
    while driver.leases():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_containerd_restarts_while_volumes_come_and_go(
    daemon: Daemon, driver: Driver, fake: FakeRegistry, put: Put
) -> None:
    put("team/model", "v1", {"weights": DATA})
    name = str(fake.reference("team/model", "v1"))
    mounted = driver.publish("stays", reference=name)
    restarting = threading.Thread(target=daemon.restart, kwargs={"kill": True})
    restarting.start()
    for number in range(10):
        try:
            driver.publish(f"pod-{number}", reference=name, timeout=100)
        except grpc.RpcError as error:
            assert error.code() in (CODE.UNAVAILABLE, CODE.DEADLINE_EXCEEDED), error.details()
        driver.unpublish(f"pod-{number}", timeout=100)
        assert (mounted / "weights").read_bytes() == DATA
    restarting.join()
    driver.restart()
    assert len(driver.leases()) == len(driver.records()) == 1
    driver.unpublish("stays")
    driver.nothing_left()


def test_an_agent_that_cannot_see_containerd_s_directories_says_so(
    daemon: Daemon, driver: Driver, fake: FakeRegistry, put: Put
) -> None:
    """A pod that was given the socket and not the root directory."""
    put("team/model", "v1", {"weights": DATA})
    name = str(fake.reference("team/model", "v1"))
    driver.publish("first", reference=name)
    place = daemon.base / "root" / "io.containerd.snapshotter.v1.overlayfs" / "snapshots"
    place.rename(place.with_suffix(".away"))
    try:
        with pytest.raises(grpc.RpcError) as error:
            driver.publish("second", reference=name)
    finally:
        place.with_suffix(".away").rename(place)
    refused(error, CODE.FAILED_PRECONDITION, "cannot be seen", "next: give the agent's pod")
    driver.publish("second", reference=name)


def test_lives_while_images_are_removed(
    driver: Driver, contained: InContainerd, fake: FakeRegistry, put: Put
) -> None:
    """Random lives of volumes by several callers while tags move, and all images go again and again."""
    for name in NAMES:
        put(name, "v1", files(name, 0))
    ended = [threading.Event() for _ in range(CALLERS)]
    with ThreadPoolExecutor(CALLERS) as callers:
        running = [callers.submit(life, driver, fake, number, ended[number]) for number in range(CALLERS)]
        version = 0
        while not all(event.wait(0.02) for event in ended):
            version += 1
            name = NAMES[version % len(NAMES)]
            put(name, "v1", files(name, version))
            if version % 5 == 0:
                driver.collect()
        for one in running:
            one.result()
    driver.nothing_left()
    driver.restart()
    driver.nothing_left()
    driver.collect()
    with contained.connect() as containerd:
        assert contained_trees(containerd, "overlayfs") == set()
        assert leases.kept(containerd, "") == []


def test_two_drivers_of_one_containerd_leave_each_other_alone(
    tmp_path: Path, contained: InContainerd, fake: FakeRegistry, put: Put
) -> None:
    put("team/model", "v1", {"weights": DATA})
    name = str(fake.reference("team/model", "v1"))
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
    with (
        Driver(homes[0], fake, containerd=contained) as one,
        Driver(homes[1], fake, containerd=contained) as two,
    ):
        mounted = [driver.publish("pod", reference=name) for driver in (one, two)]
        two.restart()
        one.unpublish("pod")
        one.collect()
        assert (one.leases(), len(two.leases())) == ([], 1)
        assert (mounted[1] / "weights").read_bytes() == DATA


def test_from_the_directory_to_containerd(
    tmp_path: Path, contained: InContainerd, fake: FakeRegistry, put: Put
) -> None:
    """A node whose agent is told of containerd later: volumes go on, and what was there goes with them."""
    put("team/model", "v1", {"weights": DATA})
    name = str(fake.reference("team/model", "v1"))
    with Driver(tmp_path, fake) as driver:
        mounted = driver.publish("old", reference=name)
        driver.reboot(containerd=contained)
        driver.publish("old", reference=name)
        assert (mounted / "weights").read_bytes() == DATA
        new = driver.publish("new", reference=name)
        assert (new / "weights").read_bytes() == DATA
        driver.unpublish("old")
        driver.restart()
        store = driver.service.store
        assert store is not None
        assert os.listdir(store.layout.trees) == []
        assert (new / "weights").read_bytes() == DATA
        with contained.connect() as containerd:
            assert len(contained_trees(containerd, "overlayfs")) == 1
            assert [row for row in ImageRecords(containerd).all() if "/" in row.name] == []
