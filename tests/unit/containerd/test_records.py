"""What is recorded about an artifact, as data: tuples in labels, names, images that are no artifacts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unlade.containerd import labels, records
from unlade.containerd.images import Row
from unlade.containerd.records import ImageTuple
from unlade.model import Digest, Reference

ID = str(Digest.of(b"config"))
TREE = Digest.of(b"tree")
ONE = ImageTuple("r.io/a:v1", "runc", manifest=str(Digest.of(b"m")), at=1.0)
TWO = ImageTuple("r.io/a:v1", "kata", platform="linux/arm64", snapshotters=("native",), at=2.0)


def row(*tuples: ImageTuple, **extra: str) -> Row:
    facts = {labels.TREE: str(TREE), labels.SIZE: "7", labels.ENTRIES: "2", labels.FAMILY: "oras"}
    return Row(ID, str(Digest.of(b"manifest")), {**facts, **records.encode(tuples), **extra}, 5.0)


def test_what_is_encoded_is_decoded() -> None:
    image = records.decode(row(ONE, TWO))
    assert image is not None
    assert image.tuples == (TWO, ONE), "sorted by reference, handler, options"
    assert (image.id, image.tree, image.size, image.entries, image.family) == (ID, TREE, 7, 2, "oras")
    assert image.handlers == {"runc", "kata"}
    assert image.snapshotters == {"overlayfs", "native"}


def test_tuples_differ_by_each_of_their_parts() -> None:
    """R1: (reference, handler) is the identity, and options are part of it (V19)."""
    seen = {
        records.tuple_label(reference, handler, options)
        for reference in ("r.io/a:v1", "r.io/a:v2")
        for handler in ("runc", "kata")
        for options in ("", "0123456789abcdef")
    }
    assert len(seen) == 8


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"reference":1}', '{"reference":"r.io/b:v1","handler":"x"}']
)
def test_a_tuple_that_cannot_be_read_is_left_out(text: str) -> None:
    """The last one is a well-formed tuple under another's label."""
    image = records.decode(row(ONE, **{labels.TUPLE + "f" * 32: text}))
    assert image is not None and image.tuples == (ONE,)


def test_a_tuple_of_a_later_version_is_read() -> None:
    text = records.encode([ONE])[ONE.label].replace("{", '{"later":[1,2],', 1)
    image = records.decode(row(**{ONE.label: text}))
    assert image is not None and image.tuples == (ONE,)


def test_records_that_are_not_ours() -> None:
    assert records.decode(Row(ID, "sha256:x", {labels.CRI_MANAGED: "managed"}, 0)) is None
    assert records.decode(replace(row(ONE), name="r.io/a:v1")) is None


def test_the_same_but_for_the_time() -> None:
    assert ONE.same_as(ImageTuple("r.io/a:v1", "runc", manifest=ONE.manifest, at=9.0))
    assert not ONE.same_as(ImageTuple("r.io/a:v1", "runc", manifest="sha256:other", at=1.0))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nginx", "docker.io/library/nginx:latest"),
        ("r.io/a:v1", "r.io/a:v1"),
        (f"r.io/a@{TREE}", f"r.io/a@{TREE}"),
        (f"r.io/a:v1@{TREE}", f"r.io/a@{TREE}"),
    ],
)
def test_names_are_those_of_the_cri_plugin(text: str, name: str) -> None:
    assert records.record_name(Reference.parse(text)) == name


def test_tags_and_digests_of_an_image() -> None:
    tuples = (ONE, TWO, replace_reference(ONE, f"r.io/a@{TREE}"))
    image = records.decode(row(*tuples))
    assert image is not None
    assert (image.repo_tags, image.repo_digests) == (("r.io/a:v1",), (f"r.io/a@{TREE}",))


def replace_reference(one: ImageTuple, reference: str) -> ImageTuple:
    return ImageTuple(reference, one.handler, manifest=one.manifest, at=one.at)


@pytest.mark.parametrize("text", [ID, "sha256:" + "0" * 64])
def test_ids(text: str) -> None:
    assert records.is_id(text)


@pytest.mark.parametrize(
    "text", ["", "sha256:", ID.upper(), ID[:-1], ID[7:], f"r.io/a@{ID}", "sha512:" + "0" * 64]
)
def test_no_ids(text: str) -> None:
    assert not records.is_id(text)
