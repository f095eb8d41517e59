"""A directory merged from layers is what overlayfs shows of the same layers stacked.

Random stacks, unpacked twice: once with whiteouts recorded and merged by `merge_into`, once in overlay's
form, completed by `resolve_context` and mounted. Hard links across layers are added to what the generator
makes, because there the two ways differ most: one links, the other copies up.
"""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Literal

import pytest

from tests.fakes.tars import Tar
from tests.property.stacks import Generator, describe
from unlade.model import Digest
from unlade.mount import mount_layers, unmount
from unlade.store import DirStore
from unlade.tree import DanglingLink, DirTrees, Tree, fsck, needs_context, resolve_context
from unlade.unpack import UnpackPolicy, unpack

pytestmark = pytest.mark.root
SEEDS = range(300 if os.environ.get("UNLADE_FULL") else 40)


def policy(whiteouts: Literal["overlay", "record"]) -> UnpackPolicy:
    return UnpackPolicy(rules="image", whiteouts=whiteouts, owners="keep", xattrs=True, setid=True)


def stacked(trees: DirTrees, layers: list[bytes]) -> Tree:
    """The layers as trees of their own, stacked."""
    keys: list[Digest] = []
    for number, layer in enumerate(layers):
        with trees.stage(Digest.of(b"%d" % number + layer)) as staging:
            unpacked = unpack(
                io.BytesIO(layer), staging.dirfd, policy("overlay"), files_out=staging.files_out
            )
            if keys and needs_context(unpacked):
                lower = [trees.store.layout.tree(key) / "root" for key in keys]
                resolve_context(staging.path, lower, unpacked, files_out=staging.files_out)
            has_root = b"" not in unpacked.implicit_dirs
            keys.append(staging.commit(size=unpacked.bytes, has_root=has_root).key)
    with trees.stage(Digest.of(b"stack" + b"".join(layers))) as staging:
        return staging.commit(size=0, layers=keys)


def merged(trees: DirTrees, layers: list[bytes]) -> Tree:
    """The layers as one directory."""
    with trees.stage(Digest.of(b"merged" + b"".join(layers))) as staging:
        for layer in layers:
            scratch = staging.scratch()
            unpacked = unpack(io.BytesIO(layer), scratch.dirfd, policy("record"), files_out=scratch.files_out)
            staging.merge(scratch, unpacked)
        return staging.commit(size=0)


def with_links_to_lower_layers(layers: list[bytes], seed: int) -> list[bytes]:
    """Two layers more: files, and hard links to them in all places."""
    chance = random.Random(seed)
    below, above = Tar(), Tar()
    for number in range(4):
        directory = b"hl%d/in%d" % (chance.randrange(2), chance.randrange(2))
        below.dir(directory.split(b"/")[0], mode=chance.choice([0o700, 0o755]), mtime=number)
        below.dir(directory, mode=0o711, mtime=10 + number, uid=5)
        below.file(directory + b"/f%d" % number, b"content %d" % number, mode=0o640, uid=7, mtime=number)
        below.symlink(directory + b"/l%d" % number, b"f%d" % number, mtime=3)
        name = chance.choice([b"new%d", b"hl0/new%d", b"hl1/other/new%d"]) % number
        above.link(name, directory + chance.choice([b"/f%d", b"/l%d"]) % number)
    return [*layers, bytes(below), bytes(above)]


@pytest.mark.parametrize("seed", SEEDS)
def test_merged_is_what_overlay_shows(seed: int, tmp_path: Path) -> None:
    generated = Generator(seed).stack()
    layers = with_links_to_lower_layers(generated.layers, seed)
    point = tmp_path / "mounted"
    point.mkdir()
    with DirStore(tmp_path / "store") as store:
        trees = DirTrees(store)
        stack, directory = stacked(trees, layers), merged(trees, layers)
        assert fsck(store) == []
        assert directory.path is not None
        mount_layers([str(layer) for layer in stack.layers], str(point))
        try:
            shown = describe(point, generated.untimed)
        finally:
            unmount(str(point))
        made = describe(directory.path, generated.untimed)
    # Overlay breaks up names of one inode that lie in different layers; those in one layer stay together.
    assert {path: entry[:6] + entry[7:] for path, entry in shown.items()} == {
        path: entry[:6] + entry[7:] for path, entry in made.items()
    }


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tar: tar.link(b"name", b"missing"),
        lambda tar: tar.link(b"name", b"dir"),
        lambda tar: (tar.file(b".wh.file"), tar.link(b"name", b"file")),
        lambda tar: (tar.file(b".wh.dir"), tar.link(b"name", b"dir/inner")),
        lambda tar: (tar.dir(b"dir"), tar.file(b"dir/.wh..wh..opq"), tar.link(b"name", b"dir/inner")),
        lambda tar: (tar.symlink(b"dir", b"elsewhere"), tar.link(b"name", b"dir/inner")),
        lambda tar: tar.link(b"name", b"link/inner"),
    ],
)
def test_links_to_what_is_not_there_are_refused(tmp_path: Path, spoil: object) -> None:
    below, above = Tar(), Tar()
    below.file(b"file", b"content")
    below.dir(b"dir")
    below.file(b"dir/inner", b"content")
    below.symlink(b"link", b"dir")
    spoil(above)  # type: ignore[operator]
    layers = [bytes(below), bytes(above)]
    with DirStore(tmp_path / "store") as store:
        for way in (stacked, merged):
            with pytest.raises(DanglingLink):
                way(DirTrees(store), layers)
        assert os.listdir(store.layout.staging) == []


def test_hidden_and_replaced_names_in_the_middle_of_a_stack(tmp_path: Path) -> None:
    """A link finds the topmost file that is visible from its layer, and only that."""
    one, two, three, four = Tar(), Tar(), Tar(), Tar()
    one.file(b"a", b"one")
    one.dir(b"d")
    one.file(b"d/f", b"one")
    two.file(b"a", b"two")
    two.file(b".wh.d")
    three.dir(b"d", mode=0o700)
    three.file(b"d/f", b"three")
    four.link(b"x", b"a")
    four.link(b"y", b"d/f")
    layers = [bytes(tar) for tar in (one, two, three, four)]
    with DirStore(tmp_path / "store") as store:
        trees = DirTrees(store)
        top = stacked(trees, layers).layers[-1]
        assert (top / "x").read_bytes() == (top / "a").read_bytes() == b"two"
        assert os.path.samefile(top / "x", top / "a")
        assert (top / "y").read_bytes() == b"three"
        assert os.stat(top / "d").st_mode & 0o7777 == 0o700
        assert fsck(store) == []
