"""Options from a pod's annotations (V19)."""

from __future__ import annotations

import pytest

from unlade.containerd import PullOptions
from unlade.cri.annotations import InvalidAnnotation, pull_options

REF = "r.example/models/large:v1"


def test_other_annotations_mean_nothing() -> None:
    assert pull_options({"a": "b", "example.com/only": "*"}, REF).plain


def test_options_are_for_the_references_they_name() -> None:
    told = {
        "unlade.dev/for": f"{REF}, r.example/other",
        "unlade.dev/only": "*.bin, docs/*",
        "unlade.dev/unpack": "never",
        "unlade.dev/as-file": "0=a b",
        "unlade.dev/family": "oras",
        "unlade.dev/artifact-type": "application/x",
        "unlade.dev/annotations": "quantization=q8,size=a=b",
        "unlade.dev/referrer": "application/sbom",
        "unlade.dev/referrer-from": "r.example/signatures",
    }
    expected = PullOptions(
        unpack="never",
        only=("*.bin", "docs/*"),
        as_file=("0=a", "b"),
        family="oras",
        artifact_type="application/x",
        annotations={"quantization": "q8", "size": "a=b"},
        referrer="application/sbom",
        referrer_from="r.example/signatures",
    )
    assert pull_options(told, REF) == expected
    assert pull_options(told, "r.example/other:latest") == expected
    assert pull_options(told, "sha256:" + "0" * 64, "r.example/other") == expected
    assert pull_options(told, "r.example/models/large:v2").plain
    assert pull_options(told, "busybox").plain


def test_groups_keep_volumes_apart() -> None:
    told = {
        "unlade.dev/a.for": "r.example/a:1",
        "unlade.dev/a.only": "x",
        "unlade.dev/b.for": "r.example/b:1",
        "unlade.dev/b.unpack": "always",
    }
    assert pull_options(told, "r.example/a:1") == PullOptions(only=("x",))
    assert pull_options(told, "r.example/b:1") == PullOptions(unpack="always")


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"unlade.dev/onyl": "*"}, "unlade.dev/onyl"),
        ({"unlade.dev/a.b": "*"}, "unlade.dev/a.b"),
        ({"unlade.dev/only": "*"}, "for which reference"),
        ({"unlade.dev/for": " , ", "unlade.dev/only": "*"}, "for which reference"),
        ({"unlade.dev/for": REF, "unlade.dev/unpack": "yes"}, "unlade.dev/unpack"),
        ({"unlade.dev/for": REF, "unlade.dev/annotations": "quantization"}, "unlade.dev/annotations"),
        ({"unlade.dev/for": REF, "unlade.dev/family": " "}, "unlade.dev/family"),
        ({"unlade.dev/a.for": REF, "unlade.dev/b.for": REF}, "the same reference"),
    ],
)
def test_mistakes_are_refused_by_name(told: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidAnnotation, match=named) as caught:
        pull_options(told, REF)
    assert caught.value.next_step


def test_a_mistake_is_told_whichever_image_of_the_pod_is_asked_for() -> None:
    with pytest.raises(InvalidAnnotation):
        pull_options({"unlade.dev/for": REF, "unlade.dev/unpack": "yes"}, "busybox")
