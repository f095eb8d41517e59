"""Layers: deterministic, exact, resumable (design decision 10; P6 builds on it)."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import shutil
import socket
import subprocess
import tarfile
import zlib
from pathlib import Path

import pytest

from unlade.errors import DeadlineExceeded, InvalidInput
from unlade.model import Deadline
from unlade.pack import PackPolicy, SourceChanged, UnpackableSource, pack_file, pack_tree
from unlade.pack import compress as compressing
from unlade.pack.listing import Entry, list_tree
from unlade.pack.tar import TarLayout, header, in_blocks

RECORDED = (
    "sha256:f9f7dc8759507aa7923e3bdd44e48a85f49b4ca05b068b9acd5b1d3c141fad58",
    "sha256:40bbe02c54336f525e872595a8aebba5819ecb8378e28ecefb4991b7efd06434",
)


def build(root: Path, *, order: int = 0, umask: int = 0o022) -> Path:
    """One tree, made in a different order and under a different umask each time it is asked for."""
    steps = [
        ("dir", "empty", ""),
        ("dir", "bin", ""),
        ("dir", "deep/er/still", ""),
        ("file", "bin/tool", "#!/bin/sh\n"),
        ("file", "readme.txt", "hello\n"),
        ("file", "deep/er/still/data", "x" * 3000),
        ("file", "long/" + "n" * 120, "long name"),
        ("file", "empty-file", ""),
        ("link", "bin/alias", "tool"),
        ("link", "up", "deep/../readme.txt"),
    ]
    random.Random(order).shuffle(steps)
    old = os.umask(umask)
    try:
        root.mkdir(parents=True)
        for kind, name, content in steps:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "dir":
                path.mkdir(parents=True, exist_ok=True)
            elif kind == "file":
                path.write_text(content)
                if name == "bin/tool":
                    path.chmod(path.stat().st_mode | 0o100)
            else:
                path.symlink_to(content)
            os.utime(path, (order * 1000, order * 77), follow_symlinks=False)
    finally:
        os.umask(old)
    return root


def content(directory: Path, **options: object) -> bytes:
    with pack_tree(directory, compression="none", **options) as layer, layer.open() as stream:  # type: ignore[arg-type]
        return stream.read()


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_same_tree_same_digest_whatever_made_it(tmp_path: Path, compression: compressing.Compression) -> None:
    digests = set()
    for order, umask in enumerate((0o022, 0o077, 0o002, 0o027)):
        tree = build(tmp_path / f"tree{order}", order=order, umask=umask)
        with pack_tree(tree, compression=compression) as layer:
            digests.add((str(layer.descriptor.digest), layer.descriptor.size, str(layer.diff_id)))
    assert len(digests) == 1


def test_the_digest_is_the_one_every_other_machine_gets(tmp_path: Path) -> None:
    """A change here changes what every user's CI compares with: it needs a changelog entry."""
    with pack_tree(build(tmp_path / "tree")) as layer:
        assert (str(layer.descriptor.digest), str(layer.diff_id)) == RECORDED


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_descriptor_and_diff_id_are_exact(tmp_path: Path, compression: compressing.Compression) -> None:
    with pack_tree(build(tmp_path / "tree"), compression=compression) as layer:
        with layer.open() as stream:
            blob = stream.read()
        assert len(blob) == layer.descriptor.size
        assert hashlib.sha256(blob).hexdigest() == layer.descriptor.digest.hex
        suffix = "" if compression == "none" else "+" + compression
        assert layer.descriptor.media_type == "application/vnd.oci.image.layer.v1.tar" + suffix
        tar = content(tmp_path / "tree")
        assert layer.diff_id is not None
        assert hashlib.sha256(tar).hexdigest() == layer.diff_id.hex
        if compression == "gzip":
            assert gzip.decompress(blob) == tar
        if compression == "zstd":
            done = subprocess.run(["zstd", "-dc"], input=blob, capture_output=True, check=True)
            assert done.stdout == tar


def test_gnu_tar_and_tarfile_read_what_we_write(tmp_path: Path) -> None:
    tree = build(tmp_path / "tree")
    blob = content(tree)
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["tar", "-xf", "-", "-C", str(out)], input=blob, check=True)
    for path in sorted(tree.rglob("*")):
        twin = out / path.relative_to(tree)
        assert twin.is_symlink() == path.is_symlink()
        if path.is_symlink():
            assert twin.readlink() == path.readlink()
        elif path.is_file():
            assert twin.read_bytes() == path.read_bytes()
            assert bool(twin.stat().st_mode & 0o100) == bool(path.stat().st_mode & 0o100)
        else:
            assert twin.is_dir()
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.uid, member.gid, member.mtime, member.uname) for member in members} == {(0, 0, 0, "")}
    assert len(members) == len(list(tree.rglob("*")))


def test_bytes_from_any_offset_are_the_same(tmp_path: Path) -> None:
    tree = build(tmp_path / "tree")
    for compression in ("none", "gzip"):
        with pack_tree(tree, compression=compression) as layer:
            with layer.open() as stream:
                whole = stream.read()
            for offset in (*range(0, len(whole), 517), len(whole) - 1, len(whole)):
                with layer.open(offset) as stream:
                    assert stream.read() == whole[offset:], offset


def test_every_offset_of_a_small_tar(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "a" / "y").write_bytes(bytes(512))
    layout = TarLayout(list_tree(tmp_path, PackPolicy()))
    whole = b"".join(layout.chunks())
    assert len(whole) == layout.size
    for offset in range(layout.size + 1):
        assert b"".join(layout.chunks(offset)) == whole[offset:]
    with pytest.raises(ValueError, match="offset"):
        next(layout.chunks(layout.size + 1))


def test_two_readers_do_not_disturb_each_other(tmp_path: Path) -> None:
    with pack_tree(build(tmp_path / "tree")) as layer, layer.open() as one, layer.open(5) as two:
        first = one.read(10)
        second = two.read(10)
        assert first[5:] == second[:5]


def test_modes_kept_on_request(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    (tmp_path / "f").chmod(0o2640)
    [entry] = list_tree(tmp_path, PackPolicy(keep_modes=True))
    assert entry.mode == 0o2640
    assert list_tree(tmp_path, PackPolicy())[0].mode == 0o644


def test_hard_links_are_files_in_an_artifact_and_links_in_an_image(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("same")
    os.link(tmp_path / "b", tmp_path / "a")
    assert [entry.kind for entry in list_tree(tmp_path, PackPolicy())] == ["file", "file"]
    linked = list_tree(tmp_path, PackPolicy(hard_links=True))
    assert [(entry.name, entry.kind, entry.link) for entry in linked] == [
        (b"a", "file", b""),
        (b"b", "hardlink", b"a"),
    ]
    # Links made by accident (a cache, a deduplicating file system) do not change an artifact's digest.
    before = content(tmp_path)
    (tmp_path / "b").unlink()
    (tmp_path / "b").write_text("same")
    assert content(tmp_path) == before


@pytest.mark.parametrize("target", ["/etc/passwd", "../x", "in/../../x", "a/b/../../../x"])
def test_links_that_lead_out_are_refused_in_an_artifact(tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(UnpackableSource, match="outside") as caught:
        list_tree(tmp_path, PackPolicy())
    assert "--image" in caught.value.next_step
    assert list_tree(tmp_path, PackPolicy(contained_links=False))[0].link == target.encode()


@pytest.mark.parametrize("target", ["x", "./x", "sub/../x", "dangling/deep"])
def test_links_that_stay_inside_are_kept_as_written(tmp_path: Path, target: str) -> None:
    (tmp_path / "link").symlink_to(target)
    assert list_tree(tmp_path, PackPolicy())[0].link == target.encode()


def test_what_no_layer_can_hold_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnpackableSource, match=r"pipe is a FIFO"):
        list_tree(tmp_path, PackPolicy())
    (tmp_path / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(os.path.relpath(tmp_path / "sock"))
        with pytest.raises(UnpackableSource, match=r"sock is a socket"):
            list_tree(tmp_path, PackPolicy())


def test_names_that_an_image_reads_as_deletions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / ".wh.gone").write_text("")
    assert len(list_tree(tmp_path, PackPolicy())) == 2
    with pytest.raises(UnpackableSource, match="deletion"):
        list_tree(tmp_path, PackPolicy(refuse_whiteouts=True))


@pytest.mark.parametrize("name", ["missing", "file"])
def test_the_source_must_be_a_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnpackableSource, match=name):
        list_tree(tmp_path / name, PackPolicy())


def test_prefix_and_exclude(tmp_path: Path) -> None:
    tree = build(tmp_path / "tree")
    policy = PackPolicy(prefix=b"top", exclude=lambda name: name in (b"deep", b"bin/alias"))
    names = [entry.name for entry in list_tree(tree, policy)]
    assert names[0] == b"top"
    assert b"top/bin/tool" in names
    assert not [name for name in names if b"deep" in name or b"alias" in name]


def test_names_are_bytes(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/caf\xe9\n"
    with open(odd, "wb") as file:
        file.write(b"x")
    blob = content(tmp_path)
    assert blob[:100].rstrip(b"\0") == b"caf\xe9\n"


@pytest.mark.parametrize("change", ["grow", "shrink", "touch", "replace", "remove", "swap-link"])
def test_a_file_that_changes_ends_the_push(tmp_path: Path, change: str) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"12345678")
    os.utime(file, ns=(1, 1))
    layout = TarLayout(list_tree(tmp_path, PackPolicy()))
    single = pack_file(file)
    if change == "grow":
        file.write_bytes(b"123456789")
    elif change == "shrink":
        file.write_bytes(b"1")
    elif change == "touch":
        os.utime(file, ns=(2, 2))
    elif change == "replace":
        (tmp_path / "g").write_bytes(b"87654321")
        os.utime(tmp_path / "g", ns=(1, 1))
        os.replace(tmp_path / "g", file)
    elif change == "remove":
        file.unlink()
    else:
        shutil.move(file, tmp_path / "g")
        file.symlink_to("/etc/hostname")
    with pytest.raises(SourceChanged) as caught:
        b"".join(layout.chunks())
    assert caught.value.retryable
    with pytest.raises(SourceChanged):
        single.open(0)


def test_a_plain_file_is_pushed_as_it_is(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(3 << 20)
    (tmp_path / "weights.bin").write_bytes(data)
    heard: list[int] = []
    with pack_file(tmp_path / "weights.bin", on_bytes=heard.append) as layer:
        assert sum(heard) == len(data) == layer.descriptor.size
        assert layer.descriptor.digest.hex == hashlib.sha256(data).hexdigest()
        with layer.open(1000) as stream:
            assert stream.read() == data[1000:]
    with pytest.raises(UnpackableSource):
        pack_file(tmp_path)
    with pytest.raises(UnpackableSource, match="No such file"):
        pack_file(tmp_path / "missing")


def test_gzip_does_not_depend_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(7).randbytes(600_000) + b"abc" * 900_000
    blocks = list(in_blocks([data], compressing.BLOCK_SIZE))
    results = set()
    for count in (1, 2, 7):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        results.add(b"".join(compressing.compress(blocks, "gzip")))
    assert len(results) == 1
    [result] = results
    assert gzip.decompress(result) == data
    done = subprocess.run(["gzip", "-dc"], input=result, capture_output=True, check=True)
    assert done.stdout == data


def test_this_machine_deflates_as_others_do() -> None:
    assert compressing.same_everywhere()


def test_without_zlib_ng_the_digest_is_another_and_the_content_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = list(in_blocks([b"%d layer\n" % n for n in range(300_000)], compressing.BLOCK_SIZE))
    usual = b"".join(compressing.compress(blocks, "gzip"))
    monkeypatch.setattr(compressing, "deflating", zlib)
    other = b"".join(compressing.compress(blocks, "gzip"))
    assert not compressing.same_everywhere()
    assert usual != other
    assert gzip.decompress(usual) == gzip.decompress(other) == b"".join(blocks)


def test_levels(tmp_path: Path) -> None:
    tree = build(tmp_path / "tree")
    with pack_tree(tree, level=9) as best, pack_tree(tree, level=0) as stored:
        assert best.descriptor.size < stored.descriptor.size
        assert best.diff_id == stored.diff_id
    with pytest.raises(InvalidInput, match="level 10"):
        pack_tree(tree, level=10)


def test_a_deadline_ends_packing(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded):
        pack_tree(build(tmp_path / "tree"), deadline=Deadline.after(0))


def test_a_spool_that_does_not_fit_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = build(tmp_path / "tree")

    class Full(io.BytesIO):
        def write(self, data: object, /) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda prefix: Full())
    with pytest.raises(UnpackableSource, match="No space left") as caught:
        pack_tree(tree)
    assert "TMPDIR" in caught.value.next_step


def test_numbers_beyond_ustar_travel_in_pax_records() -> None:
    """A 100 GB model needs no file of that size here: the header alone is read back."""
    entry = Entry(b"big", "file", 0o644, 9 << 30, b"", 1 << 34, 1 << 22, 1 << 23)
    member = tarfile.TarInfo.frombuf(header(entry)[-512:], "utf-8", "strict")
    assert member.size == 0
    with tarfile.open(fileobj=io.BytesIO(header(entry) + bytes(1024))) as archive:
        read = archive.next()
    assert read is not None
    assert (read.size, read.mtime, read.uid, read.gid) == (9 << 30, 1 << 34, 1 << 22, 1 << 23)


@pytest.mark.parametrize("length", [90, 99, 100, 101, 109, 980, 989, 990, 991, 992, 999, 1000, 4000])
def test_pax_lengths_count_themselves(length: int) -> None:
    name = b"d/" * (length // 2) + b"n" * (length % 2 + 1)
    blob = header(Entry(name, "symlink", 0o777, 0, name)) + bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        read = archive.next()
    assert read is not None
    assert (read.name.encode(), read.linkname.encode()) == (name, name)
