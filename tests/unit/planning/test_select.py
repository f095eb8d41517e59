"""Which entry of an index is meant (V11)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from unlade.model import Descriptor, Digest, Index, Manifest, Platform
from unlade.model.mediatypes import OCI_EMPTY, OCI_INDEX, OCI_MANIFEST
from unlade.planning import Ambiguous, IndexTooDeep, NoMatch, descend, select
from unlade.planning.select import MAX_INDEX_DEPTH

AMD64 = Platform.parse("linux/amd64")


def entry(
    name: str, platform: str | None = None, media_type: str = OCI_MANIFEST, **fields: Any
) -> Descriptor:
    parsed = None
    if platform:
        os, _, architecture = platform.partition("/")
        parsed = Platform(os, architecture)
    return Descriptor(
        media_type=media_type, digest=Digest.of(name.encode()), size=len(name), platform=parsed, **fields
    )


def index(*entries: Descriptor) -> Index:
    return Index(media_type=OCI_INDEX, manifests=entries)


def test_the_platform_decides() -> None:
    arm, amd = entry("arm", "linux/arm64"), entry("amd", "linux/amd64")
    assert select(index(arm, amd), AMD64) == amd
    assert select(index(arm, amd), Platform.parse("linux/arm64")) == arm


def test_no_match_lists_what_there_is() -> None:
    with pytest.raises(NoMatch) as caught:
        select(index(entry("arm", "linux/arm64"), entry("win", "windows/amd64")), AMD64)
    assert "linux/arm64" in str(caught.value) and "windows/amd64" in str(caught.value)
    assert "--platform" in caught.value.next_step


@pytest.mark.parametrize(
    "attestation",
    [
        entry("att", "unknown/unknown"),
        entry("att", None, annotations={"vnd.docker.reference.type": "attestation-manifest"}),
        entry("att", "linux/amd64", annotations={"vnd.docker.reference.type": "attestation-manifest"}),
    ],
)
def test_an_attestation_is_never_chosen(attestation: Descriptor) -> None:
    amd = entry("amd", "linux/amd64")
    assert select(index(attestation, amd), AMD64) == amd
    for wanted in ({}, dict(attestation.annotations)):
        with pytest.raises(NoMatch):
            select(index(attestation), AMD64, annotations=wanted)


def test_by_artifact_type_and_annotation() -> None:
    a = entry("a", artifact_type="application/a", annotations={"q": "4"})
    b = entry("b", artifact_type="application/b", annotations={"q": "4"})
    c = entry("c", artifact_type="application/b", annotations={"q": "8"})
    every = index(a, b, c)
    assert select(every, AMD64, artifact_type="application/a") == a
    assert select(every, AMD64, annotations={"q": "8"}) == c
    assert select(every, AMD64, artifact_type="application/b", annotations={"q": "4"}) == b
    with pytest.raises(Ambiguous) as caught:
        select(every, AMD64)
    assert "application/a" in str(caught.value) and "--annotation" in caught.value.next_step
    with pytest.raises(Ambiguous):
        select(every, AMD64, artifact_type="application/b")
    with pytest.raises(NoMatch, match="application/z"):
        select(every, AMD64, artifact_type="application/z")


def test_a_type_narrows_and_the_platform_decides() -> None:
    amd = entry("amd", "linux/amd64", artifact_type="application/a")
    arm = entry("arm", "linux/arm64", artifact_type="application/a")
    other = entry("other", "linux/amd64", artifact_type="application/b")
    assert select(index(other, arm, amd), AMD64, artifact_type="application/a") == amd


def test_a_single_entry_without_a_platform_is_taken() -> None:
    only = entry("only")
    assert select(index(only), AMD64) == only
    assert select(index(entry("arm", "linux/arm64"), only), AMD64) == only
    assert select(index(only, only), AMD64) == only, "the same digest twice is one entry"


def test_an_empty_index_has_nothing() -> None:
    with pytest.raises(NoMatch, match="no entries"):
        select(index(), AMD64)


def test_words_of_the_publisher_are_escaped() -> None:
    with pytest.raises(Ambiguous) as caught:
        select(index(entry("a", artifact_type="\x1b[2J"), entry("b", annotations={"\n": "\r"})), AMD64)
    assert str(caught.value).isprintable()
    with pytest.raises(NoMatch) as unmatched:
        select(index(entry("a", "linux/\0amd64"), entry("b", "\x1b[31m/x")), AMD64)
    assert str(unmatched.value).isprintable()


def manifest() -> Manifest:
    return Manifest(
        media_type=OCI_MANIFEST,
        config=Descriptor(media_type=OCI_EMPTY, digest=Digest.of(b"{}"), size=2),
        layers=(),
    )


def test_descend_follows_indexes_down() -> None:
    leaf = entry("leaf", "linux/amd64")
    inner = entry("inner", None, OCI_INDEX)
    documents: dict[Digest, Manifest | Index] = {inner.digest: index(leaf), leaf.digest: manifest()}
    chosen = descend(index(inner), AMD64, lambda d: documents[d.digest])
    assert chosen.through == (inner, leaf)
    assert descend(manifest(), AMD64, lambda d: documents[d.digest]).through == ()


def test_a_filter_is_asked_of_the_top_only() -> None:
    leaf = entry("leaf", "linux/amd64")
    inner = entry("inner", None, OCI_INDEX, artifact_type="application/a")
    documents: dict[Digest, Manifest | Index] = {inner.digest: index(leaf), leaf.digest: manifest()}
    chosen = descend(
        index(inner, entry("x")), AMD64, lambda d: documents[d.digest], artifact_type="application/a"
    )
    assert chosen.through == (inner, leaf)


def test_manifests_are_asked_where_the_index_is_silent() -> None:
    """`oras manifest index create` copies neither types nor annotations into the index."""
    entries = [entry(name) for name in "abc"]

    def read(descriptor: Descriptor) -> Manifest:
        number = entries.index(descriptor)
        return msgspec.structs.replace(
            manifest(), artifact_type=f"application/{'xyy'[number]}", annotations={"q": str(number)}
        )

    every = index(*entries)
    assert descend(every, AMD64, read, artifact_type="application/x").through == (entries[0],)
    assert descend(every, AMD64, read, annotations={"q": "2"}).through == (entries[2],)
    with pytest.raises(Ambiguous):
        descend(every, AMD64, read, artifact_type="application/y")
    with pytest.raises(NoMatch):
        descend(every, AMD64, read, artifact_type="application/z")


def test_a_wide_index_is_not_read_whole() -> None:
    reads: list[Descriptor] = []

    def read(descriptor: Descriptor) -> Manifest:
        reads.append(descriptor)
        return manifest()

    with pytest.raises(NoMatch):
        descend(index(*(entry(str(n)) for n in range(33))), AMD64, read, artifact_type="application/x")
    assert reads == []


def test_a_circle_of_indexes_ends() -> None:
    reads = []
    circle = entry("circle", None, OCI_INDEX)

    def read(descriptor: Descriptor) -> Index:
        reads.append(descriptor)
        return index(circle)

    with pytest.raises(IndexTooDeep):
        descend(index(circle), AMD64, read)
    assert len(reads) == MAX_INDEX_DEPTH
