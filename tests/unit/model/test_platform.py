"""Which entry of an index is ours (V11, R3, R7)."""

from __future__ import annotations

import pytest

from unlade.model import InvalidPlatform, Platform

P = Platform.parse


@pytest.mark.parametrize(
    ("host", "candidates", "chosen"),
    [
        ("linux/amd64", ["linux/arm64", "linux/amd64"], 1),
        ("linux/x86_64", ["linux/amd64"], 0),
        ("linux/amd64", ["windows/amd64", "linux/arm64"], None),
        ("linux/arm64", ["linux/arm64/v8"], 0),
        ("linux/arm64", ["linux/arm/v7", "linux/arm64"], 1),
        ("linux/arm64", ["linux/arm/v6", "linux/arm/v7"], 1),
        ("linux/arm/v7", ["linux/arm/v6", "linux/arm/v8", "linux/arm/v5"], 0),
        ("linux/arm/v6", ["linux/arm/v7"], None),
        ("linux/amd64/v3", ["linux/amd64", "linux/amd64/v2", "linux/amd64/v4"], 1),
        ("linux/amd64", ["linux/amd64/v2"], None),
        ("linux/amd64", ["linux/amd64", "linux/amd64"], 0),
    ],
)
def test_match(host: str, candidates: list[str], chosen: int | None) -> None:
    assert P(host).match([P(candidate) for candidate in candidates]) == chosen


def test_entries_without_a_platform_are_never_guessed() -> None:
    assert P("linux/amd64").match([None, P("linux/amd64")]) == 1
    assert P("linux/amd64").match([None]) is None


def test_windows_matches_by_build_number() -> None:
    host = P("windows(10.0.20348.100)/amd64")
    candidates = [P("windows(10.0.17763.9)/amd64"), P("windows(10.0.20348.7)/amd64")]
    assert host.match(candidates) == 1
    assert host.match(candidates[:1]) is None


def test_required_features_must_be_offered() -> None:
    plain = Platform("windows", "amd64")
    offering = Platform("windows", "amd64", os_features=("win32k",))
    needing = Platform("windows", "amd64", os_features=("win32k",))
    assert plain.match([needing]) is None
    assert offering.match([plain, needing]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("windows(10.0.20348)/amd64", Platform("windows", "amd64", os_version="10.0.20348")),
        ("linux(+erofs)/arm64", Platform("linux", "arm64", os_features=("erofs",))),
        ("windows(10.0.1+b+a)/amd64", Platform("windows", "amd64", "", "10.0.1", ("a", "b"))),
    ],
)
def test_versions_and_features_as_containerd_writes_them(text: str, expected: Platform) -> None:
    assert P(text) == expected
    assert P(str(expected)) == expected


@pytest.mark.parametrize("text", ["linux(+)/amd64", "linux()x/amd64", "linux(1+a b)/amd64", "linux(1/amd64"])
def test_brackets_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidPlatform):
        P(text)


@pytest.mark.parametrize("text", ["", "linux", "linux/", "/amd64", "a/b/c/d", "linux/amd64/", "lin ux/amd64"])
def test_refused(text: str) -> None:
    with pytest.raises(InvalidPlatform):
        P(text)


def test_a_variant_that_grew_too_long_by_its_letter_is_refused() -> None:
    assert str(P("linux/riscv64/" + "5" * 63)) == "linux/riscv64/v" + "5" * 63
    with pytest.raises(InvalidPlatform):
        P("linux/riscv64/" + "5" * 64)


def test_host_is_a_linux_platform() -> None:
    assert Platform.host().os == "linux"
    assert Platform.host() == Platform.host().normalised()
