"""What crane, skopeo and umoci push, we pull, and the reverse: digests and trees are equal."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry
from tests.interop.trees import sample_tree, snapshot


def untar(data: bytes, directory: Path) -> Path:
    """What GNU tar makes of an archive."""
    directory.mkdir(parents=True)
    subprocess.run(["tar", "-xpf", "-", "-C", str(directory)], input=data, check=True)
    return directory


def layout_of(peers: Peers, tree: Path, layout: Path, tag: str = "v1", layers: int = 1) -> Path:
    """An image made by umoci: the tree, and more layers on top of it."""
    peers.umoci("init", "--layout", layout)
    peers.umoci("new", "--image", f"{layout}:{tag}")
    peers.umoci("insert", "--rootless", "--image", f"{layout}:{tag}", tree, "/")
    for number in range(1, layers):
        extra = tree.parent / f"extra{number}"
        extra.mkdir()
        (extra / f"added-{number}").write_text(f"layer {number}")
        (extra / "readme").write_text(f"changed by {number}")
        peers.umoci("insert", "--rootless", "--image", f"{layout}:{tag}", extra, "/more")
    return layout


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_our_artifact_is_a_plain_tar_to_crane(
    registry: RealRegistry, peers: Peers, tmp_path: Path, compression: str
) -> None:
    tree = sample_tree(tmp_path / "tree")
    ref = registry.reference(f"ours/artifact-{compression}")
    name = peers.unlade("push", "--plain-http", "--compression", compression, tree, ref).strip()
    assert name == f"{ref.removesuffix(':v1')}@{peers.crane('digest', ref).decode().strip()}"
    [layer] = peers.manifest(ref)["layers"]
    blob = peers.crane("blob", f"{ref.removesuffix(':v1')}@{layer['digest']}")
    tool = {"gzip": ["gzip", "-dc"], "zstd": ["zstd", "-dc"], "none": ["cat"]}[compression]
    plain = subprocess.run(tool, input=blob, capture_output=True, check=True).stdout
    assert snapshot(untar(plain, tmp_path / "by-tar")) == snapshot(tree)
    peers.unlade("pull", "--plain-http", ref, tmp_path / "by-us")
    assert snapshot(tmp_path / "by-us") == snapshot(tree)


def test_our_image_is_an_image_to_everybody(registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    tree = sample_tree(tmp_path / "tree")
    os.link(tree / "blob.bin", tree / "docs" / "hard-link")
    ref = registry.reference("ours/image")
    name = peers.unlade("push", "--plain-http", "--image", tree, ref).strip()
    digest = name.rpartition("@")[2]
    assert peers.crane("digest", ref).decode().strip() == digest
    peers.crane("validate", "--remote", ref)
    exported = untar(peers.crane("export", ref, "-"), tmp_path / "by-crane")
    assert snapshot(exported) == snapshot(tree)
    layout = tmp_path / "layout"
    peers.skopeo(
        "copy", "--preserve-digests", "--src-tls-verify=false", f"docker://{ref}", f"oci:{layout}:v1"
    )
    assert json.loads(peers.skopeo("inspect", f"oci:{layout}:v1"))["Digest"] == digest
    peers.umoci("unpack", "--rootless", "--image", f"{layout}:v1", tmp_path / "bundle")
    unpacked = tmp_path / "bundle" / "rootfs"
    assert snapshot(unpacked) == snapshot(tree)
    assert (unpacked / "blob.bin").samefile(unpacked / "docs" / "hard-link")
    peers.unlade("pull", "--plain-http", ref, tmp_path / "by-us")
    assert snapshot(tmp_path / "by-us") == snapshot(tree)
    assert (tmp_path / "by-us" / "blob.bin").samefile(tmp_path / "by-us" / "docs" / "hard-link")


@pytest.mark.parametrize("layers", [1, 4])
def test_what_umoci_makes_and_skopeo_pushes(
    registry: RealRegistry, peers: Peers, tmp_path: Path, layers: int
) -> None:
    tree = sample_tree(tmp_path / "tree")
    layout = layout_of(peers, tree, tmp_path / "layout", layers=layers)
    ref = registry.reference(f"skopeo/image{layers}")
    peers.skopeo(
        "copy", "--preserve-digests", "--dest-tls-verify=false", f"oci:{layout}:v1", f"docker://{ref}"
    )
    name = peers.unlade("pull", "--plain-http", ref, tmp_path / "by-us").strip()
    assert name.rpartition("@")[2] == peers.crane("digest", ref).decode().strip()
    peers.umoci("unpack", "--rootless", "--image", f"{layout}:v1", tmp_path / "bundle")
    expected = snapshot(tmp_path / "bundle" / "rootfs")
    assert snapshot(tmp_path / "by-us") == expected
    # The same image straight from the layout, through our copy.
    other = registry.reference(f"copied/image{layers}")
    copied = peers.unlade("copy", "--plain-http", f"oci:{layout}:v1", other).strip()
    assert copied.rpartition("@")[2] == name.rpartition("@")[2]


def test_what_crane_appends(registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    tree = sample_tree(tmp_path / "tree")
    first, second = tmp_path / "first.tar", tmp_path / "second.tar.gz"
    subprocess.run(["tar", "-C", str(tree), "-cf", str(first), "."], check=True)
    with tarfile.open(second, "w:gz") as archive:
        gone = tarfile.TarInfo("docs/.wh.read me.txt")
        archive.addfile(gone)
    ref = registry.reference("crane/image")
    peers.crane("append", "--insecure", "-f", first, "-t", ref)
    peers.crane("append", "--insecure", "-b", ref, "-f", second, "-t", ref)
    name = peers.unlade("pull", "--plain-http", ref, tmp_path / "by-us").strip()
    assert name.rpartition("@")[2] == peers.crane("digest", ref).decode().strip()
    expected = snapshot(tree)
    del expected["docs/read me.txt"]
    assert snapshot(tmp_path / "by-us") == expected
    # crane flattens the same two layers to the same tree.
    assert snapshot(untar(peers.crane("export", ref, "-"), tmp_path / "by-crane")) == expected


def test_an_index_that_crane_makes(registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    """V11: the entry that suits the platform, or the one that is asked for."""
    for architecture in ("amd64", "arm64"):
        tree = tmp_path / architecture
        tree.mkdir()
        (tree / "architecture").write_text(architecture)
        ref = registry.reference("index/part", architecture)
        platform = f"linux/{architecture}"
        peers.unlade("push", "--plain-http", "--image", "--platform", platform, tree, ref)
    whole = registry.reference("index/part", "whole")
    peers.crane(
        "index",
        "append",
        "-m",
        registry.reference("index/part", "amd64"),
        "-m",
        registry.reference("index/part", "arm64"),
        "-t",
        whole,
    )
    for architecture in ("amd64", "arm64"):
        out = tmp_path / f"out-{architecture}"
        platform = f"linux/{architecture}"
        name = peers.unlade("pull", "--plain-http", "--platform", platform, whole, out).strip()
        assert (out / "architecture").read_text() == architecture
        assert (
            name.rpartition("@")[2] == peers.crane("digest", "--platform", platform, whole).decode().strip()
        )
    error = peers.unlade_error(
        "pull", "--plain-http", "--platform", "linux/s390x", whole, tmp_path / "none", expect=3
    )
    assert "linux/amd64" in error
    assert not (tmp_path / "none").exists()


def test_our_store_is_a_layout_to_skopeo_and_crane(
    registry: RealRegistry, other_registry: RealRegistry, peers: Peers, tmp_path: Path
) -> None:
    tree = sample_tree(tmp_path / "tree")
    ref = registry.reference("stored/image")
    digest = peers.unlade("push", "--plain-http", "--image", tree, ref).strip().rpartition("@")[2]
    peers.unlade("pull", "--plain-http", ref)
    store = peers.environment["UNLADE_STORE"]
    assert json.loads(peers.skopeo("inspect", f"oci:{store}:{ref}"))["Digest"] == digest
    target = other_registry.reference("by/skopeo")
    peers.skopeo(
        "copy", "--preserve-digests", "--dest-tls-verify=false", f"oci:{store}:{ref}", f"docker://{target}"
    )
    assert peers.crane("digest", target).decode().strip() == digest
    # crane pushes a layout with one image as that image.
    by_crane = other_registry.reference("by/crane")
    peers.crane("push", store, by_crane)
    assert peers.crane("digest", by_crane).decode().strip() == digest
    peers.umoci("unpack", "--rootless", "--image", f"{_renamed(store, tmp_path)}:v1", tmp_path / "bundle")
    assert snapshot(tmp_path / "bundle" / "rootfs") == snapshot(tree)
    # Ours reads it too, as any other layout.
    copied = peers.unlade(
        "copy", "--plain-http", f"oci:{store}:{ref}", other_registry.reference("by/us")
    ).strip()
    assert copied.rpartition("@")[2] == digest
    refused = peers.unlade_error("copy", "--plain-http", ref, f"oci:{store}:x", expect=9)
    assert "unlade --store" in refused


def _renamed(store: str, tmp_path: Path) -> Path:
    """umoci wants short tags: the same blobs under an index with one."""
    layout = tmp_path / "renamed"
    layout.mkdir()
    for name in ("oci-layout", "blobs"):
        (layout / name).symlink_to(Path(store) / name)
    document = json.loads((Path(store) / "index.json").read_text())
    document["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"] = "v1"
    (layout / "index.json").write_text(json.dumps(document))
    return layout


def test_files_as_oras_pushes_them(registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    (tmp_path / "work" / "sub").mkdir(parents=True)
    (tmp_path / "work" / "weights.bin").write_bytes(os.urandom(100_000))
    (tmp_path / "work" / "sub" / "readme.md").write_text("# model\n")
    ref = registry.reference("ours/files")
    peers.unlade(
        "push",
        "--plain-http",
        "--artifact-type",
        "application/vnd.example.model",
        "--annotation",
        "org.example.who=me",
        "weights.bin:application/vnd.example.weights",
        "sub/readme.md",
        ref,
        cwd=tmp_path / "work",
    )
    manifest = peers.manifest(ref)
    assert manifest["artifactType"] == "application/vnd.example.model"
    assert manifest["annotations"] == {"org.example.who": "me"}
    assert [layer["annotations"]["org.opencontainers.image.title"] for layer in manifest["layers"]] == [
        "weights.bin",
        "sub/readme.md",
    ]
    assert manifest["layers"][0]["mediaType"] == "application/vnd.example.weights"
    rows = json.loads(peers.unlade("plan", "--plain-http", "-o", "json", ref))["files"]
    assert [(row["path"], row["size"]) for row in rows] == [("sub/readme.md", 8), ("weights.bin", 100_000)]
    peers.unlade("pull", "--plain-http", ref, tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "work")
    # What others push from that layout keeps its digest.
    peers.unlade("copy", "--plain-http", ref, f"oci:{tmp_path / 'layout'}:v1")
    again = registry.reference("again/files")
    peers.crane("push", tmp_path / "layout", again)
    assert peers.crane("digest", again) == peers.crane("digest", ref)


def test_the_same_tree_has_the_same_digest(registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    """Different umask, owner, times and order of creation; dry and real."""
    ref = registry.reference("ours/same")
    one = sample_tree(tmp_path / "one")
    names = set()
    names.add(peers.unlade("push", "--plain-http", one, ref))
    names.add(peers.unlade("push", "--plain-http", "--dry-run", one, ref))
    old = os.umask(0o077)
    try:
        two = tmp_path / "two"
        subprocess.run(["cp", "-r", "--no-preserve=all", str(one), str(two)], check=True)
        (two / "bin" / "run").chmod(0o700)
    finally:
        os.umask(old)
    if os.geteuid() == 0:
        subprocess.run(["chown", "-hR", "12345:54321", str(two)], check=True)
    subprocess.run(["find", str(two), "-exec", "touch", "-h", "-d", "2001-02-03", "{}", "+"], check=True)
    names.add(peers.unlade("push", "--plain-http", two, ref))
    assert len(names) == 1


def test_tar_on_stdout_and_merging(registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    """V17: several references in order, and a tar that any tar reads."""
    for name, files in (("base", {"a": "base", "b": "base"}), ("over", {"b": "over", "c/d": "over"})):
        tree = tmp_path / name
        for path, text in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        peers.unlade("push", "--plain-http", tree, registry.reference(f"merge/{name}"))
    references = [registry.reference("merge/base"), registry.reference("merge/over")]
    lines = peers.unlade("pull", "--plain-http", *references, tmp_path / "merged").splitlines()
    assert [line.partition("@")[0].rpartition("/")[2] for line in lines] == ["base", "over"]
    found = {name: value[-1] for name, value in snapshot(tmp_path / "merged").items()}
    assert (found["a"], found["b"], found["c/d"]) == (b"base", b"over", b"over")
    done = peers.run("sh", "-c", f"{_ours()} pull --plain-http {' '.join(references)} - | tar -tf -")
    assert done.stdout.decode().split() == ["a", "b", "c/", "c/d"]
    # An existing directory with content is left alone unless it is to be replaced.
    (tmp_path / "merged" / "mine").write_text("mine")
    peers.unlade_error("pull", "--plain-http", references[0], tmp_path / "merged", expect=3)
    assert (tmp_path / "merged" / "mine").read_text() == "mine"
    peers.unlade("pull", "--plain-http", "--replace", references[0], tmp_path / "merged")
    assert sorted(os.listdir(tmp_path / "merged")) == ["a", "b"]


def _ours() -> str:
    import sys

    return f"{sys.executable} -m unlade"


def test_referrers(registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    """V12: a referrer is pushed, listed by type, and delivered instead of its subject."""
    tree = sample_tree(tmp_path / "tree")
    ref = registry.reference("refer/app")
    repository = ref.removesuffix(":v1")
    peers.unlade("push", "--plain-http", "--image", tree, ref)
    (tmp_path / "sbom.json").write_text('{"spdxVersion":"SPDX-2.3"}')
    kind = "application/spdx+json"
    name = peers.unlade(
        "push",
        "--plain-http",
        "--subject",
        ref,
        "--artifact-type",
        kind,
        f"sbom.json:{kind}",
        repository,
        cwd=tmp_path,
    ).strip()
    listed = json.loads(peers.unlade("inspect", "--plain-http", "--referrers", "-o", "json", ref))[
        "referrers"
    ]
    assert [(one["digest"], one["artifactType"]) for one in listed] == [(name.rpartition("@")[2], kind)]
    peers.unlade("pull", "--plain-http", "--referrer", kind, ref, tmp_path / "sbom")
    assert (tmp_path / "sbom" / "sbom.json").read_text() == '{"spdxVersion":"SPDX-2.3"}'
    error = peers.unlade_error(
        "pull", "--plain-http", "--referrer", "application/none", ref, tmp_path / "none", expect=4
    )
    assert "application/none" in error
    # The distribution registry keeps no list of its own: the tag schema's is where others look for it.
    digest = peers.crane("digest", ref).decode().strip()
    assert f"sha256-{digest[7:]}" in peers.crane("ls", repository).decode()


def test_inspect_shows_the_bytes_as_they_are(registry: RealRegistry, peers: Peers, tmp_path: Path) -> None:
    ref = registry.reference("ours/inspected")
    digest = peers.unlade("push", "--plain-http", "--image", sample_tree(tmp_path / "t"), ref).rpartition(
        "@"
    )[2]
    raw = peers.unlade("inspect", "--plain-http", "--raw", ref)
    assert raw.encode() == peers.crane("manifest", ref).rstrip(b"\n")
    config = peers.unlade("inspect", "--plain-http", "--config", ref)
    assert config.encode() == peers.crane("config", ref).rstrip(b"\n")
    assert peers.unlade("inspect", "--plain-http", "--tags", ref).split() == ["TAG", "v1"]
    shown = json.loads(peers.unlade("inspect", "--plain-http", "-o", "json", ref))
    assert shown["digest"] == digest.strip()
