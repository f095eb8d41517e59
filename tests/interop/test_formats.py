"""Every format of the corpus, pushed to the real registry, delivered and compared by file (V7, V14, V16)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.corpus import Artifact, corpus, differences, snapshot
from tests.corpus.pushing import push
from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry
from unlade.delivery import Directory, Engine, Request
from unlade.model import Platform, Reference
from unlade.registry import Registry, RegistryConfig

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
