"""Copying between registries and layouts: equal digests, mounted blobs, referrers, hostile graphs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.httpd import Request, Response
from tests.fakes.registry import FakeRegistry
from unlade.errors import IntegrityError, InvalidInput
from unlade.model import Deadline, Descriptor, Digest, Platform, Reference, mediatypes
from unlade.registry import NotFound, Registry, RegistryConfig
from unlade.transfer.copy import RegistryEnd, TooManyManifests, WrongReferrer, copy
from unlade.transfer.image_layout import LayoutEnd, NotALayout, NotInLayout
from unlade.transfer.progress import ProgressEvent
from unlade.transfer.push import Sent


@pytest.fixture
def one() -> Iterator[FakeRegistry]:
    with FakeRegistry() as running:
        yield running


@pytest.fixture(params=[True, False], ids=["referrers-api", "tag-schema"])
def two(request: pytest.FixtureRequest) -> Iterator[FakeRegistry]:
    with FakeRegistry(referrers=request.param) as running:
        yield running


@pytest.fixture
def client(one: FakeRegistry, two: FakeRegistry) -> Iterator[Registry]:
    config = RegistryConfig(plain_http=frozenset({one.host, two.host}), attempts=2, backoff=0.01)
    with Registry(config) as registry:
        yield registry


def image(fake: FakeRegistry, repository: str, tag: str | None, *contents: bytes) -> Descriptor:
    layers = [fake.put_blob(repository, content) for content in contents]
    config = json.dumps({"architecture": "amd64", "os": "linux", "of": repository + str(contents)}).encode()
    return fake.put_image(repository, tag, layers, config)


def index(fake: FakeRegistry, repository: str, tag: str, *entries: dict[str, Any]) -> Descriptor:
    return fake.put_manifest(
        repository,
        tag,
        {"schemaVersion": 2, "mediaType": mediatypes.OCI_INDEX, "manifests": list(entries)},
    )


def end(client: Registry, fake: FakeRegistry, name: str, tag: str | None = None) -> RegistryEnd:
    return RegistryEnd(client, Reference(fake.host, name, tag))


def test_between_registries(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    source = image(one, "a/b", "v1", b"layer one", b"layer two")
    events: list[ProgressEvent] = []
    copied = copy(end(client, one, "a/b", "v1"), end(client, two, "c/d", "v2"), progress=events.append)
    assert copied.manifest.digest == source.digest
    assert copied.name == f"{two.host}/c/d@{source.digest}"
    assert copied.sent.sent == 3
    assert two.repository("c/d").tags == {"v2": str(source.digest)}
    assert (
        two.repository("c/d").manifests[str(source.digest)]
        == one.repository("a/b").manifests[str(source.digest)]
    )
    assert {"start", "bytes", "done"} <= {event.kind for event in events}
    again = copy(end(client, one, "a/b", "v1"), end(client, two, "c/d", "v2"))
    assert again.sent == Sent(present=3)


def test_within_a_registry_blobs_are_mounted(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    image(one, "a/b", "v1", b"layer one", b"layer two")
    one.clear_log()
    copied = copy(end(client, one, "a/b", "v1"), end(client, one, "c/d", "v1"))
    assert copied.sent == Sent(mounted=3)
    assert not one.seen("GET", "/blobs/")
    assert not one.seen("PUT", "/blobs/")


@pytest.mark.parametrize(
    ("source_tag", "target_tag", "expected"),
    [("v1", None, {"v1"}), ("v1", "v9", {"v9"}), (None, None, {"latest"})],
)
def test_which_tag_it_gets(
    one: FakeRegistry,
    two: FakeRegistry,
    client: Registry,
    source_tag: str | None,
    target_tag: str | None,
    expected: set[str],
) -> None:
    image(one, "a/b", source_tag or "latest", b"x")
    copy(end(client, one, "a/b", source_tag), end(client, two, "c/d", target_tag))
    assert set(two.repository("c/d").tags) == expected


def test_by_digest_it_stays_without_a_tag(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    source = image(one, "a/b", "v1", b"x")
    by_digest = RegistryEnd(client, Reference(one.host, "a/b", None, source.digest))
    copy(by_digest, end(client, two, "c/d"))
    assert two.repository("c/d").tags == {}
    assert str(source.digest) in two.repository("c/d").manifests


def test_a_target_digest_is_a_promise(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    source = image(one, "a/b", "v1", b"x")
    wrong = RegistryEnd(client, Reference(two.host, "c/d", None, Digest.of(b"other")))
    with pytest.raises(InvalidInput, match="nothing was copied"):
        copy(end(client, one, "a/b", "v1"), wrong)
    copy(end(client, one, "a/b", "v1"), RegistryEnd(client, Reference(two.host, "c/d", "v1", source.digest)))
    assert two.repository("c/d").tags == {"v1": str(source.digest)}


def test_an_index_whole_or_one_platform(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    amd = image(one, "a/b", None, b"amd64 layer", b"shared")
    arm = image(one, "a/b", None, b"arm64 layer", b"shared")
    whole = index(
        one,
        "a/b",
        "v1",
        amd.to_json() | {"platform": {"os": "linux", "architecture": "amd64"}},
        arm.to_json() | {"platform": {"os": "linux", "architecture": "arm64"}},
    )
    copied = copy(end(client, one, "a/b", "v1"), end(client, two, "whole"))
    assert (copied.manifest.digest, copied.manifests) == (whole.digest, 3)
    assert len(two.repository("whole").blobs) == 5
    writes = [request.path for request in two.seen("PUT", "/whole/manifests/")]
    assert writes[-1].endswith("/manifests/v1")
    part = copy(
        end(client, one, "a/b", "v1"), end(client, two, "part"), platform=Platform("linux", "arm64", "v8")
    )
    assert (part.manifest.digest, part.manifests) == (arm.digest, 1)
    with pytest.raises(InvalidInput, match="nothing for linux/s390x") as caught:
        copy(end(client, one, "a/b", "v1"), end(client, two, "part"), platform=Platform("linux", "s390x"))
    assert "linux/amd64, linux/arm64" in caught.value.next_step


def test_referrers_go_with_it(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    """Of the index, of its children, and of the referrers themselves (V12)."""
    child = image(one, "a/b", None, b"content")
    platform = {"platform": {"os": "linux", "architecture": "amd64"}}
    whole = index(one, "a/b", "v1", child.to_json() | platform)
    signature = one.put_artifact("a/b", None, [one.put_blob("a/b", b"sig")], "application/sig", subject=child)
    sbom = one.put_artifact("a/b", None, [one.put_blob("a/b", b"sbom")], "application/sbom", subject=whole)
    of_sbom = one.put_artifact("a/b", None, [one.put_blob("a/b", b"s2")], "application/sig", subject=sbom)
    without = copy(end(client, one, "a/b", "v1"), end(client, two, "plain"))
    assert (without.manifests, without.referrers) == (2, 0)
    copied = copy(end(client, one, "a/b", "v1"), end(client, two, "c/d"), referrers=True)
    assert (copied.manifests, copied.referrers) == (2, 3)
    present = two.repository("c/d").manifests
    assert {str(one_.digest) for one_ in (child, whole, signature, sbom, of_sbom)} <= set(present)
    found = client.referrers(
        Reference(two.host, "c/d"), whole.digest, artifact_type=None, deadline=Deadline.never()
    )
    assert [one_.digest for one_ in found] == [sbom.digest]
    # The tag is the last thing that is written: whoever resolves it finds the signatures.
    assert two.seen("PUT", "/c/d/manifests/")[-1].path.endswith("/manifests/v1")


def test_a_false_referrer_is_not_copied(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    subject = image(one, "a/b", "v1", b"content")
    other = image(one, "a/b", "other", b"other")
    liar = one.put_artifact("a/b", None, [one.put_blob("a/b", b"x")], "application/sig", subject=other)

    def lie(request: Request) -> Response | None:
        if f"/referrers/{subject.digest}" in request.path:
            document = {"schemaVersion": 2, "mediaType": mediatypes.OCI_INDEX, "manifests": [liar.to_json()]}
            return Response(200, {"Content-Type": mediatypes.OCI_INDEX}, json.dumps(document).encode())
        return None

    one.fault(lie)
    with pytest.raises(WrongReferrer):
        copy(end(client, one, "a/b", "v1"), end(client, two, "c/d"), referrers=True)
    assert two.repository("c/d").tags == {}


def test_foreign_layers_are_left_where_they_are(
    one: FakeRegistry, two: FakeRegistry, client: Registry
) -> None:
    """CVE-2020-15157: their URLs are never followed."""
    one.strict = two.strict = False
    config = one.put_blob("a/b", b"{}", mediatypes.OCI_CONFIG)
    foreign = {
        "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "digest": str(Digest.of(b"elsewhere")),
        "size": 9,
        "urls": ["http://169.254.169.254/layer"],
    }
    one.put_manifest(
        "a/b",
        "v1",
        {
            "schemaVersion": 2,
            "mediaType": mediatypes.OCI_MANIFEST,
            "config": config.to_json(),
            "layers": [foreign],
        },
    )
    copied = copy(end(client, one, "a/b", "v1"), end(client, two, "c/d"))
    assert copied.sent.sent == 1


def test_a_missing_blob_leaves_no_manifest(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    image(one, "a/b", "v1", b"here", b"gone")
    del one.repository("a/b").blobs[str(Digest.of(b"gone"))]
    with pytest.raises(NotFound):
        copy(end(client, one, "a/b", "v1"), end(client, two, "c/d"))
    assert two.repository("c/d").manifests == {}


def test_wrong_bytes_do_not_arrive(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    source = image(one, "a/b", "v1", b"the right bytes")
    one.repository("a/b").blobs[str(Digest.of(b"the right bytes"))] = b"the wrong bytes"
    with pytest.raises(IntegrityError):
        copy(end(client, one, "a/b", "v1"), end(client, two, "c/d"))
    assert str(source.digest) not in two.repository("c/d").manifests
    assert str(Digest.of(b"the right bytes")) not in two.repository("c/d").blobs


def test_a_cut_download_is_continued(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    big = os.urandom(3 << 20)
    image(one, "a/b", "v1", big)

    left = [1 << 20, 1 << 19]

    def cut(request: Request, response: Response) -> Response | None:
        if request.method == "GET" and str(Digest.of(big)) in request.path and left:
            return replace(response, cut_after=left.pop())
        return None

    one.alter(cut)
    copy(end(client, one, "a/b", "v1"), end(client, two, "c/d"))
    assert two.repository("c/d").blobs[str(Digest.of(big))] == big
    assert len(one.seen("GET", str(Digest.of(big)))) == 3


def test_nested_indexes_end_somewhere(one: FakeRegistry, two: FakeRegistry, client: Registry) -> None:
    inner = index(one, "a/b", "v0")
    for level in range(12):
        inner = index(one, "a/b", f"v{level}", inner.to_json())
    with pytest.raises(TooManyManifests):
        copy(end(client, one, "a/b", "v11"), end(client, two, "c/d"))
    assert two.requests == []


def test_manifests_do_not_fill_the_memory(
    one: FakeRegistry, two: FakeRegistry, client: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unlade.transfer.copy.MAX_MANIFEST_TOTAL", 2000)
    children = [image(one, "a/b", None, f"layer {number}".encode()) for number in range(10)]
    index(one, "a/b", "v1", *(child.to_json() for child in children))
    with pytest.raises(TooManyManifests, match="2000 bytes"):
        copy(end(client, one, "a/b", "v1"), end(client, two, "c/d"))
    assert two.requests == []


def test_dry_run_writes_nothing(
    one: FakeRegistry, two: FakeRegistry, client: Registry, tmp_path: Path
) -> None:
    source = image(one, "a/b", "v1", b"x")
    copied = copy(end(client, one, "a/b", "v1"), end(client, two, "c/d"), dry_run=True)
    assert copied.manifest.digest == source.digest
    assert two.requests == []
    copy(end(client, one, "a/b", "v1"), LayoutEnd(str(tmp_path / "new")), dry_run=True)
    assert not (tmp_path / "new").exists()


def test_into_a_layout_and_back(
    one: FakeRegistry, two: FakeRegistry, client: Registry, tmp_path: Path
) -> None:
    child = image(one, "a/b", None, b"content", b"more")
    platform = {"platform": {"os": "linux", "architecture": "amd64"}}
    whole = index(one, "a/b", "v1", child.to_json() | platform)
    sbom = one.put_artifact("a/b", None, [one.put_blob("a/b", b"sbom")], "application/sbom", subject=whole)
    layout = str(tmp_path / "layout")
    there = copy(end(client, one, "a/b", "v1"), LayoutEnd(layout, "first"), referrers=True)
    assert there.name == f"oci:{layout}:first@{whole.digest}"
    assert json.loads((tmp_path / "layout" / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    entries = json.loads((tmp_path / "layout" / "index.json").read_text())["manifests"]
    assert [(entry["digest"], entry.get("annotations")) for entry in entries] == [
        (str(sbom.digest), None),
        (str(whole.digest), {"org.opencontainers.image.ref.name": "first"}),
    ]
    for path in (tmp_path / "layout" / "blobs" / "sha256").iterdir():
        assert Digest.of(path.read_bytes()).hex == path.name
    again = copy(end(client, one, "a/b", "v1"), LayoutEnd(layout, "first"), referrers=True)
    assert again.sent.sent == 0
    assert len(json.loads((tmp_path / "layout" / "index.json").read_text())["manifests"]) == 2
    back = copy(LayoutEnd(layout, "first"), end(client, two, "c/d", "v3"), referrers=True)
    assert (back.manifest.digest, back.manifests, back.referrers) == (whole.digest, 2, 1)
    assert two.repository("c/d").tags["v3"] == str(whole.digest)
    assert str(sbom.digest) in two.repository("c/d").manifests
    elsewhere = copy(LayoutEnd(layout, "first"), LayoutEnd(str(tmp_path / "l2")))
    assert elsewhere.manifest.digest == whole.digest


def test_names_in_a_layout(one: FakeRegistry, two: FakeRegistry, client: Registry, tmp_path: Path) -> None:
    layout = str(tmp_path)
    first = image(one, "a/b", "v1", b"1")
    second = image(one, "a/b", "v2", b"2")
    copy(end(client, one, "a/b", "v1"), LayoutEnd(layout, "localhost:5000/a/b:v1"))
    alone = copy(LayoutEnd(layout), end(client, two, "c/d", "x"))
    assert alone.manifest.digest == first.digest
    copy(end(client, one, "a/b", "v2"), LayoutEnd(layout, "two"))
    with pytest.raises(NotInLayout, match="more than one") as caught:
        copy(LayoutEnd(layout), end(client, two, "c/d", "x"))
    assert "localhost:5000/a/b:v1, two" in caught.value.next_step
    with pytest.raises(NotInLayout, match="nothing called three"):
        copy(LayoutEnd(layout, "three"), end(client, two, "c/d", "x"))
    by_digest = copy(LayoutEnd(layout, str(second.digest)), end(client, two, "c/d", "x"))
    assert by_digest.manifest.digest == second.digest
    # A name that is given again moves.
    copy(end(client, one, "a/b", "v1"), LayoutEnd(layout, "two"))
    assert copy(LayoutEnd(layout, "two"), end(client, two, "c/d", "x")).manifest.digest == first.digest


def test_parse_as_skopeo_does() -> None:
    parsed = LayoutEnd.parse("/some/dir:localhost:5000/a/b:v1")
    assert (parsed.directory, parsed.name) == ("/some/dir", "localhost:5000/a/b:v1")
    assert LayoutEnd.parse("dir").name is None
    assert LayoutEnd.parse("dir:").name is None
    with pytest.raises(InvalidInput, match="directory"):
        LayoutEnd.parse(":v1")


def test_a_damaged_layout_is_not_spread(
    one: FakeRegistry, two: FakeRegistry, client: Registry, tmp_path: Path
) -> None:
    image(one, "a/b", "v1", b"layer content")
    copy(end(client, one, "a/b", "v1"), LayoutEnd(str(tmp_path), "v1"))
    rotten = tmp_path / "blobs" / "sha256" / Digest.of(b"layer content").hex
    rotten.write_bytes(b"layer contenT")
    with pytest.raises(IntegrityError):
        copy(LayoutEnd(str(tmp_path), "v1"), end(client, two, "c/d", "v1"))
    with pytest.raises(IntegrityError):
        copy(LayoutEnd(str(tmp_path), "v1"), LayoutEnd(str(tmp_path / "l2")))
    assert not list((tmp_path / "l2").rglob(".incoming-*"))
    rotten.unlink()
    with pytest.raises(NotInLayout, match="does not have"):
        copy(LayoutEnd(str(tmp_path), "v1"), end(client, two, "c/d", "v1"))


def test_what_is_no_layout_is_left_alone(
    one: FakeRegistry, two: FakeRegistry, client: Registry, tmp_path: Path
) -> None:
    image(one, "a/b", "v1", b"x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(NotALayout, match="not empty"):
        copy(end(client, one, "a/b", "v1"), LayoutEnd(str(tmp_path / "full")))
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
    (tmp_path / "store" / ".unlade").mkdir(parents=True)
    with pytest.raises(NotALayout, match="Unlade store") as caught:
        copy(end(client, one, "a/b", "v1"), LayoutEnd(str(tmp_path / "store")))
    assert "pull" in caught.value.next_step
    with pytest.raises(NotALayout, match="not an OCI image layout"):
        copy(LayoutEnd(str(tmp_path / "missing")), end(client, two, "c/d"))
