"""Every format of the corpus, pushed to the real registry, delivered and compared by file (V7, V14, V16)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.corpus import Artifact, Node, corpus, differences, snapshot
from tests.corpus.artifact import Kit, file
from tests.corpus.oras import push as push_files
from tests.corpus.oras import titled
from tests.corpus.pushing import push
from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry
from unlade.delivery import AsTree, Directory, Engine, Request
from unlade.model import Platform, Reference
from unlade.registry import Registry, RegistryConfig
from unlade.store import DirStore
from unlade.tree import fsck

_MADE = [artifact for artifact in corpus() if artifact.error is None]
_REFUSED = [artifact for artifact in corpus() if artifact.error is not None]
# One of each family through the command: what a user types gives what the library gives.
_BY_COMMAND = list({artifact.family: artifact for artifact in _MADE}.values())


@pytest.fixture(scope="module")
def engine(registry: RealRegistry) -> Iterator[Engine]:
    """One engine for all: connections and workers are reused, as in a daemon."""
    config = RegistryConfig(plain_http=frozenset({registry.host}))
    with Registry(config) as client, Engine(client) as running:
        yield running


def _request(registry: RealRegistry, artifact: Artifact, place: Path) -> Request:
    push(registry.host, f"formats/{artifact.name}", artifact)
    return Request(
        references=(Reference.parse(registry.reference(f"formats/{artifact.name}")),),
        destination=Directory(str(place)),
        platform=Platform.parse(artifact.platform),
        unpack=artifact.options.unpack,
        only=artifact.options.only,
        as_file=artifact.options.as_file,
        artifact_type=artifact.artifact_type or "",
        annotations=artifact.annotations,
    )


@pytest.mark.parametrize("artifact", _MADE, ids=lambda artifact: artifact.name)
def test_delivered_as_expected(
    registry: RealRegistry, engine: Engine, artifact: Artifact, tmp_path: Path
) -> None:
    assert artifact.tree is not None
    place = tmp_path / "out"
    delivered = engine.deliver(_request(registry, artifact, place))
    assert differences(artifact.tree, snapshot(str(place))) == []
    assert delivered.plan.family == artifact.family


@pytest.mark.parametrize("artifact", _REFUSED, ids=lambda artifact: artifact.name)
def test_refused_whole(registry: RealRegistry, engine: Engine, artifact: Artifact, tmp_path: Path) -> None:
    assert artifact.error is not None
    with pytest.raises(artifact.error) as caught:
        engine.deliver(_request(registry, artifact, tmp_path / "out"))
    assert caught.value.next_step
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"


def test_as_shared_trees(registry: RealRegistry, tmp_path: Path) -> None:
    """Every artifact as a tree of one store: no two contents share a key, a second delivery makes nothing."""
    config = RegistryConfig(plain_http=frozenset({registry.host}))
    keys: dict[str, str] = {}
    with Registry(config) as client, DirStore(tmp_path / "store") as store, Engine(client, store) as engine:
        for artifact in _MADE:
            request = msgspec.structs.replace(
                _request(registry, artifact, tmp_path / "unused"), destination=AsTree()
            )
            delivered = engine.deliver(request)
            if delivered.path is not None:
                assert artifact.tree is not None
                assert differences(artifact.tree, snapshot(delivered.path)) == [], artifact.name
            assert delivered.tree is not None
            same = keys.setdefault(str(delivered.tree), artifact.name)
            assert _content(same) == _content(artifact.name)
            assert engine.deliver(request).cached
        assert len(keys) > len(_MADE) // 2
        assert fsck(store) == []


def test_a_referrer_is_delivered_as_content(registry: RealRegistry, engine: Engine, tmp_path: Path) -> None:
    """V12: image and artifact type name the attached document; its subject is checked."""
    artifact = next(artifact for artifact in corpus() if artifact.name == "oras-attached-sbom")
    assert artifact.tree is not None
    request = _request(registry, artifact, tmp_path / "out")
    (reference,) = request.references
    image = Reference(reference.registry, reference.repository, None, artifact.documents[0].digest)
    engine.deliver(msgspec.structs.replace(request, references=(image,), referrer="application/spdx+json"))
    assert differences(artifact.tree, snapshot(str(tmp_path / "out"))) == []


def test_several_formats_merge_in_order(registry: RealRegistry, engine: Engine, tmp_path: Path) -> None:
    """V17: an image below, a chart, and a file that replaces one of the image's."""
    kit = Kit()
    push_files(kit, titled(kit, "etc/app.conf", "three\n"))
    above = kit.done("merge-above", "oras", {"etc/app.conf": file("three\n")})
    parts = [*(artifact for artifact in corpus() if artifact.name in ("image-oci-gzip", "helm-chart")), above]
    expected: dict[str, Node] = {}
    references: list[Reference] = []
    for artifact in parts:
        request = _request(registry, artifact, tmp_path / "out")
        references += request.references
        assert artifact.tree is not None
        expected |= artifact.tree
    engine.deliver(msgspec.structs.replace(request, references=tuple(references)))
    assert differences(expected, snapshot(str(tmp_path / "out"))) == []


def _content(name: str) -> object:
    artifact = next(artifact for artifact in _MADE if artifact.name == name)
    assert artifact.tree is not None
    return {path: (node.content, node.target) for path, node in artifact.tree.items()}


@pytest.mark.parametrize("artifact", _BY_COMMAND, ids=lambda artifact: artifact.name)
def test_the_command_gives_the_same(
    registry: RealRegistry, peers: Peers, artifact: Artifact, tmp_path: Path
) -> None:
    assert artifact.tree is not None
    push(registry.host, f"formats/{artifact.name}", artifact)
    reference = registry.reference(f"formats/{artifact.name}")
    options = ["--plain-http", "--platform", artifact.platform, "--unpack", artifact.options.unpack]
    for pattern in artifact.options.only:
        options += ["--only", pattern]
    for name in artifact.options.as_file:
        options += ["--as-file", name]
    place = tmp_path / "out"
    peers.unlade("pull", *options, reference, str(place))
    made = snapshot(str(place))
    assert differences(artifact.tree, made) == []
    shown = json.loads(peers.unlade("plan", "-o", "json", *options, reference))
    assert shown["references"][0]["family"] == artifact.family
    for row in shown["files"]:
        if not row["path"].endswith("/"):
            content = made[row["path"]].content
            assert content is not None
            assert len(content) == row["size"]
