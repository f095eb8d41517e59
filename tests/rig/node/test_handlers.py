"""Images per runtime handler, by CRI calls that name it; and removal that leaves nothing (R1–R6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from rig.cluster import Rig
from rig.images import tar
from tests.corpus import corpus
from tests.corpus.pushing import push
from tests.rig.node.artifacts import image_per_platform, per_platform
from tests.rig.node.client import Client
from tests.rig.node.conftest import node_config
from tests.rig.node.holdings import holdings
from unlade.containerd import Handler
from unlade.cri.service import NodeService
from unlade.model import Platform


@pytest.fixture
def guests(cluster: Rig, tmp_path: Path) -> Iterator[Client]:
    """A service whose handler `second` runs guests of another architecture."""
    config = node_config(cluster, tmp_path)
    with NodeService(replace(config, handlers=(Handler("second", Platform.parse("linux/arm64")),))):
        yield Client(config.socket)


def test_the_guests_platform_decides(cluster: Rig, guests: Client) -> None:
    """R3: one reference, two handlers, two trees; each is removed by itself (R4)."""
    before = holdings(cluster)
    push(cluster.registry.address, "handlers/index", per_platform())
    name = f"{cluster.registry.address}/handlers/index:v1"
    host, guest = guests.pull(name), guests.pull(name, handler="second")
    assert host != guest
    for handler, expected in (("", host), ("runc", host), ("second", guest)):
        found = guests.status(name, handler=handler)
        assert found is not None
        assert found.id == expected
    assert {host, guest} <= set(guests.images())
    guests.remove(name, handler="second")
    assert guests.status(name, handler="second") is None
    assert guests.status(name) is not None
    assert guest not in guests.images()
    guests.remove(host)
    assert guests.status(name) is None
    assert holdings(cluster).beyond(before) == {}


def test_the_guests_platform_decides_for_images(cluster: Rig, guests: Client) -> None:
    """R3, R4: the same for an ordinary image: containerd's, with an ID for each entry."""
    before = holdings(cluster)
    push(cluster.registry.address, "handlers/images", image_per_platform([tar({"shared": b"s" * 5000})]))
    name = f"{cluster.registry.address}/handlers/images:v1"
    host, guest = guests.pull(name), guests.pull(name, handler="second")
    assert host != guest
    for handler, expected in (("", host), ("runc", host), ("second", guest)):
        found = guests.status(name, handler=handler)
        assert found is not None
        assert found.id == expected
    assert guests.listed("second", name) == [(guest, "second")]
    guests.remove(name, handler="second")
    assert guests.status(name, handler="second") is None
    assert guests.status(name) is not None
    guests.remove(host)
    assert holdings(cluster).beyond(before) == {}


def test_one_image_for_two_handlers(cluster: Rig, ours: Client) -> None:
    """R1, R4: listed once, gone with its last tuple."""
    before = holdings(cluster)
    name = cluster.registry.push_image("handlers/image", [tar({"f": b"image"})]).reference
    image = ours.pull(name)
    assert ours.status(name, handler="second") is None
    assert ours.pull(name, handler="second") == image
    assert ours.images().count(image) == 1
    ours.remove(image, handler="runc")
    assert ours.status(name) is None
    assert ours.status(name, handler="second") is not None
    ours.remove(image, handler="second")
    assert holdings(cluster).beyond(before) == {}


def test_unknown_handlers_are_refused(cluster: Rig, ours: Client) -> None:
    """R2: containerd would take its default one."""
    name = cluster.registry.push_image("handlers/unknown", [tar({"f": b"unknown"})]).reference
    for call in (ours.pull, ours.status, ours.remove):
        with pytest.raises(grpc.RpcError) as caught:
            call(name, handler="no-such")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "no-such" in caught.value.details()


def test_one_tree_for_two_handlers(cluster: Rig, ours: Client) -> None:
    """R1, R4: the same bytes are there once, listed once, and stay while one tuple needs them."""
    before = holdings(cluster)
    name = cluster.registry.push_artifact("handlers/one", {"f": b"1" * 1000}).reference
    image = ours.pull(name)
    assert ours.pull(name, handler="second") == image
    assert ours.images().count(image) == 1
    assert len(holdings(cluster).beyond(before)["snapshots"]) == 1
    ours.remove(image, handler="runc")
    assert ours.status(name) is None
    assert ours.status(name, handler="second") is not None
    assert len(holdings(cluster).beyond(before)["snapshots"]) == 1
    ours.remove(image, handler="second")
    assert holdings(cluster).beyond(before) == {}


def test_options_are_a_tuple_of_their_own(cluster: Rig, ours: Client) -> None:
    """V19: a pod's options never change what another pod gets by the same name."""
    artifact = next(one for one in corpus() if one.name == "oras-files")
    push(cluster.registry.address, "handlers/options", artifact)
    name = f"{cluster.registry.address}/handlers/options:v1"
    first = sorted(artifact.tree or ())[0]
    options = {"unlade.dev/for": name, "unlade.dev/only": first}
    some = ours.pull(name, annotations=options)
    assert ours.status(name) is None
    whole = ours.pull(name)
    assert whole != some
    for told, expected in ((options, some), ({}, whole)):
        found = ours.status(name, annotations=told)
        assert found is not None
        assert found.id == expected
    ours.remove(some)
    assert ours.status(name, annotations=options) is None
    assert ours.status(name) is not None
    ours.remove(whole)


def test_listed_once_without_a_handler(cluster: Rig, ours: Client, direct: Client) -> None:
    """R1: a stock kubelet removes what a running pod uses when it is shown one entry per tuple."""
    name = cluster.registry.push_artifact("handlers/listed", {"f": b"listed"}).reference
    image = ours.pull(name, handler="second")
    assert ours.images() == direct.images()
    assert ours.images().count(image) == 1
    ours.remove(image)
