"""Handlers of a node and options of a pull (R2, R3, R6, V19)."""

from __future__ import annotations

import pytest

from unlade.containerd import Containerd, Handler, Handlers, PullOptions, UnknownHandler
from unlade.containerd.handlers import recall, remember
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
        PullOptions(referrer="a", referrer_from="r.io/b"),
        PullOptions(artifact_type="a/b"),
        PullOptions(annotations={"a": "b"}),
        PullOptions(referrer="a/b"),
    ]
    assert len({options.fingerprint() for options in every}) == len(every)


class Notes(Containerd):
    """The labels of a namespace, without a containerd."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def note(self, label: str, value: str) -> None:
        assert len(label) + len(value) <= 4096, "containerd's own limit"
        self.said[label] = value

    def noted(self, label: str) -> str:
        return self.said.get(label, "")


def test_handlers_are_noted_and_recalled() -> None:
    """R7: commands on the node know what its service knows."""
    notes = Notes()
    assert recall(notes) is None
    remember(notes, NODE)
    assert recall(notes) == NODE
    [label] = notes.said
    for text in ("", "{", '{"default":"x","known":{}}', '{"default":"x","known":{"x":{"platform":"?"}}}'):
        notes.said[label] = text
        assert recall(notes) is None
    remember(notes, Handlers("h0", {f"h{n}": Handler(f"h{n}", LINUX, "s" * 90) for n in range(100)}))
    assert recall(notes) is None, "more than containerd keeps"
