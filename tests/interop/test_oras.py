"""ORAS itself: what it pushes we deliver as `oras pull` does; it pulls the corpus, and what we push (V7)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rig.engines import binary
from tests.corpus import Artifact, Node, corpus, differences, snapshot
from tests.corpus.pushing import push
from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry
from unlade.delivery import Directory, Engine, Request
from unlade.errors import NothingProduced
from unlade.model import Reference
from unlade.registry import Registry, RegistryConfig

_TYPE = "application/vnd.example.thing.v1"
# What is pushed (in the directory made by `source`), and the flags before the reference.
_PUSHES = {
    "files": (["a.txt", "conf.yaml:application/yaml"], []),
    "directory": (["site"], []),
    "nested-directory": (["site/assets"], []),
    "file-and-directory": (["./a.txt", "./site/assets/"], []),
    "here": (["."], []),
    "spec-1.0": (["a.txt", "site"], ["--image-spec", "v1.0"]),
    "typed": (["a.txt"], ["--artifact-type", _TYPE]),
    "own-config": (["a.txt"], ["--config", "conf.yaml:application/vnd.example.config.v1+json"]),
}
# Where we do more than ORAS, which refuses these: rule 3, and directories packed by other clients.
_ORAS_REFUSES = {
    "oras-duplicate-titles",
    "oras-directory-nested-by-base-name",
    "oras-directory-without-its-name",
}
# ORAS writes layers side by side, so which of two wins is left to chance there.
_ORAS_RACES = {"oras-file-over-directory-entry"}
_CORPUS = [
    artifact
    for artifact in corpus()
    if artifact.name.startswith("oras-")
    and artifact.name not in _ORAS_RACES
    and artifact.tree is not None
    and artifact.options.unpack == "auto"
    and not artifact.options.only
]


@pytest.fixture(scope="module")
def engine(registry: RealRegistry) -> Iterator[Engine]:
    config = RegistryConfig(plain_http=frozenset({registry.host}))
    with Registry(config) as client, Engine(client) as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with files, modes and a link."""
    root = tmp_path / "source"
    (root / "site" / "assets" / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("a\n")
    (root / "conf.yaml").write_text("k: v\n")
    (root / "site" / "assets" / "x").write_text("x\n")
    (root / "site" / "assets" / "link").symlink_to("x")
    (root / "site" / "assets" / "sub" / "run").write_text("#!run\n")
    (root / "site" / "assets" / "sub" / "run").chmod(0o755)
    return root


def _oras(peers: Peers, *arguments: str, **options: object) -> None:
    peers.run(binary("oras"), *arguments, "--plain-http", **options)  # type: ignore[arg-type]  # passed on


def _pulled(peers: Peers, reference: str, place: Path) -> dict[str, Node]:
    _oras(peers, "pull", "-o", str(place), reference)
    return _timeless(snapshot(str(place)))


def _delivered(engine: Engine, reference: str, place: Path, **fields: str) -> dict[str, Node]:
    request = Request(references=(Reference.parse(reference),), destination=Directory(str(place)), **fields)  # type: ignore[arg-type]  # text fields only
    engine.deliver(request)
    return snapshot(str(place))


def _timeless(tree: dict[str, Node]) -> dict[str, Node]:
    """Times are not compared: ORAS gives files without metadata the time of the pull, as we do."""
    return {path: replace(node, mtime=None) for path, node in tree.items()}


@pytest.mark.parametrize("case", _PUSHES)
def test_what_oras_pushes(
    registry: RealRegistry, engine: Engine, peers: Peers, source: Path, case: str, tmp_path: Path
) -> None:
    files, flags = _PUSHES[case]
    reference = registry.reference(f"oras/{case}")
    _oras(peers, "push", *flags, reference, *files, cwd=source)
    expected = _pulled(peers, reference, tmp_path / "theirs")
    assert differences(expected, _delivered(engine, reference, tmp_path / "ours")) == []
    assert expected.keys() >= {file.partition(":")[0].strip("./") for file in files} - {""}


def test_an_artifact_without_files(
    registry: RealRegistry, engine: Engine, peers: Peers, tmp_path: Path
) -> None:
    """ORAS pulls nothing and says so in passing; we refuse (V14)."""
    reference = registry.reference("oras/empty")
    _oras(peers, "push", "--artifact-type", _TYPE, reference)
    with pytest.raises(NothingProduced, match=r"vnd\.oci\.empty\.v1"):
        _delivered(engine, reference, tmp_path / "ours")


@pytest.mark.parametrize("artifact", _CORPUS, ids=lambda artifact: artifact.name)
def test_the_corpus_is_what_oras_reads(
    registry: RealRegistry, peers: Peers, artifact: Artifact, tmp_path: Path
) -> None:
    """The expected trees are not our opinion alone."""
    assert artifact.tree is not None
    push(registry.host, f"oras/{artifact.name}", artifact)
    reference = registry.reference(f"oras/{artifact.name}")
    if artifact.name in _ORAS_REFUSES:
        _oras(peers, "pull", "-o", str(tmp_path / "theirs"), reference, expect=1)
        return
    # A mode that a title does not carry is the umask's with ORAS.
    expected = {path: replace(node, mode=None) for path, node in artifact.tree.items()}
    assert differences(expected, _pulled(peers, reference, tmp_path / "theirs")) == []


def test_what_is_attached(
    registry: RealRegistry, engine: Engine, peers: Peers, source: Path, tmp_path: Path
) -> None:
    """V12: `oras attach` keeps the tag-schema index on this registry; we find the referrer through it."""
    reference = registry.reference("oras/subject")
    _oras(peers, "push", reference, "a.txt", cwd=source)
    _oras(peers, "attach", "--artifact-type", _TYPE, reference, "conf.yaml:application/yaml", cwd=source)
    made = _delivered(engine, reference, tmp_path / "ours", referrer=_TYPE)
    assert {path: node.content for path, node in made.items()} == {"conf.yaml": b"k: v\n"}


@pytest.mark.parametrize("what", [["site"], ["a.txt", "conf.yaml"], ["a.txt"]], ids=" ".join)
def test_what_we_push(
    registry: RealRegistry, peers: Peers, source: Path, what: list[str], tmp_path: Path
) -> None:
    reference = registry.reference("oras/ours-" + "-".join(what).replace(".", "-"))
    peers.unlade("push", "--plain-http", *what, reference, cwd=source)
    theirs = _pulled(peers, reference, tmp_path / "theirs")
    ours = tmp_path / "ours"
    peers.unlade("pull", "--plain-http", reference, str(ours))
    assert differences(theirs, snapshot(str(ours))) == []
    assert any(os.path.basename(path) in ("x", "a.txt") for path in theirs)
