"""Which store is meant: a directory, or a node's containerd."""

from __future__ import annotations

import pytest

from unlade.cli.settings import CONTAINERD_SOCKET, Settings
from unlade.errors import InvalidInput


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ({}, {}, None),
        ({"containerd": "/c.sock"}, {}, "/c.sock"),
        ({"containerd": "/c.sock", "store_path": "/dir"}, {}, "/c.sock"),
        ({"store_path": "containerd"}, {}, CONTAINERD_SOCKET),
        ({"store_path": "containerd"}, {"UNLADE_CONTAINERD": "/e.sock"}, "/e.sock"),
        ({"store_path": "/dir"}, {"UNLADE_CONTAINERD": "/e.sock"}, None),
        ({"store_path": "/dir"}, {"UNLADE_STORE": "containerd"}, None),
        ({}, {"UNLADE_CONTAINERD": "/e.sock", "UNLADE_STORE": "/dir"}, "/e.sock"),
        ({}, {"UNLADE_STORE": "containerd"}, CONTAINERD_SOCKET),
    ],
)
def test_containerd_or_a_directory(
    options: dict[str, str],
    environment: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("UNLADE_CONTAINERD", "UNLADE_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Settings(**options).containerd_socket() == expected  # type: ignore[arg-type]


def test_some_commands_want_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspect` is about the registry unless an option says otherwise."""
    monkeypatch.setenv("UNLADE_CONTAINERD", "/e.sock")
    monkeypatch.setenv("UNLADE_STORE", "containerd")
    assert Settings().containerd_socket(asked=True) is None
    assert Settings(store_path="containerd").containerd_socket(asked=True) == "/e.sock"
    assert Settings(containerd="/c.sock").containerd_socket(asked=True) == "/c.sock"


def test_a_command_that_needs_a_directory_says_so() -> None:
    with pytest.raises(InvalidInput) as caught:
        Settings(store_path="containerd").store()
    assert "--store" in caught.value.next_step
