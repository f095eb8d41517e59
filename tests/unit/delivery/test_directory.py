"""A directory of the caller's own: whole, verified, by one rename, or not at all."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.unit.delivery.conftest import ARTIFACT, PutImage, tar
from unlade.delivery import DestinationInUse, Directory, Engine, Request, TarStream
from unlade.errors import IntegrityError, InvalidInput, NothingProduced, UnladeError
from unlade.model import Deadline, Digest, Reference
from unlade.model.mediatypes import ANNOTATION_TITLE
from unlade.registry import Registry
from unlade.transfer import ProgressEvent


def tree(path: Path) -> dict[str, bytes | None]:
    return {
        str(entry.relative_to(path)): None if entry.is_dir() else entry.read_bytes()
        for entry in sorted(path.rglob("*"))
    }


def leftovers(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if ".unlade-" in entry.name]


def request(path: Path, *refs: Reference, replace: bool = False, **options: object) -> Request:
    return Request(references=refs, destination=Directory(str(path), replace), **options)  # type: ignore[arg-type]


def test_layers_merge_with_whiteouts(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path
) -> None:
    put_image(
        "img",
        "v1",
        {"a/": None, "a/keep": b"1", "a/gone": b"2", "b/": None, "b/x": b"3"},
        {"a/.wh.gone": b"", "b/.wh..wh..opq": b"", "b/y": b"4"},
    )
    done = engine.deliver(request(tmp_path / "out", fake.reference("img", "v1")))
    assert tree(tmp_path / "out") == {"a": None, "a/keep": b"1", "b": None, "b/y": b"4"}
    assert done.path == str(tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_files_at_their_titles(
    engine: Engine, fake: FakeRegistry, put_files: PutImage, tmp_path: Path
) -> None:
    big = os.urandom(9 << 20)
    put_files("model", "v1", {"config.json": b"{}", "weights/0.bin": big, "empty": b""})
    events: list[ProgressEvent] = []
    done = engine.deliver(request(tmp_path / "out", fake.reference("model", "v1")), progress=events.append)
    assert tree(tmp_path / "out") == {
        "config.json": b"{}",
        "weights": None,
        "weights/0.bin": big,
        "empty": b"",
    }
    assert done.entries == 3
    assert done.size == len(big) + 2
    finished = [event for event in events if event.kind == "done"]
    assert sorted(event.total for event in finished) == [0, 2, len(big)]


def test_several_references_merge_in_order(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, put_files: PutImage, tmp_path: Path
) -> None:
    put_files("base", "v1", {"a": b"base", "keep": b"base"})
    put_image("img", "v1", {"a": b"image", "x": b"1"}, {".wh.x": b"", ".wh.keep": b"", "y": b"2"})
    put_files("top", "v1", {"y": b"top"})
    refs = [fake.reference(name, "v1") for name in ("base", "img", "top")]
    engine.deliver(request(tmp_path / "out", *refs))
    assert tree(tmp_path / "out") == {"a": b"image", "keep": b"base", "y": b"top"}, (
        "a later reference wins, and no reference's whiteout hides another's file (V17)"
    )


def test_a_subset_of_an_archive_and_of_files(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path
) -> None:
    put_image("img", "v1", {"d/": None, "d/a.txt": b"1", "d/b.bin": b"2", "e/": None, "e/c.bin": b"3"})
    engine.deliver(request(tmp_path / "out", fake.reference("img", "v1"), only=("d/*.txt",)))
    assert tree(tmp_path / "out") == {"d": None, "d/a.txt": b"1"}
    with pytest.raises(NothingProduced):
        engine.deliver(request(tmp_path / "none", fake.reference("img", "v1"), only=("nothing/*",)))
    assert not (tmp_path / "none").exists()


def test_a_sub_path(engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path) -> None:
    put_image("img", "v1", {"d/": None, "d/e/": None, "d/e/f": b"1", "g": b"2"})
    engine.deliver(request(tmp_path / "out", fake.reference("img", "v1"), sub_path="d/e"))
    assert tree(tmp_path / "out") == {"f": b"1"}
    for wrong in ("missing", "g", "../d", "d/../../x", "/etc"):
        with pytest.raises(InvalidInput):
            engine.deliver(request(tmp_path / "bad", fake.reference("img", "v1"), sub_path=wrong))
        assert not (tmp_path / "bad").exists()
    assert leftovers(tmp_path) == []


def test_a_sub_path_through_a_link_is_refused(engine: Engine, fake: FakeRegistry, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("f"))
    fake.put_artifact("pkg", "v1", [fake.put_blob("pkg", gzip.compress(out.getvalue()))], ARTIFACT)
    with pytest.raises(UnladeError):
        engine.deliver(request(tmp_path / "out", fake.reference("pkg", "v1"), sub_path="link"))
    assert not (tmp_path / "out").exists()


def test_an_existing_directory_must_be_empty_or_replaced(
    engine: Engine, fake: FakeRegistry, put_files: PutImage, tmp_path: Path
) -> None:
    put_files("model", "v1", {"new": b"1"})
    ref = fake.reference("model", "v1")
    out = tmp_path / "out"
    out.mkdir()
    engine.deliver(request(out, ref))
    (out / "mine").write_bytes(b"2")
    fake.clear_log()
    with pytest.raises(DestinationInUse) as caught:
        engine.deliver(request(out, ref))
    assert "--replace" in caught.value.next_step
    assert not fake.seen("GET", "/blobs/"), "nothing is downloaded in vain"
    assert tree(out) == {"new": b"1", "mine": b"2"}
    engine.deliver(request(out, ref, replace=True))
    assert tree(out) == {"new": b"1"}
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DestinationInUse):
        engine.deliver(request(tmp_path / "file", ref, replace=True))


def test_the_working_directory_is_filled_in_place(
    engine: Engine, fake: FakeRegistry, put_files: PutImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_files("model", "v1", {"a/b": b"1"})
    here = tmp_path / "here"
    here.mkdir()
    inode = here.stat().st_ino
    monkeypatch.chdir(here)
    engine.deliver(request(Path("."), fake.reference("model", "v1")))
    assert tree(here) == {"a": None, "a/b": b"1"}
    assert here.stat().st_ino == inode
    with pytest.raises(DestinationInUse):
        engine.deliver(request(Path("."), fake.reference("model", "v1"), replace=True))


def test_wrong_bytes_leave_nothing(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path
) -> None:
    put_image("img", "v1", {"f": b"1"})
    blobs = fake.repository("img").blobs
    for digest, data in list(blobs.items()):
        if isinstance(data, bytes) and data.startswith(b"\x1f\x8b"):
            blobs[digest] = gzip.compress(tar({"f": b"2"}), mtime=0)
    with pytest.raises(IntegrityError):
        engine.deliver(request(tmp_path / "out", fake.reference("img", "v1")))
    assert os.listdir(tmp_path) in ([], ["store"])


def test_a_layer_that_is_not_what_the_config_says(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path
) -> None:
    put_image("img", "v1", {"f": b"1"}, diff_ids=[str(Digest.of(b"other"))])
    with pytest.raises(IntegrityError) as caught:
        engine.deliver(request(tmp_path / "out", fake.reference("img", "v1")))
    assert caught.value.code == "diff-mismatch"
    assert not (tmp_path / "out").exists()


def test_an_archive_without_files_is_an_error_not_an_empty_directory(
    engine: Engine, fake: FakeRegistry, tmp_path: Path
) -> None:
    fake.put_artifact("pkg", "v1", [fake.put_blob("pkg", gzip.compress(bytes(10240)))], ARTIFACT)
    with pytest.raises(NothingProduced):
        engine.deliver(request(tmp_path / "out", fake.reference("pkg", "v1")))
    assert not (tmp_path / "out").exists()


def test_an_empty_image_stays_empty(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path
) -> None:
    put_image("img", "v1")
    engine.deliver(request(tmp_path / "out", fake.reference("img", "v1")))
    assert tree(tmp_path / "out") == {}
    assert (tmp_path / "out").is_dir()


def test_a_file_above_an_archive_wins(engine: Engine, fake: FakeRegistry, tmp_path: Path) -> None:
    titled = {ANNOTATION_TITLE: "dir/f"}
    layers = [
        fake.put_blob("pkg", gzip.compress(tar({"dir/": None, "dir/f": b"old", "dir/g": b"g"}))),
        fake.put_blob("pkg", b"new", "application/octet-stream", titled),
    ]
    fake.put_artifact("pkg", "v1", layers, ARTIFACT)
    engine.deliver(request(tmp_path / "out", fake.reference("pkg", "v1")))
    assert tree(tmp_path / "out") == {"dir": None, "dir/f": b"new", "dir/g": b"g"}


def test_a_tar_stream(engine: Engine, fake: FakeRegistry, put_files: PutImage) -> None:
    put_files("model", "v1", {"a/b": b"1", "c": b"2"})
    out = io.BytesIO()
    engine.deliver(Request(references=(fake.reference("model", "v1"),), destination=TarStream(out)))
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        files = {entry.name for entry in archive if entry.isfile()}
    assert {name.removeprefix("./") for name in files} == {"a/b", "c"}


def test_without_a_store(client: Registry, fake: FakeRegistry, put_files: PutImage, tmp_path: Path) -> None:
    put_files("model", "v1", {"f": b"1"})
    with Engine(client) as engine:
        engine.deliver(request(tmp_path / "out", fake.reference("model", "v1")))
    assert tree(tmp_path / "out") == {"f": b"1"}


def test_a_cancelled_delivery_leaves_nothing(
    engine: Engine, fake: FakeRegistry, put_files: PutImage, tmp_path: Path
) -> None:
    put_files("model", "v1", {"f": bytes(20 << 20)})
    deadline = Deadline.never()

    def cancel(event: ProgressEvent) -> None:
        if event.kind == "bytes":
            deadline.cancel()

    with pytest.raises(UnladeError) as caught:
        engine.deliver(
            request(tmp_path / "out", fake.reference("model", "v1")), deadline=deadline, progress=cancel
        )
    assert caught.value.code == "deadline"
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


def test_what_a_killed_delivery_left_is_removed_by_the_next(
    engine: Engine, fake: FakeRegistry, put_files: PutImage, tmp_path: Path
) -> None:
    put_files("model", "v1", {"f": b"1"})
    script = (
        "import sys; from unlade.delivery.owndir import staged_beside\n"
        "import os, signal\n"
        "with staged_beside(sys.argv[1], replace=False): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert len(leftovers(tmp_path)) == 1
    engine.deliver(request(tmp_path / "out", fake.reference("model", "v1")))
    assert leftovers(tmp_path) == []
    subprocess.run(
        [sys.executable, "-c", script.replace("False", "True"), str(tmp_path / "out")], check=False
    )
    assert len(leftovers(tmp_path)) == 1
    with pytest.raises(DestinationInUse):
        engine.deliver(request(tmp_path / "out", fake.reference("model", "v1")))
    assert leftovers(tmp_path) == [], "also by one that is refused"


def test_two_deliveries_to_one_place(
    engine: Engine, fake: FakeRegistry, put_files: PutImage, tmp_path: Path
) -> None:
    put_files("model", "v1", {"f": bytes(5 << 20)})
    errors: list[UnladeError] = []

    def one() -> None:
        try:
            engine.deliver(request(tmp_path / "out", fake.reference("model", "v1")))
        except DestinationInUse as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert tree(tmp_path / "out") == {"f": bytes(5 << 20)}
    assert leftovers(tmp_path) == []
