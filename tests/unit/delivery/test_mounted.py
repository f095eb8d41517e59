"""Trees and mounts: layers shared between images, 120 of them, and nothing mounted is ever collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.unit.delivery.conftest import PutImage
from unlade.delivery import AsTree, Delivered, Engine, Mounted, Request
from unlade.model import Deadline
from unlade.mount import MountOptions, find, unmount
from unlade.store import DirStore
from unlade.tree.checking import fsck

pytestmark = pytest.mark.root


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "target"
    path.mkdir()
    yield path
    while find(os.fsencode(path)):
        unmount(str(path), lazy=True)


def mounted(fake: FakeRegistry, name: str, target: Path, **options: object) -> Request:
    return Request(
        references=(fake.reference(name, "v1"),),
        destination=Mounted(str(target)),
        **options,  # type: ignore[arg-type]
    )


def test_whiteouts_opaques_and_replaced_links(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, target: Path
) -> None:
    put_image(
        "img",
        "v1",
        {"a/": None, "a/gone": b"1", "a/kept": b"2", "o/": None, "o/old": b"3", "f/": None, "f/x": b"4"},
        {"a/.wh.gone": b"", "o/": None, "o/.wh..wh..opq": b"", "o/new": b"5", ".wh.f": b""},
        {"f": b"now a file"},
    )
    engine.deliver(mounted(fake, "img", target))
    assert sorted(os.listdir(target / "a")) == ["kept"]
    assert sorted(os.listdir(target / "o")) == ["new"]
    assert (target / "f").read_bytes() == b"now a file"
    entry = find(os.fsencode(target))
    assert entry is not None
    assert {"ro", "nosuid", "nodev", "noexec"} <= entry.options


def test_120_layers(engine: Engine, fake: FakeRegistry, put_image: PutImage, target: Path) -> None:
    put_image("img", "v1", *[{f"f{n}": str(n).encode(), "top": str(n).encode()} for n in range(120)])
    engine.deliver(mounted(fake, "img", target))
    assert len(os.listdir(target)) == 121
    assert (target / "top").read_bytes() == b"119"


def test_only_the_changed_layer_is_fetched(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, target: Path, tmp_path: Path
) -> None:
    layers = [{f"f{n}": os.urandom(1000)} for n in range(10)]
    put_image("one", "v1", *layers)
    engine.deliver(mounted(fake, "one", target))
    put_image("two", "v1", *layers[:4], {"f4": b"changed"}, *layers[5:])
    fake.clear_log()
    second = tmp_path / "second"
    second.mkdir()
    try:
        engine.deliver(mounted(fake, "two", second))
        assert (second / "f4").read_bytes() == b"changed"
        fetched = {request.path for request in fake.seen("GET", "/blobs/")}
        assert len(fetched) == 2, "the config and one layer"
    finally:
        unmount(str(second))


def test_a_layer_without_directory_entries_takes_those_below(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, target: Path
) -> None:
    put_image("img", "v1", {"d/": None, "d/a": b"1"}, {"d/b": b"2"}, {"d/c": b"3"})
    engine.deliver(mounted(fake, "img", target))
    assert sorted(os.listdir(target / "d")) == ["a", "b", "c"]


def test_the_same_leaning_layers_in_another_order_at_once(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, store: DirStore
) -> None:
    layers = [{f"d/{n}": os.urandom(200_000), f"e/{n}": b"x"} for n in range(6)]
    for name, order in (("one", layers), ("two", layers[::-1]), ("three", layers[3:] + layers[:3])):
        put_image(name, "v1", *order)
    deadline = Deadline.after(60)

    def one(name: str) -> Delivered:
        request = Request(references=(fake.reference(name, "v1"),), destination=AsTree())
        return engine.deliver(request, deadline=deadline)

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(one, ["one", "two", "three"] * 2))
    assert len({delivered.tree for delivered in done}) == 3
    assert fsck(store) == []


def test_an_artifact_is_bound_and_a_file_can_be_a_sub_path(
    engine: Engine, fake: FakeRegistry, put_files: PutImage, target: Path, tmp_path: Path
) -> None:
    put_files("model", "v1", {"a/weights": b"w", "config": b"c"})
    engine.deliver(mounted(fake, "model", target))
    assert (target / "a" / "weights").read_bytes() == b"w"
    file = tmp_path / "file"
    file.touch()
    try:
        engine.deliver(mounted(fake, "model", file, sub_path="a/weights"))
        assert file.read_bytes() == b"w"
    finally:
        unmount(str(file))


def test_exec_when_asked(engine: Engine, fake: FakeRegistry, put_files: PutImage, target: Path) -> None:
    put_files("tool", "v1", {"run": b"#!/bin/sh\n"})
    engine.deliver(
        Request(
            references=(fake.reference("tool", "v1"),),
            destination=Mounted(str(target), MountOptions(executable=True)),
        )
    )
    entry = find(os.fsencode(target))
    assert entry is not None
    assert "noexec" not in entry.options


def test_a_second_delivery_is_warm(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, target: Path, tmp_path: Path
) -> None:
    put_image("img", "v1", {"f": b"1"})
    assert not engine.deliver(mounted(fake, "img", target)).cached
    fake.clear_log()
    again = tmp_path / "again"
    again.mkdir()
    try:
        assert engine.deliver(mounted(fake, "img", again)).cached
        assert fake.seen() == []
    finally:
        unmount(str(again))


def test_a_failed_mount_leaves_no_record(
    engine: Engine, fake: FakeRegistry, put_files: PutImage, store: DirStore, tmp_path: Path
) -> None:
    put_files("model", "v1", {"f": b"1"})
    with pytest.raises(Exception, match="does not exist"):
        engine.deliver(mounted(fake, "model", tmp_path / "missing"))
    assert store.mounts.all() == []
