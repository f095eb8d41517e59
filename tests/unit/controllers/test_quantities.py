"""Quantities: as the API server reads them."""

import pytest

from unlade.controllers import quantities
from unlade.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1Ki", 1024),
        ("1.5Gi", 3 << 29),
        ("1e9", 10**9),
        ("1E3", 1000),
        ("2E", 2 * 10**18),
        ("1Ei", 1 << 60),
        ("500M", 500_000_000),
        ("1000000m", 1000),
        ("1m", 1),
        (".5Gi", 1 << 29),
        ("5.", 5),
        ("+1k", 1000),
    ],
)
def test_read(text: str, size: int) -> None:
    assert quantities.parse(text) == size


@pytest.mark.parametrize(
    "text", ["", "Gi", ".", "1 Gi", "1gb", "1mi", "--1", "1e", "1KiB", "1e9999", "0x10", "1K", "1ki"]
)
def test_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        quantities.parse(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1, "1"), (1 << 30, "1Gi"), (3 << 29, "1536Mi"), (1 << 60, "1Ei")]
)
def test_written(size: int, text: str) -> None:
    assert quantities.write(size) == text
    assert quantities.parse(text) == size
