"""Ordinary images by runtime handler, in a real containerd without Kubernetes (R1–R6).

The service stands before the daemon's own CRI; its handlers are the daemon's and those of the configuration.
"""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
import pytest

from rig.images import tar
from tests.corpus.pushing import push
from tests.rig.containerd.conftest import Node
from tests.rig.containerd.daemon import Daemon
from tests.rig.containerd.scenario import imported
from tests.rig.containerd.test_artifacts import left, nothing
from tests.rig.node.artifacts import image_per_platform, plugin_image
from tests.rig.node.client import Client
from unlade.containerd import Containerd, OrdinaryImages, leases
from unlade.errors import IntegrityError
from unlade.model import Deadline, Manifest

pytestmark = pytest.mark.root

REPO = "images/tuples"


def _push(node: Node, base: list[bytes] | None = None) -> str:
    push(node.host, REPO, image_per_platform(base or [tar({"shared": b"s" * 5000})]))
    return f"{node.host}/{REPO}:v1"


def test_each_handler_gets_its_entry_and_loses_it_alone(node: Node) -> None:
    """R3, R4: two IDs of one tag; the layer that both have is there once and stays while one needs it."""
    name = _push(node)
    host, guest = node.client.pull(name), node.client.pull(name, handler="guest")
    assert host != guest
    for handler, expected in (("", host), ("runc", host), ("guest", guest)):
        found = node.client.status(name, handler=handler)
        assert found is not None
        assert found.id == expected
    assert node.client.status(name, handler="twin") is None
    assert node.client.images() == sorted([host, guest])
    assert node.client.listed("guest") == [(guest, "guest")]
    assert node.client.listed("runc", name) == [(host, "runc")]
    assert node.snapshots() == 3, "the shared layer once, and each entry's own: unpacked in the pull"
    node.client.remove(name, handler="guest")
    assert node.client.status(name, handler="guest") is None
    assert node.client.status(name) is not None
    assert node.client.images() == [host]
    assert node.snapshots() == 2
    node.client.remove(host)
    assert left(node.daemon, node.connection) == nothing()


def test_the_hosts_image_goes_and_the_guests_stays(node: Node) -> None:
    name = _push(node)
    host, guest = node.client.pull(name), node.client.pull(name, handler="guest")
    node.client.remove(host)
    assert node.client.status(name) is None
    assert node.client.status(name, handler="guest") is not None
    assert node.snapshots() == 2
    node.client.remove(guest)
    assert left(node.daemon, node.connection) == nothing()


def test_versions_and_features_of_guests_decide(node: Node) -> None:
    """R3, R7: Windows by its build, features only where the handler's guests have them."""
    amd64 = {"architecture": "amd64", "os": "linux"}
    windows = {"architecture": "amd64", "os": "windows"}
    platforms: list[dict[str, Any]] = [
        {**windows, "os.version": "10.0.17763.5"},
        {**windows, "os.version": "10.0.20348.7"},
        {**amd64, "os.features": ["erofs"]},
        amd64,
    ]
    artifact = image_per_platform([], platforms)
    push(node.host, REPO, artifact)
    name = f"{node.host}/{REPO}:v1"
    expected = {}
    for document in artifact.documents[:-1]:
        manifest = artifact.document(document.digest)
        assert isinstance(manifest, Manifest)
        config = json.loads(artifact.blobs[manifest.config.digest])
        expected[config.get("os.version", ""), *config.get("os.features", [])] = str(manifest.config.digest)
    pulled = {handler: node.client.pull(name, handler=handler) for handler in ("runc", "hcs", "lazy")}
    assert pulled == {
        "runc": expected["",],
        "hcs": expected["10.0.20348.7",],
        "lazy": expected["", "erofs"],
    }
    for image in pulled.values():
        node.client.remove(image)
    assert left(node.daemon, node.connection) == nothing()


def test_one_image_for_two_handlers(node: Node) -> None:
    """R1: the same entry is one ID with two tuples; the tag is the default handler's."""
    name = _push(node)
    image = node.client.pull(name, handler="twin")
    assert node.client.status(name) is None
    assert node.client.pull(name) == image
    held = node.images.get(image)
    assert held is not None
    assert held.handlers == {"runc", "twin"}
    node.client.remove(image, handler="runc")
    assert node.client.status(name) is None
    assert node.client.status(name, handler="twin") is not None
    assert node.client.status(image, handler="runc") is None
    assert node.snapshots() == 2
    node.client.remove(name, handler="twin")
    assert left(node.daemon, node.connection) == nothing()


def test_another_snapshotter_is_filled_and_emptied(node: Node) -> None:
    """R6: the guest's layers go where its handler looks for them."""
    name = _push(node)
    image = node.client.pull(name, handler="plain")
    leases.collect(node.connection)
    assert (node.snapshots("overlayfs"), node.snapshots("native")) == (0, 2)
    assert node.client.pull(name, handler="guest") == image
    assert (node.snapshots("overlayfs"), node.snapshots("native")) == (2, 2)
    node.client.remove(name, handler="plain")
    assert (node.snapshots("overlayfs"), node.snapshots("native")) == (2, 0)
    node.client.remove(name)
    assert left(node.daemon, node.connection) == nothing()


def test_a_tag_that_moves_takes_its_tuples_along(node: Node) -> None:
    name = _push(node)
    old = node.client.pull(name, handler="guest")
    node.client.pull(name)
    _push(node, [tar({"other": b"o"})])
    new = node.client.pull(name, handler="guest")
    found = node.client.status(name, handler="guest")
    assert found is not None
    assert found.id == new != old
    held = node.images.get(old)
    assert held is not None
    assert all("@" in one.reference for one in held.tuples)
    for image in node.client.images():
        node.client.remove(image)
    assert left(node.daemon, node.connection) == nothing()


def test_what_was_there_before_belongs_to_all_of_the_hosts(node: Node) -> None:
    name = _push(node)
    image = Client(node.daemon.address).pull(name)
    for handler in ("", "runc", "twin"):
        assert node.client.status(name, handler=handler) is not None
        assert node.client.status(image, handler=handler) is not None
    assert node.client.status(name, handler="guest") is None
    assert node.client.listed("twin") == [(image, "twin")]
    assert node.client.listed("guest") == []
    node.client.remove(name, handler="guest")
    assert node.client.status(name) is not None
    node.client.remove(name, handler="twin")
    assert left(node.daemon, node.connection) == nothing()


def test_it_survives_a_restart_of_containerd(node: Node) -> None:
    name = _push(node)
    image = node.client.pull(name, handler="guest")
    assert node.client.pull(name, handler="guest") == image
    node.daemon.restart(kill=True)
    found = node.client.status(name, handler="guest")
    assert found is not None
    assert found.id == image
    node.client.remove(name, handler="guest")
    assert left(node.daemon, node.connection) == nothing()


@pytest.mark.parametrize(
    "media_type",
    [
        "application/vnd.oci.image.layer.v1.tar+gzip+encrypted",
        "application/vnd.oci.image.layer.nydus.blob.v1",
    ],
)
def test_layers_of_plugins_are_left_to_containerd(node: Node, media_type: str) -> None:
    """What only a plug-in of containerd's can read is asked of containerd, and what it says is the answer."""
    push(node.host, "images/plugin", plugin_image(media_type))
    name = f"{node.host}/images/plugin:v1"
    told = []
    for client in (node.client, Client(node.daemon.address)):
        try:
            told.append(client.pull(name))
        except grpc.RpcError as error:
            told.append(f"{error.code()}: {re.sub(r'extract-[^ ]+', 'extract', error.details())}")
    assert told[0] == told[1]
    assert "next:" not in told[0], "no words of ours"
    node.client.remove(name)
    assert left(node.daemon, node.connection)["images"] == []


def test_a_layer_that_is_not_what_the_config_says(connection: Containerd, daemon: Daemon) -> None:
    """No snapshot gets a name that its content does not have."""
    made = imported(connection, 1, lying=True)
    images = OrdinaryImages(connection, "runc")
    with pytest.raises(IntegrityError, match="its config says"):
        images.record(str(made.config), made, deadline=Deadline.never())
    held = images.get(str(made.config))
    assert held is not None
    assert held.tuples == ()
    found = left(daemon, connection)
    assert found["leases"] == []
    assert found["overlayfs"] == [], "nothing refers to the layer below"
