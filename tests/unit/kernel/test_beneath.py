"""Names beneath a descriptor: openat2 and the walk must agree on every answer."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from unlade.kernel.beneath import Links, forced_walk, has_openat2, open_beneath

LOOK = os.O_RDONLY


@pytest.fixture(params=["openat2", "walk"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs with the system call and with the fallback."""
    if request.param == "openat2":
        if not has_openat2():
            pytest.skip("this kernel has no openat2")
        yield "openat2"
        return
    with forced_walk():
        yield "walk"


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[int]:
    root = tmp_path / "root"
    (root / "dir/sub").mkdir(parents=True)
    (root / "dir/file").write_text("inside")
    (root / "file").write_text("top")
    (root / "to-dir").symlink_to("dir")
    (root / "to-file").symlink_to("dir/file")
    (root / "up").symlink_to("dir/../file")
    (root / "absolute").symlink_to("/dir/file")
    (root / "dir/out").symlink_to("../../secret")
    (root / "host").symlink_to(tmp_path / "secret")
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("nothing/here")
    (tmp_path / "secret").write_text("outside")
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def read(tree: int, path: bytes, links: Links) -> str:
    with contextlib.closing(os.fdopen(open_beneath(tree, path, LOOK, links=links))) as file:
        return file.read()


def code(tree: int, path: bytes, links: Links, flags: int = LOOK) -> int:
    with pytest.raises(OSError) as caught:
        os.close(open_beneath(tree, path, flags, 0o600, links=links))
    assert caught.value.errno is not None
    return caught.value.errno


@pytest.mark.parametrize("links", ["refuse", "beneath", "in-root"])
@pytest.mark.parametrize("path", [b"dir/file", b"dir//file", b"./dir/./file"])
def test_plain_names_open(way: str, tree: int, path: bytes, links: Links) -> None:
    assert read(tree, path, links) == "inside"


@pytest.mark.parametrize("path", [b"to-dir/file", b"to-file", b"up", b"absolute", b"loop", b"host"])
def test_refuse_stops_at_every_link(way: str, tree: int, path: bytes) -> None:
    assert code(tree, path, "refuse") == errno.ELOOP


def test_links_that_stay_beneath_are_followed(way: str, tree: int) -> None:
    assert read(tree, b"to-dir/file", "beneath") == "inside"
    assert read(tree, b"to-file", "beneath") == "inside"
    assert read(tree, b"up", "beneath") == "top"


@pytest.mark.parametrize(
    "path", [b"dir/out", b"host", b"absolute", b"..", b"../secret", b"dir/../../secret", b"/file"]
)
def test_beneath_never_leaves(way: str, tree: int, path: bytes) -> None:
    assert code(tree, path, "beneath") == errno.EXDEV


def test_in_root_treats_the_directory_as_the_root(way: str, tree: int) -> None:
    assert read(tree, b"absolute", "in-root") == "inside"
    assert read(tree, b"/file", "in-root") == "top"
    assert read(tree, b"../../file", "in-root") == "top"
    # Both lead out of the directory by their text, and to nothing inside it.
    assert code(tree, b"dir/out", "in-root") == errno.ENOENT
    assert code(tree, b"host", "in-root") == errno.ENOENT


def test_loops_end(way: str, tree: int) -> None:
    assert code(tree, b"loop", "beneath") == errno.ELOOP
    assert code(tree, b"loop", "in-root") == errno.ELOOP


def test_missing_and_wrong_kinds(way: str, tree: int) -> None:
    assert code(tree, b"nothing", "refuse") == errno.ENOENT
    assert code(tree, b"file/below", "refuse") == errno.ENOTDIR
    assert code(tree, b"dangling", "beneath") == errno.ENOENT
    assert code(tree, b"file", "refuse", os.O_RDONLY | os.O_DIRECTORY) == errno.ENOTDIR


def test_a_nul_is_refused(way: str, tree: int) -> None:
    assert code(tree, b"dir\0/file", "refuse") == errno.EINVAL


def test_creating(way: str, tree: int) -> None:
    os.close(open_beneath(tree, b"dir/new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    assert os.stat("dir/new", dir_fd=tree).st_mode & 0o777 == 0o600
    exclusive = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    assert code(tree, b"dir/new", "refuse", exclusive) == errno.EEXIST
    assert code(tree, b"to-dir/other", "refuse", exclusive) == errno.ELOOP
    assert code(tree, b"dangling", "beneath", exclusive) == errno.EEXIST


def test_the_directory_itself(way: str, tree: int) -> None:
    for path in (b".", b"", b"dir/.."):
        fd = open_beneath(tree, path, os.O_RDONLY | os.O_DIRECTORY, links="beneath")
        assert os.path.sameopenfile(fd, tree)
        os.close(fd)


def test_descriptors_are_not_inherited_and_none_leak(way: str, tree: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = open_beneath(tree, b"dir/sub", os.O_RDONLY | os.O_DIRECTORY)
    assert not os.get_inheritable(fd)
    os.close(fd)
    for path in (b"to-dir/file", b"file/below", b"nothing/x"):
        code(tree, path, "refuse")
    assert len(os.listdir("/proc/self/fd")) == before
