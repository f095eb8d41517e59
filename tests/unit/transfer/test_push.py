"""Pushing: manifests after blobs, nothing sent twice, resumed uploads, three shapes of content."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.httpd import Request, Response
from tests.fakes.registry import FakeRegistry
from unlade.errors import DeadlineExceeded, InvalidInput, NothingProduced, RegistryError
from unlade.model import Deadline, Digest, Platform, Reference, decode_manifest, mediatypes
from unlade.pack import ARTIFACT_TYPE, PushOptions, UnpackableSource, push
from unlade.registry import Registry, RegistryConfig
from unlade.transfer.progress import ProgressEvent
from unlade.transfer.push import BytesBlob, Sent, push_blobs


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as running:
        yield running


@pytest.fixture
def client(fake: FakeRegistry) -> Iterator[Registry]:
    with Registry(RegistryConfig(plain_http=frozenset({fake.host}), attempts=2, backoff=0.01)) as registry:
        yield registry


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file").write_text("content\n")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o755)
    return root


def stored(fake: FakeRegistry, repository: str, digest: Digest) -> dict[str, object]:
    document: dict[str, object] = json.loads(fake.repository(repository).manifests[str(digest)][1])
    return document


def test_a_directory_is_an_artifact_that_oras_reads(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    pushed = push([tree], fake.reference("a/b", "v1"), registry=client)
    document = stored(fake, "a/b", pushed.manifest.digest)
    assert fake.repository("a/b").tags == {"v1": str(pushed.manifest.digest)}
    assert document["artifactType"] == ARTIFACT_TYPE
    assert document["config"] == {
        "mediaType": "application/vnd.oci.empty.v1+json",
        "digest": "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "size": 2,
        "data": "e30=",
    }
    [layer] = pushed.layers
    assert layer.media_type == mediatypes.OCI_LAYER_GZIP
    assert layer.annotations["org.opencontainers.image.title"] == "."
    assert layer.annotations["io.deis.oras.content.unpack"] == "true"
    assert layer.annotations["io.deis.oras.content.digest"].startswith("sha256:")
    assert str(pushed.reference) == f"{fake.host}/a/b@{pushed.manifest.digest}"
    assert pushed.sent.sent == 2
    decode_manifest(pushed.raw, content_type=mediatypes.OCI_MANIFEST)


def test_the_manifest_comes_after_every_blob(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    push([tree], fake.reference("a/b", "v1"), registry=client)
    writes = [r.path for r in fake.requests if r.method == "PUT"]
    assert "/manifests/" in writes[-1]
    assert all("/blobs/uploads/" in path for path in writes[:-1])
    assert len(writes) == 3


def test_pushing_again_sends_no_blob(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    first = push([tree], fake.reference("a/b", "v1"), registry=client)
    fake.clear_log()
    events: list[ProgressEvent] = []
    second = push([tree], fake.reference("a/b", "v2"), registry=client, progress=events.append)
    assert second.manifest.digest == first.manifest.digest
    assert second.sent == Sent(present=2)
    assert not fake.seen("POST")
    assert {event.kind for event in events} == {"present"}


def test_the_name_of_the_directory_does_not_count(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    one = push([tree], fake.reference("a/b"), registry=client)
    tree.rename(tree.with_name("renamed"))
    two = push([tree.with_name("renamed")], fake.reference("c/d"), registry=client)
    assert one.manifest.digest == two.manifest.digest


def test_an_image_has_a_real_config(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    options = PushOptions(image=True, compression="zstd", platform=Platform("linux", "arm64", "v8"))
    pushed = push([tree], fake.reference("a/b", "v1"), registry=client, options=options)
    manifest = decode_manifest(pushed.raw)
    assert getattr(manifest, "artifact_type") == ""  # noqa: B009 - the union's other half has it too
    config = json.loads(fake.repository("a/b").blobs[str(_config_digest(pushed.raw))])
    assert (config["architecture"], config["variant"], config["os"]) == ("arm64", "v8", "linux")
    assert config["rootfs"]["type"] == "layers"
    assert len(config["rootfs"]["diff_ids"]) == 1
    assert "created" not in config
    assert pushed.layers[0].media_type == mediatypes.OCI_LAYER_ZSTD
    assert not pushed.layers[0].annotations


def _config_digest(raw: bytes) -> str:
    digest: str = json.loads(raw)["config"]["digest"]
    return digest


def test_files_are_sent_as_they_are(
    fake: FakeRegistry, client: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/weights.bin").write_bytes(b"raw")
    Path("LICENSE").write_text("free")
    Path("tree").mkdir()
    Path("tree/x").write_text("x")
    pushed = push(
        ["sub/weights.bin:application/x-weights", "./LICENSE", "tree"],
        fake.reference("a/b", "v1"),
        registry=client,
        options=PushOptions(artifact_type="application/x-model", annotations={"b": "2", "a": "1"}),
    )
    titles = [(layer.title, layer.media_type) for layer in pushed.layers]
    assert titles == [
        ("sub/weights.bin", "application/x-weights"),
        ("LICENSE", "application/octet-stream"),
        ("tree", "application/vnd.oci.image.layer.v1.tar+gzip"),
    ]
    assert fake.repository("a/b").blobs[str(Digest.of(b"raw"))] == b"raw"
    document = stored(fake, "a/b", pushed.manifest.digest)
    assert document["artifactType"] == "application/x-model"
    assert list(document["annotations"]) == ["a", "b"]  # type: ignore[call-overload]


def test_absolute_and_outside_paths_keep_their_last_part(
    fake: FakeRegistry, client: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "up.txt").write_text("up")
    (tmp_path / "abs.txt").write_text("abs")
    monkeypatch.chdir(tmp_path / "here")
    pushed = push(["../up.txt", tmp_path / "abs.txt"], fake.reference("a/b", "v1"), registry=client)
    assert [layer.title for layer in pushed.layers] == ["up.txt", "abs.txt"]
    (tmp_path / "here" / "up.txt").write_text("twin")
    with pytest.raises(InvalidInput, match=r"both be called up\.txt"):
        push(["../up.txt", "up.txt"], fake.reference("a/b", "v1"), registry=client)


def test_a_subject_makes_a_referrer_without_a_tag(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    image = push([tree], fake.reference("a/b", "v1"), registry=client, options=PushOptions(image=True))
    (tree / "sbom.json").write_text("{}")
    referrer = push(
        [tree / "sbom.json"],
        Reference(fake.host, "a/b"),
        registry=client,
        options=PushOptions(subject=fake.reference("a/b", "v1"), artifact_type="application/spdx+json"),
    )
    assert fake.repository("a/b").tags == {"v1": str(image.manifest.digest)}
    [found] = client.referrers(
        fake.reference("a/b", "v1"), image.manifest.digest, artifact_type=None, deadline=Deadline.never()
    )
    assert found.digest == referrer.manifest.digest
    assert found.artifact_type == "application/spdx+json"


def test_without_a_tag_it_is_latest(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    push([tree], Reference(fake.host, "a/b"), registry=client)
    assert list(fake.repository("a/b").tags) == ["latest"]


def test_a_digest_is_a_promise(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    dry = push([tree], fake.reference("a/b", "v1"), registry=client, dry_run=True)
    assert fake.requests == []
    assert dry.sent == Sent()
    promised = Reference(fake.host, "a/b", "v1", dry.manifest.digest)
    push([tree], promised, registry=client)
    assert fake.repository("a/b").tags == {"v1": str(dry.manifest.digest)}
    (tree / "more").write_text("more")
    fake.clear_log()
    with pytest.raises(InvalidInput, match="nothing was sent"):
        push([tree], promised, registry=client)
    assert fake.requests == []


def test_source_date_epoch(
    fake: FakeRegistry, client: Registry, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    pushed = push([tree], fake.reference("a/b"), registry=client, options=PushOptions(image=True))
    config = json.loads(fake.repository("a/b").blobs[str(_config_digest(pushed.raw))])
    assert config["created"] == "1970-01-02T00:00:00Z"
    annotations = json.loads(pushed.raw)["annotations"]
    assert annotations == {"org.opencontainers.image.created": "1970-01-02T00:00:00Z"}
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "tomorrow")
    with pytest.raises(InvalidInput, match="SOURCE_DATE_EPOCH"):
        push([tree], fake.reference("a/b"), registry=client)


def test_what_cannot_be_pulled_is_not_pushed(fake: FakeRegistry, client: Registry, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingProduced, match="empty"):
        push([tmp_path / "empty"], fake.reference("a/b"), registry=client)
    with pytest.raises(InvalidInput, match="exactly one directory"):
        push([tmp_path, tmp_path], fake.reference("a/b"), registry=client, options=PushOptions(image=True))
    with pytest.raises(UnpackableSource, match="No such file"):
        push([tmp_path / "missing"], fake.reference("a/b"), registry=client)
    with pytest.raises(InvalidInput, match="media type"):
        push([f"{tmp_path}/missing:no type"], fake.reference("a/b"), registry=client)
    with pytest.raises(InvalidInput, match="nothing to push"):
        push([], fake.reference("a/b"), registry=client)
    empty_image = push(
        [tmp_path / "empty"], fake.reference("a/b"), registry=client, options=PushOptions(image=True)
    )
    assert empty_image.layers[0].size > 0
    assert not fake.seen("PUT", "/manifests/")[1:]


def test_the_first_failure_stops_the_others_and_leaves_no_manifest(
    fake: FakeRegistry, client: Registry, tmp_path: Path
) -> None:
    for number in range(12):
        (tmp_path / f"f{number}").write_bytes(os.urandom(1000))
    bad = Digest.of((tmp_path / "f3").read_bytes())

    def refuse(request: Request) -> Response | None:
        if request.method == "PUT" and str(bad) in str(request.query):
            return Response(403, body=b'{"errors":[{"code":"DENIED"}]}')
        return None

    fake.fault(refuse)
    with pytest.raises(RegistryError):
        push(sorted(tmp_path.iterdir()), fake.reference("a/b", "v1"), registry=client)
    assert not fake.seen("PUT", "/manifests/")


def test_a_cut_connection_is_not_the_end(fake: FakeRegistry, client: Registry, tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "big.bin").write_bytes(data)
    cuts = [Response.drop(read_body=1 << 20)]

    def once(request: Request) -> Response | None:
        ours = request.method == "PUT" and str(Digest.of(data)) in str(request.query)
        return cuts.pop() if ours and cuts else None

    fake.fault(once, early=True)
    pushed = push([tmp_path / "big.bin"], fake.reference("a/b", "v1"), registry=client)
    assert str(pushed.layers[0].digest) in fake.repository("a/b").blobs
    assert len([r for r in fake.seen("PUT") if str(Digest.of(data)) in str(r.query)]) == 2


def test_blobs_are_mounted_from_other_repositories(fake: FakeRegistry, client: Registry) -> None:
    blob = BytesBlob(b"shared bytes", "application/octet-stream")
    fake.put_blob("origin/x", b"shared bytes")
    sent = push_blobs(
        client,
        fake.reference("target/y"),
        [blob, blob],
        mount_from=[fake.reference("origin/x"), Reference("elsewhere.example", "z")],
        deadline=Deadline.never(),
    )
    assert sent == Sent(mounted=1)
    assert str(blob.descriptor.digest) in fake.repository("target/y").blobs


def test_a_deadline_ends_a_push(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    deadline = Deadline.never()
    deadline.cancel()
    with pytest.raises(DeadlineExceeded):
        push([tree], fake.reference("a/b"), registry=client, deadline=deadline)


def test_no_thread_is_left(fake: FakeRegistry, client: Registry, tree: Path) -> None:
    push([tree], fake.reference("a/b"), registry=client)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("unlade-")]
