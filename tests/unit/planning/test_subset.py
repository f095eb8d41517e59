"""The grammar of `--only`, and what a subPath needs (V10)."""

from __future__ import annotations

import pytest

from unlade.planning.subset import InvalidPattern, beneath, check, matches


@pytest.mark.parametrize(
    ("pattern", "path", "wanted"),
    [
        ("a", "a", True),
        ("a", "a/b/c", True),
        ("a/", "a/b", True),
        ("a", "ab", False),
        ("a", "b/a", False),
        ("*.gguf", "m.gguf", True),
        ("*.gguf", "d/m.gguf", False),
        ("**/*.gguf", "m.gguf", True),
        ("**/*.gguf", "d/e/m.gguf", True),
        ("d/**", "d/e/f", True),
        ("d/**", "d", False),
        ("d/**/f", "d/f", True),
        ("d/**/f", "d/x/y/f", True),
        ("d/**/f", "d/xf", False),
        ("?", "a", True),
        ("?", "/", False),
        ("[ab]x", "bx", True),
        ("[!ab]x", "bx", False),
        ("[!ab]x", "cx", True),
        ("[a-c]", "b", True),
        ("[!x]", "/", False),
        ("a[/]b", "a/b", False),
        ("[]]", "]", True),
        ("[", "[", True),
        ("a.b", "axb", False),
        ("(x|y)+", "(x|y)+", True),
        ("[[]x", "[x", True),
        ("[\\]", "\\", True),
        ("ü*", "übung", True),
        (".*", ".hidden", True),
        ("*", ".hidden", True),
    ],
)
def test_patterns(pattern: str, path: str, wanted: bool) -> None:
    assert matches((pattern,), path) is wanted


def test_no_patterns_want_everything() -> None:
    assert matches((), "anything/at/all")


@pytest.mark.parametrize("pattern", ["", "/", "/abs", "a" * 5000, "x\0", "[z-a]"])
def test_unusable_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        check((pattern,))


def test_beneath_takes_a_path_literally() -> None:
    for path in ("a/b", "a*[b]?", "plain"):
        assert matches(beneath(path), path)
        assert matches(beneath(path), f"{path}/below")
        assert not matches(beneath(path), f"{path}x")
    assert not matches(beneath("a*"), "ab")


def test_patterns_take_linear_time() -> None:
    """Stars upon stars on a path that almost matches: the classic way to stop a matcher."""
    assert not matches(("*a" * 20 + "b",), "a" * 200)
    assert not matches(("**/" * 20 + "b",), "a/" * 200 + "c")
