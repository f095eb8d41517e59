"""Handlers of a node and options of a pull (R2, R3, R6, V19)."""

from __future__ import annotations

import pytest

from unlade.containerd import Handler, Handlers, PullOptions, UnknownHandler
from unlade.errors import InvalidInput
from unlade.model import Platform

LINUX = Platform("linux", "amd64")
WINDOWS = Platform("windows", "amd64", os_version="10.0.20348")
NODE = Handlers("runc", {"runc": Handler("runc", LINUX), "hcs": Handler("hcs", WINDOWS, "native")})


def test_an_empty_handler_is_the_default() -> None:
    assert NODE.resolve("") == NODE.resolve("runc") == Handler("runc", LINUX)
    assert NODE.resolve("hcs").platform == WINDOWS


@pytest.mark.parametrize("name", ["kata", "RUNC", "runc ", " "])
def test_an_unknown_handler_is_refused(name: str) -> None:
    with pytest.raises(UnknownHandler) as caught:
        NODE.resolve(name)
    assert "hcs, runc" in caught.value.next_step
    assert not caught.value.retryable


def test_a_default_that_does_not_exist() -> None:
    with pytest.raises(InvalidInput, match="kata"):
        Handlers("kata", {"runc": Handler("runc", LINUX)})


def test_one_handler_for_a_plain_node() -> None:
    node = Handlers.single()
    assert node.resolve("").platform == Platform.host()
    assert node.snapshotters() == {"overlayfs"}
    assert NODE.snapshotters() == {"overlayfs", "native"}


def test_no_options_have_no_fingerprint() -> None:
    assert PullOptions().fingerprint() == ""
    assert PullOptions(annotations={}).plain


def test_options_that_mean_the_same_have_one_fingerprint() -> None:
    one = PullOptions(only=("b", "a", "a"), annotations={"x": "1", "y": "2"})
    two = PullOptions(only=("a", "b"), annotations={"y": "2", "x": "1"})
    assert one.fingerprint() == two.fingerprint()


def test_each_option_counts() -> None:
    every = [
        PullOptions(),
        PullOptions(unpack="always"),
        PullOptions(unpack="never"),
        PullOptions(only=("a",)),
        PullOptions(as_file=("a", "b")),
        PullOptions(as_file=("b", "a")),
        PullOptions(family="oras"),
        PullOptions(artifact_type="a/b"),
        PullOptions(annotations={"a": "b"}),
        PullOptions(referrer="a/b"),
    ]
    assert len({options.fingerprint() for options in every}) == len(every)
