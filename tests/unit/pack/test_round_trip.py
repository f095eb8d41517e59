"""Packed and unpacked again, a tree is what it was: names, types, execute bits, links, contents."""

from __future__ import annotations

import io
import os
import random
import stat
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unlade.pack import PackPolicy, pack_tree, write_tar
from unlade.pack.compress import Compression
from unlade.unpack import UnpackPolicy, unpack

# Any bytes but the separator and NUL; `.wh.` means something else in an image.
name = st.binary(min_size=1, max_size=40).filter(
    lambda raw: not set(raw) & {0, 0x2F} and raw not in (b".", b"..") and not raw.startswith(b".wh.")
)
long_name = st.binary(min_size=120, max_size=255).map(
    lambda raw: raw.replace(b"\0", b"_").replace(b"/", b"_")
)
leaf = st.one_of(
    st.tuples(st.just("file"), st.binary(max_size=3000), st.booleans()),
    st.tuples(st.just("link"), st.sampled_from([b"x", b"./y", b"a/../b", b"dangling/deep"])),
)
tree = st.recursive(
    st.dictionaries(name, leaf, max_size=5),
    lambda inner: st.dictionaries(st.one_of(name, long_name), st.one_of(leaf, inner), max_size=4),
    max_leaves=20,
)


def make(path: bytes, node: Any, order: random.Random) -> None:
    """The tree on disk, entries made in a random order with random times and permissions."""
    os.mkdir(path, 0o700)
    entries = list(node.items())
    order.shuffle(entries)
    for key, value in entries:
        child = path + b"/" + key
        if isinstance(value, dict):
            make(child, value, order)
        elif value[0] == "file":
            with open(child, "wb") as file:
                file.write(value[1])
            os.chmod(child, 0o700 if value[2] else order.choice([0o600, 0o644, 0o664]))
            os.utime(child, (order.randrange(1 << 30), order.randrange(1 << 30)))
        else:
            os.symlink(value[1], child)
    os.chmod(path, order.choice([0o700, 0o755, 0o775]))


def read(path: bytes) -> dict[bytes, Any]:
    found: dict[bytes, Any] = {}
    for entry in os.scandir(path):
        info = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            found[entry.name] = ("link", os.readlink(entry.path))
        elif entry.is_dir():
            assert stat.S_IMODE(info.st_mode) == 0o755
            found[entry.name] = read(entry.path)
        else:
            with open(entry.path, "rb") as file:
                executable = stat.S_IMODE(info.st_mode) == 0o755
                assert executable or stat.S_IMODE(info.st_mode) == 0o644
                found[entry.name] = ("file", file.read(), executable)
    return found


def unpacked(stream: Any, rules: Any) -> dict[bytes, Any]:
    with tempfile.TemporaryDirectory() as out:
        fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
        try:
            unpack(stream, fd, UnpackPolicy(rules))
        finally:
            os.close(fd)
        return read(os.fsencode(out))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(tree, st.sampled_from(["gzip", "zstd", "none"]), st.integers(0, 1 << 30))
def test_round_trip(node: dict[bytes, Any], compression: Compression, seed: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        digests = set()
        for turn in range(2):
            root = os.fsencode(scratch) + b"/%d" % turn
            make(root, node, random.Random(seed + turn))
            with pack_tree(root, compression=compression) as layer:
                digests.add(layer.descriptor.digest)
                for rules in ("artifact", "image"):
                    with layer.open() as stream:
                        assert unpacked(stream, rules) == node
        assert len(digests) == 1


def test_a_tree_as_it_is(tmp_path: Any) -> None:
    """For a tar on stdout modes, times and hard links are kept."""
    (tmp_path / "tree").mkdir()
    file = tmp_path / "tree" / "a"
    file.write_text("x")
    file.chmod(0o640)
    os.utime(file, (1000, 1000))
    os.link(file, tmp_path / "tree" / "b")
    (tmp_path / "tree" / "out").symlink_to("/etc/passwd")
    out = io.BytesIO()
    assert write_tar(tmp_path / "tree", out) == 3
    target = tmp_path / "out"
    target.mkdir()
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        unpack(io.BytesIO(out.getvalue()), fd, UnpackPolicy("image", owners="squash"))
    finally:
        os.close(fd)
    info = (target / "a").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_mtime) == (0o640, 1000)
    assert (target / "a").samefile(target / "b")


@pytest.mark.parametrize("depth", [100, 128])
def test_deep_trees_that_can_be_pulled_can_be_pushed(tmp_path: Any, depth: int) -> None:
    path = str(tmp_path / "tree")
    os.mkdir(path)
    for _ in range(depth):
        path += "/d"
        os.mkdir(path)
    with open(path + "/f", "w") as file:
        file.write("deep")
    with pack_tree(tmp_path / "tree", policy=PackPolicy()) as layer, layer.open() as stream:
        found: Any = unpacked(stream, "artifact")
    for _ in range(depth):
        found = found[b"d"]
    assert found == {b"f": ("file", b"deep", False)}
