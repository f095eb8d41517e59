"""The names inside archives (V16): as a delivery would lay them, without writing anything."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from unlade.delivery import AsTree, Directory, Engine, Request
from unlade.delivery.contents import expand
from unlade.errors import IntegrityError, UnladeError
from unlade.model import Deadline, Digest, Reference, mediatypes
from unlade.planning import FileRow
from unlade.registry import Registry, RegistryConfig


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as running:
        yield running


@pytest.fixture
def client(fake: FakeRegistry) -> Iterator[Registry]:
    with Registry(RegistryConfig(plain_http=frozenset({fake.host}))) as registry:
        yield registry


def layer(*entries: str, compress: bool = True) -> bytes:
    """A tar: `name` is a file with its name as content, `name/` a directory, `name -> target` a link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for entry in entries:
            name, _, target = entry.partition(" -> ")
            info = tarfile.TarInfo(name.rstrip("/"))
            if entry.endswith("/"):
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            elif target:
                info.type, info.linkname = tarfile.SYMTYPE, target
                archive.addfile(info)
            else:
                data = name.encode()
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return gzip.compress(out.getvalue(), mtime=0) if compress else out.getvalue()


def image(fake: FakeRegistry, name: str, *layers: bytes) -> Reference:
    import json

    blobs = [fake.put_blob(name, data) for data in layers]
    diffs = [str(Digest.of(gzip.decompress(data))) for data in layers]
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diffs}}
    fake.put_image(name, "v1", blobs, json.dumps(config).encode())
    return fake.reference(name, "v1")


def listed(
    client: Registry, *references: Reference, budget: int | None = None, only: tuple[str, ...] = ()
) -> list[FileRow]:
    with Engine(client) as engine:
        request = Request(references=references, destination=AsTree(), pull="always", only=only)
        plan, found = engine.plan(request)
    where = [one.reference for one in found]
    return expand(plan, where, client, budget=budget, deadline=Deadline.never())[0]


def delivered(client: Registry, path: Path, *references: Reference, only: tuple[str, ...] = ()) -> list[str]:
    with Engine(client) as engine:
        request = Request(references=references, destination=Directory(str(path)), pull="always", only=only)
        engine.deliver(request)
    found = [
        os.path.relpath(os.path.join(directory, name), path)
        for directory, directories, files in os.walk(path)
        for name in files + [one for one in directories if os.path.islink(os.path.join(directory, one))]
    ]
    return sorted(found, key=lambda name: name.split("/"))


CASES = {
    "whiteouts": (
        layer("a/", "a/gone", "a/stays", "top", "dir/deep/x"),
        layer("a/.wh.gone", "a/new", ".wh.dir", "over"),
    ),
    "opaque": (layer("d/", "d/old", "d/sub/older", "e"), layer("d/", "d/.wh..wh..opq", "d/new")),
    "opaque after its siblings": (layer("d/old"), layer("d/new", "d/.wh..wh..opq")),
    "file to directory and back": (layer("x", "y/z"), layer("x/", "x/inside", "y")),
    "overwritten": (layer("same", "other"), layer("same"), layer("same", ".wh.other")),
    "links": (layer("target", "link -> target", "d/up -> ../target"), layer("target")),
    "dots": (layer("./a", "./b/", "./b/c"),),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_list_is_what_a_delivery_gives(
    fake: FakeRegistry, client: Registry, tmp_path: Path, case: str
) -> None:
    reference = image(fake, "i/i", *CASES[case])
    rows = listed(client, reference)
    assert [row.path for row in rows] == delivered(client, tmp_path / "out", reference)
    for row in rows:
        path = tmp_path / "out" / row.path
        assert row.size == (0 if path.is_symlink() else path.stat().st_size)


def test_each_path_names_the_layer_that_gave_it(fake: FakeRegistry, client: Registry) -> None:
    first, second = layer("a", "b"), layer("b", "c")
    rows = {row.path: row for row in listed(client, image(fake, "i/i", first, second))}
    given = {path: row.layer for path, row in rows.items()}
    assert given == {"a": Digest.of(first), "b": Digest.of(second), "c": Digest.of(second)}
    assert rows["a"].reference == str(fake.reference("i/i", "v1"))


def test_merged_references_and_a_subset(fake: FakeRegistry, client: Registry, tmp_path: Path) -> None:
    """V17: whiteouts of one reference do not hide another's files."""
    one = image(fake, "one/x", layer("a/1", "b"), layer("a/2"))
    two = image(fake, "two/x", layer("a/3", ".wh.b", "c"))
    assert [row.path for row in listed(client, one, two)] == delivered(client, tmp_path / "out", one, two)
    rows = listed(client, one, two, only=("a",))
    assert [row.path for row in rows] == delivered(client, tmp_path / "part", one, two, only=("a",))


def test_artifacts(fake: FakeRegistry, client: Registry, tmp_path: Path) -> None:
    """Whiteout names are plain data there; titled files stand beside what archives hold."""
    title = mediatypes.ANNOTATION_TITLE
    blobs = [
        fake.put_blob(
            "a/a",
            layer("pack/x", "pack/.wh.y"),
            annotations={title: "pack", "io.deis.oras.content.unpack": "true"},
        ),
        fake.put_blob("a/a", b"12345", "text/plain", {title: "pack/file"}),
    ]
    fake.put_artifact("a/a", "v1", blobs, "application/x")
    reference = fake.reference("a/a", "v1")
    rows = listed(client, reference)
    assert [(row.path, row.size) for row in rows] == [("pack/.wh.y", 10), ("pack/file", 5), ("pack/x", 6)]
    assert [row.path for row in rows] == delivered(client, tmp_path / "out", reference)


def test_a_budget_leaves_large_archives_closed(fake: FakeRegistry, client: Registry) -> None:
    small, large = layer("small"), layer(*(f"f{n}" for n in range(2000)))
    reference = image(fake, "i/i", small, large)
    fake.clear_log()
    rows = listed(client, reference, budget=len(small))
    assert [(row.path, row.size) for row in rows] == [("small", 5), ("./", None)]
    assert not fake.seen("GET", str(Digest.of(large)))


def test_wrong_bytes_are_noticed(fake: FakeRegistry, client: Registry) -> None:
    reference = image(fake, "i/i", layer("a"))
    fake.repository("i/i").blobs[str(Digest.of(layer("a")))] = layer("b")
    with pytest.raises(IntegrityError):
        listed(client, reference)


def test_too_many_names(fake: FakeRegistry, client: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unlade.delivery.contents._MAX_NAMES", 10)
    reference = image(fake, "i/i", layer(*(f"f{n}" for n in range(6))), layer(*(f"g{n}" for n in range(6))))
    with pytest.raises(UnladeError, match="10 names"):
        listed(client, reference)
