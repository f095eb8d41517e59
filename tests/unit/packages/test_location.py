"""How packages are named, and how versions count up (P1, P4)."""

import pytest

from unlade.errors import InvalidInput
from unlade.packages.kptfile import GitUpstream, OciUpstream
from unlade.packages.location import (
    BadLocation,
    LocalDirectory,
    at_version,
    default_directory,
    increment,
    parse_location,
    parse_oci,
    parse_remote,
    split_version,
)

DIGEST = "sha256:" + "c" * 64


@pytest.mark.parametrize(
    ("text", "image", "directory"),
    [
        ("oci://r.example.com/a/b:v1", "r.example.com/a/b:v1", "/"),
        ("oci://r.example.com/a/b", "r.example.com/a/b:latest", "/"),
        (f"oci://r.example.com/a/b@{DIGEST}", f"r.example.com/a/b@{DIGEST}", "/"),
        ("oci://r.example.com:5000/a//s/t:v3", "r.example.com:5000/a:v3", "/s/t"),
        (f"oci://r.example.com/a//s@{DIGEST}", f"r.example.com/a@{DIGEST}", "/s"),
        ("oci://r.example.com:5000/a//s", "r.example.com:5000/a:latest", "/s"),
    ],
)
def test_images(text: str, image: str, directory: str) -> None:
    assert parse_oci(text) == OciUpstream(image, directory)


@pytest.mark.parametrize(
    "text", ["oci://r.example.com/a//:v1", "oci://r.example.com/a//../b:v1", "oci://", "oci://A:v1"]
)
def test_bad_images(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_oci(text)


@pytest.mark.parametrize(
    ("text", "repo", "directory", "ref"),
    [
        ("https://git.example.com/x.git/a/b@main", "https://git.example.com/x", "/a/b", "main"),
        ("https://git.example.com/x.git@v1", "https://git.example.com/x", "/", "v1"),
        ("git@git.example.com:x/y.git/a", "git@git.example.com:x/y", "/a", ""),
        ("/srv/repo/.git/pkg@v1", "/srv/repo/", "/pkg", "v1"),
    ],
)
def test_git(text: str, repo: str, directory: str, ref: str) -> None:
    assert parse_location(text) == GitUpstream(repo, directory, ref)


@pytest.mark.parametrize("text", ["https://git.example.com/x/a@v1", "git@git.example.com:x/y"])
def test_ambiguous(text: str) -> None:
    with pytest.raises(BadLocation, match="ambiguous"):
        parse_location(text)


@pytest.mark.parametrize("text", ["-x.git/a", "r.git/../a@v1", "r.git/a@v1@v2", "r.git@-v"])
def test_bad_git(text: str) -> None:
    with pytest.raises(BadLocation):
        parse_location(text)


def test_directories() -> None:
    assert parse_location("./a.github/b") == LocalDirectory("./a.github/b")
    with pytest.raises(BadLocation, match="names no image"):
        parse_remote("./here")


@pytest.mark.parametrize(
    ("text", "directory", "version"),
    [
        ("", ".", ""),
        (".", ".", ""),
        ("app", "app", ""),
        ("app@v2", "app", "v2"),
        ("@v2", ".", "v2"),
        (f"app@{DIGEST}", "app", DIGEST),
    ],
)
def test_versions_behind_a_directory(text: str, directory: str, version: str) -> None:
    assert split_version(text) == (directory, version)


@pytest.mark.parametrize("text", ["a@b@c", "a@"])
def test_bad_versions(text: str) -> None:
    with pytest.raises(BadLocation):
        split_version(text)


def test_another_version() -> None:
    image = OciUpstream("r.example.com/p:v1", "/s")
    assert at_version(image, "v2") == OciUpstream("r.example.com/p:v2", "/s")
    assert at_version(image, DIGEST) == OciUpstream(f"r.example.com/p@{DIGEST}", "/s")
    pinned = OciUpstream(f"r.example.com/p@{DIGEST}")
    assert at_version(pinned, "v2") == OciUpstream("r.example.com/p:v2")
    assert at_version(GitUpstream("r", "/", "v1", "c"), "v2") == GitUpstream("r", "/", "v2")


@pytest.mark.parametrize(
    ("location", "name"),
    [
        (OciUpstream("r.example.com/a/b:v1"), "b"),
        (OciUpstream("r.example.com/a:v1", "/s/t"), "t"),
        (GitUpstream("https://git.example.com/x", "/", "main"), "x"),
        (GitUpstream("git@git.example.com:x", "/", "main"), "x"),
    ],
)
def test_default_directory(location: OciUpstream | GitUpstream, name: str) -> None:
    assert default_directory(location) == name


@pytest.mark.parametrize(
    ("tag", "following"),
    [
        ("v1", "v2"),
        ("1", "2"),
        ("v1.0", "v1.1"),
        ("1.9", "1.10"),
        ("v1.0.0", "v1.0.1"),
        ("v4.1.9-alpha", "v4.1.10-alpha"),
        ("v1.0.0-rc.1", "v1.0.1-rc.1"),
        ("v0", "v1"),
    ],
)
def test_increment(tag: str, following: str) -> None:
    assert increment(tag) == following


@pytest.mark.parametrize("tag", ["latest", "V1", "v1.2.3.4", "v01", "1.", "v", "main", DIGEST, "v1.0-"])
def test_what_cannot_be_incremented(tag: str) -> None:
    with pytest.raises(BadLocation, match=r"cannot be incremented|not a version"):
        increment(tag)
