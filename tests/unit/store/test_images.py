"""Records per (reference, handler), their sizes, and index.json as others read it (R1, R4)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.content_store import blob, image
from unlade.model import Descriptor, Digest, Platform, mediatypes
from unlade.store import DirStore, ImageRecord, IncompleteContent, collect, remove_image
from unlade.tree import DirTrees

REF = "registry.test/team/app:v1"
AMD = Platform("linux", "amd64")
ARM = Platform("linux", "arm64", "v8")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirStore]:
    with DirStore(tmp_path / "store") as store:
        yield store


def put_image(store: DirStore, *layers: bytes, config: bytes = b"{}") -> Descriptor:
    """An image in the store, held by nothing yet."""
    for data in (config, *layers):
        store.put(blob(data), data)
    raw = image(*map(blob, layers), config=blob(config, mediatypes.OCI_CONFIG))
    store.put(blob(raw, mediatypes.OCI_MANIFEST), raw)
    return blob(raw, mediatypes.OCI_MANIFEST)


def put_index(store: DirStore, *manifests: Descriptor) -> Descriptor:
    document = {
        "schemaVersion": 2,
        "mediaType": mediatypes.OCI_INDEX,
        "manifests": [manifest.to_json() for manifest in manifests],
    }
    raw = json.dumps(document).encode()
    store.put(blob(raw, mediatypes.OCI_INDEX), raw)
    return blob(raw, mediatypes.OCI_INDEX)


def entries(store: DirStore) -> list[tuple[str, str]]:
    index = json.loads((store.path / "index.json").read_bytes())
    return [
        (entry["annotations"][mediatypes.ANNOTATION_REF_NAME], entry["digest"])
        for entry in index["manifests"]
    ]


def test_a_record_is_read_back(store: DirStore) -> None:
    manifest = put_image(store, b"layer")
    put = store.images.put(ImageRecord(REF, "", manifest, platform=ARM, content=True))
    assert store.images.get(REF) == put
    assert put.platform == ARM
    assert put.created > 0
    assert store.images.all() == [put]


def test_a_record_over_missing_content_is_refused(store: DirStore) -> None:
    raw = image(blob(b"layer"), config=blob(b"{}"))
    manifest = blob(raw, mediatypes.OCI_MANIFEST)
    store.put(manifest, raw)
    store.put(blob(b"{}"), b"{}")
    with pytest.raises(IncompleteContent, match=str(Digest.of(b"layer"))):
        store.images.put(ImageRecord(REF, "", manifest, content=True))
    with pytest.raises(IncompleteContent):
        store.images.put(ImageRecord(REF, "", manifest, tree=Digest.of(b"no such tree")))
    with pytest.raises(IncompleteContent):
        store.images.put(ImageRecord(REF, "", manifest))
    assert store.images.all() == []


def test_a_record_keeps_its_content(store: DirStore) -> None:
    manifest = put_image(store, b"layer")
    store.images.put(ImageRecord(REF, "", manifest, content=True))
    collect(store)
    assert store.stat(Digest.of(b"layer"))
    store.images.delete(REF)
    collect(store)
    assert list(store.walk()) == []


def test_tuples_are_independent(store: DirStore) -> None:
    manifest = put_image(store, b"layer")
    for handler in ("", "kata"):
        store.images.put(ImageRecord(REF, handler, manifest, content=True))
    dropped, report = remove_image(store, REF, "kata")
    assert [record.handler for record in dropped] == ["kata"]
    assert report.removed == []
    assert store.images.get(REF)
    assert store.images.get(REF, "kata") is None
    _, report = remove_image(store, REF, "")
    assert report.blobs == 3
    assert list(store.walk()) == []


def test_removal_without_a_handler_takes_all_tuples(store: DirStore) -> None:
    manifest = put_image(store, b"layer")
    for handler in ("", "kata", "gvisor"):
        store.images.put(ImageRecord(REF, handler, manifest, content=True))
    dropped, report = remove_image(store, REF)
    assert len(dropped) == 3
    assert report.blobs == 3


def test_shared_blobs_stay_while_one_needs_them(store: DirStore) -> None:
    one = put_image(store, b"shared", b"one")
    two = put_image(store, b"shared", b"two", config=b"[]")
    store.images.put(ImageRecord("registry.test/one:v1", "", one, content=True))
    store.images.put(ImageRecord("registry.test/two:v1", "", two, content=True))
    _, report = remove_image(store, "registry.test/one:v1")
    assert set(report.removed) == {str(one.digest), str(Digest.of(b"one")), str(Digest.of(b"{}"))}
    assert store.stat(Digest.of(b"shared"))


def test_removing_an_image_leaves_other_garbage_alone(store: DirStore) -> None:
    """Somebody may be about to use it; only a collection takes it."""
    manifest = put_image(store, b"layer")
    store.put(blob(b"unrelated"), b"unrelated")
    store.images.put(ImageRecord(REF, "", manifest, content=True))
    remove_image(store, REF)
    assert store.stat(Digest.of(b"unrelated"))


def test_sizes_count_shared_bytes_once(store: DirStore) -> None:
    one = put_image(store, b"shared" * 100, b"one" * 100)
    two = put_image(store, b"shared" * 100, b"two" * 200, config=b"[]")
    store.images.put(ImageRecord("a", "", one, content=True))
    store.images.put(ImageRecord("b", "", two, content=True))
    sizes = store.images.sizes()
    assert sizes["a", ""].unique == 300 + 2 + one.size
    assert sizes["b", ""].unique == 600 + 2 + two.size
    assert sizes["a", ""].shared == sizes["b", ""].shared == 600
    assert store.images.total_size() == sum(size.unique for size in sizes.values()) + 600


def test_two_handlers_of_one_image_share_everything(store: DirStore) -> None:
    manifest = put_image(store, b"layer")
    for handler in ("", "kata"):
        store.images.put(ImageRecord(REF, handler, manifest, content=True))
    size = store.images.sizes()[REF, "kata"]
    assert (size.unique, size.shared) == (0, 5 + 2 + manifest.size)


def test_a_stack_is_not_counted_beside_its_layers(store: DirStore) -> None:
    trees = DirTrees(store)
    keys = [Digest.of(b"low"), Digest.of(b"high")]
    for key in keys:
        with trees.stage(key) as staging:
            staging.commit(size=100)
    with trees.stage(Digest.of(b"stack")) as staging:
        staging.commit(size=200, layers=keys)
    store.images.put(ImageRecord(REF, "", blob(b"manifest"), tree=Digest.of(b"stack")))
    assert store.images.sizes()[REF, ""].unique == 200
    assert store.images.total_size() == 200


def test_either_digest_finds_the_record(store: DirStore) -> None:
    manifest = put_image(store, b"layer")
    index = put_index(store, manifest, blob(b"another platform", mediatypes.OCI_MANIFEST))
    record = store.images.put(ImageRecord(REF, "", manifest, index=index, platform=AMD, content=True))
    assert store.images.with_digest(manifest.digest) == [record]
    assert store.images.with_digest(index.digest) == [record]
    assert store.images.with_digest(Digest.of(b"other")) == []


def test_a_tree_joins_the_blobs_of_the_same_manifest(store: DirStore) -> None:
    manifest = put_image(store, b"layer")
    store.images.put(ImageRecord(REF, "", manifest, content=True, platform=AMD))
    key = Digest.of(b"tree")
    with DirTrees(store).stage(key) as staging:
        staging.commit(size=1)
    joined = store.images.put(ImageRecord(REF, "", manifest, tree=key))
    assert (joined.content, joined.tree, joined.platform) == (True, key, AMD)
    collect(store)
    assert DirTrees(store).find(key)
    assert store.stat(Digest.of(b"layer"))


def test_a_moved_tag_replaces_the_record(store: DirStore) -> None:
    old = put_image(store, b"old")
    store.images.put(ImageRecord(REF, "", old, content=True))
    new = put_image(store, b"new", config=b"[]")
    store.images.put(ImageRecord(REF, "", new, content=True))
    collect(store)
    assert store.stat(Digest.of(b"old")) is None
    assert store.stat(Digest.of(b"new"))
    assert entries(store) == [(REF, str(new.digest))]


def test_index_json_follows_the_records(store: DirStore) -> None:
    assert entries(store) == []
    manifest = put_image(store, b"layer")
    store.images.put(ImageRecord(REF, "", manifest, content=True))
    assert entries(store) == [(REF, str(manifest.digest))]
    store.images.delete(REF)
    assert entries(store) == []


def test_index_json_names_an_index_only_when_all_of_it_is_there(store: DirStore) -> None:
    amd, arm = put_image(store, b"amd"), put_image(store, b"arm", config=b"[]")
    whole = put_index(store, amd, arm)
    part = put_index(store, amd, blob(b"absent", mediatypes.OCI_MANIFEST))
    store.images.put(ImageRecord("a", "", amd, index=whole, content=True))
    store.images.put(ImageRecord("b", "", amd, index=part, content=True))
    assert entries(store) == [("a", str(whole.digest)), ("b", str(amd.digest))]


def test_index_json_has_one_name_per_content(store: DirStore) -> None:
    amd, arm = put_image(store, b"amd"), put_image(store, b"arm", config=b"[]")
    store.images.put(ImageRecord(REF, "", amd, content=True))
    store.images.put(ImageRecord(REF, "kata", amd, content=True))
    store.images.put(ImageRecord(REF, "vm", arm, content=True))
    assert entries(store) == [(REF, str(amd.digest)), (f"{REF}+vm", str(arm.digest))]


def test_index_json_does_not_name_what_has_only_a_tree(store: DirStore) -> None:
    key = Digest.of(b"tree")
    with DirTrees(store).stage(key) as staging:
        staging.commit(size=1)
    store.images.put(ImageRecord(REF, "", blob(b"manifest"), tree=key))
    assert entries(store) == []


def test_index_json_is_put_right_at_open(store: DirStore) -> None:
    manifest = put_image(store, b"layer")
    store.images.put(ImageRecord(REF, "", manifest, content=True))
    (store.path / "index.json").write_text("{}")
    with DirStore(store.path) as again:
        assert entries(again) == [(REF, str(manifest.digest))]


def test_touch_is_cheap_and_forgiving(store: DirStore) -> None:
    manifest = put_image(store, b"layer")
    record = store.images.put(ImageRecord(REF, "", manifest, content=True))
    store.images.touch(REF)
    store.images.touch("no such reference")
    assert store.images.get(REF) == record
    with store.database.write() as connection:
        connection.execute("UPDATE images SET used = used - 3600")
    store.images.touch(REF)
    after = store.images.get(REF)
    assert after and after.used >= record.used
