"""Attributes and mount flags: what is understood, and that nothing else passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlade.csi.attributes import InvalidAttribute, Wanted, mount_context, parse
from unlade.csi.records import Record, Source, key_of
from unlade.errors import InvalidInput
from unlade.model import Platform, Reference

NAMES = st.sampled_from(
    [
        *("reference", "references", "pullPolicy", "subPath", "unpack", "exec", "handler", "platform"),
        *("referrer", "Reference", "csi.storage.k8s.io/pod.name", "x"),
    ]
)
VALUES = st.one_of(st.sampled_from(["a.b/c", "a.b/c:v1", "Always", "true", "linux/amd64", ""]), st.text())


def test_everything_that_can_be_said() -> None:
    wanted = parse(
        {
            "references": "a.b/c:v1,\n d.e/f@sha256:" + "0" * 64,
            "pullPolicy": "Never",
            "subPath": "x/y/",
            "unpack": "always",
            "exec": "true",
            "handler": "kata",
            "platform": "linux/arm64",
            "referrer": "application/spdx+json",
            "csi.storage.k8s.io/pod.name": "web",
            "csi.storage.k8s.io/of-a-later-kubelet": "?",
        },
        ['context="system_u:object_r:container_file_t:s0:c1,c2"', "ro", "noexec"],
    )
    assert wanted == Wanted(
        references=(Reference.parse("a.b/c:v1"), Reference.parse("d.e/f@sha256:" + "0" * 64)),
        pull="never",
        sub_path="x/y",
        unpack="always",
        executable=True,
        handler="kata",
        platform=Platform("linux", "arm64"),
        referrer="application/spdx+json",
        context="system_u:object_r:container_file_t:s0:c1,c2",
    )


@pytest.mark.parametrize("flag", ["context=a b", 'context="', "rw", "exec", "suid", "lowerdir=/"])
def test_flags_that_would_change_the_mount(flag: str) -> None:
    with pytest.raises(InvalidAttribute):
        mount_context([flag])


def test_a_label_is_one_value() -> None:
    """A comma belongs to a label's categories: it never starts another option."""
    assert mount_context(["context=x,rw"]) == "x,rw"


@given(st.dictionaries(NAMES, VALUES))
def test_whatever_is_written_is_understood_or_refused_as_input(attributes: dict[str, str]) -> None:
    try:
        wanted = parse(attributes)
    except InvalidInput as error:
        assert error.message
        return
    assert wanted.references
    assert ".." not in wanted.sub_path.split("/")
    assert not wanted.sub_path.startswith("/")
    assert set(attributes) <= {
        *("reference", "references", "pullPolicy", "subPath", "unpack", "exec", "handler", "platform"),
        *("referrer", "csi.storage.k8s.io/pod.name"),
    }
    assert wanted.fingerprint() == parse(dict(reversed(attributes.items()))).fingerprint()


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
def test_keys_are_plain_file_names_and_do_not_meet(a: str, b: str, c: str, d: str) -> None:
    key = key_of(a, b)
    assert "/" not in key
    assert "\0" not in key
    assert not key.startswith(".")
    assert len(key) < 200
    if (a, b) != (c, d):
        assert key != key_of(c, d)


def test_different_wishes_have_different_fingerprints() -> None:
    base = {"reference": "a.b/c:v1"}
    others = [
        {"reference": "a.b/c:v2"},
        {**base, "exec": "true"},
        {**base, "subPath": "x"},
        {**base, "platform": "linux/arm64"},
        {**base, "pullPolicy": "Always"},
        {**base, "referrer": "t"},
    ]
    prints = [parse(one).fingerprint() for one in (base, *others)]
    assert len(set(prints)) == len(prints)
    assert parse(base).fingerprint() == parse({"references": "a.b/c:v1"}).fingerprint()


def test_a_record_says_nothing_secret() -> None:
    assert not {"secrets", "token", "password"} & set(Record.__struct_fields__)
    assert Source("a", "b").digest == "b"
