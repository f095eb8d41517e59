"""The grammar of titles and filepaths (rule 4 of the formats; V13)."""

from __future__ import annotations

import pytest

from unlade.errors import InvalidInput
from unlade.model.paths import MAX_PART_BYTES, UnsafeTitle, check_relative

_GOOD = [
    "a",
    "a/b/c",
    ".hidden",
    "..hidden",
    "a..b",
    "...",
    "with space",
    "ünï/cödé",
    "-rf",
    "a\\b",
    "C:\\x",
    "line\nbreak",
    "~",
    "x" * MAX_PART_BYTES,
    "/".join(["a"] * 128),
]
_BAD = [
    "",
    "/",
    "/a",
    "//a",
    "..",
    ".",
    "../a",
    "./a",
    "a/..",
    "a/.",
    "a/../b",
    "a/./b",
    "a//b",
    "a/",
    "a\0b",
    "\0",
    "a/\ud800",
    "x" * (MAX_PART_BYTES + 1),
    "é" * 128,
    "/".join(["abc"] * 1100),
    "/".join(["a"] * 129),
]


@pytest.mark.parametrize("path", _GOOD)
def test_plain_relative_paths_are_kept_as_they_are(path: str) -> None:
    assert check_relative(path) == path


@pytest.mark.parametrize("path", _BAD)
def test_everything_else_is_refused(path: str) -> None:
    with pytest.raises(UnsafeTitle) as caught:
        check_relative(path)
    assert isinstance(caught.value, InvalidInput)
    assert caught.value.next_step
    # The name is the attacker's: it reaches a terminal escaped and shortened.
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
