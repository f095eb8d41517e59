"""The directory itself: what others read, what is refused, what a crash left."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.conformance.content_store import blob
from tests.unit.store.test_images import put_image
from unlade.errors import StoreError
from unlade.model import Digest
from unlade.store import DirStore, ImageRecord
from unlade.store.database import StoreIsNewer
from unlade.store.layout import NotAStore

REF = "registry.test/team/app:v1"


def test_it_is_an_image_layout(tmp_path: Path) -> None:
    with DirStore(tmp_path / "new" / "store") as store:
        store.put(blob(b"data"), b"data")
        assert json.loads((store.path / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
        assert (store.path / "blobs" / "sha256" / Digest.of(b"data").hex).read_bytes() == b"data"
        assert json.loads((store.path / "index.json").read_bytes())["manifests"] == []


def test_trees_are_closed_to_others(tmp_path: Path) -> None:
    """Layers may hold set-id files and private content."""
    with DirStore(tmp_path / "store") as store:
        assert stat.S_IMODE(os.stat(store.layout.private).st_mode) == 0o700


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotAStore):
        DirStore(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_layout_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "oci-layout").write_text('{"imageLayoutVersion": "9"}')
    with pytest.raises(NotAStore):
        DirStore(tmp_path)


def test_a_store_of_the_future_is_refused(tmp_path: Path) -> None:
    with DirStore(tmp_path / "store") as store, store.database.write() as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StoreIsNewer):
        DirStore(tmp_path / "store")


def test_a_path_that_cannot_be_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        DirStore(tmp_path / "file" / "store")


def test_a_damaged_database_is_said_so(tmp_path: Path) -> None:
    with DirStore(tmp_path / "store") as store:
        pass
    store.layout.database.write_bytes(b"not a database, but long enough to be taken for one" * 10)
    with pytest.raises(StoreError, match="database"):
        DirStore(tmp_path / "store")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = DirStore(tmp_path / "store")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.stat(Digest.of(b"data"))


def test_what_dead_processes_staged_is_thrown_away_at_open(tmp_path: Path) -> None:
    with DirStore(tmp_path / "store") as store:
        for key in (Digest.of(b"dead"), Digest.of(b"living")):
            (store.layout.staged(key) / "root").mkdir(parents=True)
        (store.layout.staging / "stray").mkdir()
        (store.layout.trash / "left").mkdir()
        living = f"tree-{store.layout.staged(Digest.of(b'living')).name}"
        with store.locks.hold(living), DirStore(store.path):
            assert os.listdir(store.layout.staging) == [store.layout.staged(Digest.of(b"living")).name]
            assert os.listdir(store.layout.trash) == []


@pytest.mark.skipif(not shutil.which("skopeo"), reason="skopeo is not installed")
def test_skopeo_reads_it(tmp_path: Path) -> None:
    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}
    )
    with DirStore(tmp_path / "store") as store:
        one = put_image(store, config=config.encode())
        two = put_image(store, config=config.replace("amd64", "arm64").encode())
        store.images.put(ImageRecord(REF, "", one, content=True))
        store.images.put(ImageRecord("registry.test/other@sha256:" + "0" * 64, "", two, content=True))
        for reference, manifest in ((REF, one), ("registry.test/other@sha256:" + "0" * 64, two)):
            inspected = subprocess.run(
                ["skopeo", "inspect", "--override-arch=amd64", f"oci:{store.path}:{reference}"],
                capture_output=True,
                check=True,
            )
            assert json.loads(inspected.stdout)["Digest"] == str(manifest.digest)
        subprocess.run(
            ["skopeo", "copy", "-q", f"oci:{store.path}:{REF}", f"dir:{tmp_path}/copy"], check=True
        )
        assert Digest.of((tmp_path / "copy" / "manifest.json").read_bytes()) == one.digest
