"""Copies on real registries: mounted within one, skipped where present, with what refers to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry
from tests.interop.trees import sample_tree, snapshot


def copy(peers: Peers, *arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(peers.unlade("copy", "--plain-http", "-o", "json", *arguments))
    return result


def test_within_one_registry_nothing_is_sent(registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    source = registry.reference("within/source")
    peers.unlade("push", "--plain-http", "--image", sample_tree(tmp_path / "t", seed=1), source)
    sent = registry.sent_blobs()
    copied = copy(peers, source, registry.reference("within/target"))
    assert (copied["blobsMounted"], copied["blobsSent"], copied["bytesSent"]) == (2, 0, 0)
    assert registry.sent_blobs() == sent
    assert peers.crane("digest", registry.reference("within/target")).decode().strip() == copied["digest"]
    again = copy(peers, source, registry.reference("within/target"))
    assert (again["blobsMounted"], again["blobsPresent"]) == (0, 2)


def test_between_two_what_is_there_is_skipped(
    registry: RealRegistry, other_registry: RealRegistry, peers: Peers, tmp_path: Path
) -> None:
    source = registry.reference("between/source")
    tree = sample_tree(tmp_path / "t", seed=2)
    peers.unlade("push", "--plain-http", "--image", tree, source)
    sent = other_registry.sent_blobs()
    dry = copy(peers, "--dry-run", source, other_registry.reference("between/target"))
    assert dry["dryRun"] is True
    assert other_registry.sent_blobs() == sent
    first = copy(peers, source, other_registry.reference("between/target"))
    assert (first["blobsSent"], first["blobsPresent"]) == (2, 0)
    second = copy(peers, source, other_registry.reference("between/target", "v2"))
    assert (second["blobsSent"], second["blobsPresent"], second["bytesSent"]) == (0, 2, 0)
    peers.unlade("pull", "--plain-http", other_registry.reference("between/target", "v2"), tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(tree)


def test_referrers_go_along(
    registry: RealRegistry, other_registry: RealRegistry, peers: Peers, tmp_path: Path
) -> None:
    """V12, on registries that know referrers only by the tag schema; nested ones too."""
    source = registry.reference("signed/app")
    repository = source.removesuffix(":v1")
    peers.unlade("push", "--plain-http", "--image", sample_tree(tmp_path / "t", seed=3), source)
    (tmp_path / "sig").write_text("signature")
    subject = source
    for kind in ("application/vnd.example.sbom", "application/vnd.example.signature"):
        (tmp_path / "sig").write_text(kind)
        subject = peers.unlade(
            "push",
            "--plain-http",
            "--subject",
            subject,
            "--artifact-type",
            kind,
            "sig",
            repository,
            cwd=tmp_path,
        ).strip()
    target = other_registry.reference("signed/app")
    assert copy(peers, source, other_registry.reference("unsigned/app"))["referrers"] == 0
    copied = copy(peers, "--referrers", source, target)
    assert copied["referrers"] == 2
    listed = json.loads(peers.unlade("inspect", "--plain-http", "--referrers", "-o", "json", target))
    assert [one["artifactType"] for one in listed["referrers"]] == ["application/vnd.example.sbom"]
    peers.unlade(
        "pull", "--plain-http", "--referrer", "application/vnd.example.sbom", target, tmp_path / "out"
    )
    assert (tmp_path / "out" / "sig").read_text() == "application/vnd.example.sbom"
    # Through a layout and back into a third repository, nothing is lost.
    layout = f"oci:{tmp_path / 'layout'}:v1"
    assert copy(peers, "--referrers", target, layout)["referrers"] == 2
    back = copy(peers, "--referrers", layout, registry.reference("signed/back"))
    assert (back["digest"], back["referrers"]) == (copied["digest"], 2)


def test_an_index_is_copied_whole_or_by_platform(
    registry: RealRegistry, other_registry: RealRegistry, peers: Peers, tmp_path: Path
) -> None:
    parts = []
    for architecture in ("amd64", "arm64"):
        tree = tmp_path / architecture
        tree.mkdir()
        (tree / "file").write_text(architecture)
        part = registry.reference("multi/part", architecture)
        peers.unlade("push", "--plain-http", "--image", "--platform", f"linux/{architecture}", tree, part)
        parts += ["-m", part]
    whole = registry.reference("multi/app")
    peers.crane("index", "append", *parts, "-t", whole)
    copied = copy(peers, whole, other_registry.reference("multi/app"))
    assert copied["manifests"] == 3
    assert peers.crane("digest", other_registry.reference("multi/app")) == peers.crane("digest", whole)
    peers.crane("validate", "--remote", other_registry.reference("multi/app"))
    one = copy(peers, "--platform", "linux/arm64", whole, other_registry.reference("multi/arm"))
    expected = peers.crane("digest", "--platform", "linux/arm64", whole).decode().strip()
    assert (one["manifests"], one["digest"]) == (1, expected)
