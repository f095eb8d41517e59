"""Commands against the fake registry: what they print, what they change, what a dry run does not."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.registry import FakeRegistry
from unlade.cli.root import main
from unlade.model import Digest, mediatypes


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry() as running:
        monkeypatch.setenv("UNLADE_PLAIN_HTTP", running.host)
        monkeypatch.setenv("UNLADE_STORE", str(tmp_path / "store"))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
        monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
        yield running


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file").write_text("content\n")
    (root / "top").write_text("top\n")
    return root


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def data(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run the program in this process; its code and output."""

    def call(*arguments: object, expect: int = 0) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert ended.value.code == expect, err
        return Result(expect, out, err)

    return call


def test_push_prints_what_to_pin(fake: FakeRegistry, tree: Path, run: Any) -> None:
    name = f"{fake.host}/a/b"
    pushed = run("push", tree, f"{name}:v1")
    digest = fake.repository("a/b").tags["v1"]
    assert pushed.out == f"{name}@{digest}\n"
    data = run("push", "-o", "json", "-q", tree, f"{name}:v2").data
    assert (data["name"], data["digest"], data["blobsSent"]) == (f"{name}@{digest}", digest, 0)
    dry = run("push", "--dry-run", tree, f"{name}:v3")
    assert dry.out == pushed.out
    assert "nothing was sent" in dry.err
    assert set(fake.repository("a/b").tags) == {"v1", "v2"}


def test_push_options(fake: FakeRegistry, tree: Path, run: Any) -> None:
    name = f"{fake.host}/a/b:v1"
    run("push", "--annotation", "k=v=w", "--artifact-type", "application/x", "--level", "9", tree, name)
    manifest = json.loads(fake.repository("a/b").manifests[fake.repository("a/b").tags["v1"]][1])
    assert (manifest["annotations"], manifest["artifactType"]) == ({"k": "v=w"}, "application/x")
    assert "not KEY=VALUE" in run("push", "--annotation", "novalue", tree, name, expect=2).err
    assert "level 99" in run("push", "--level", "99", tree, name, expect=3).err
    assert "next: " in run("push", tree / "missing", name, expect=3).err


def test_pull_into_the_store_and_look_at_it(fake: FakeRegistry, tree: Path, run: Any) -> None:
    name = f"{fake.host}/a/b:v1"
    pinned = run("push", "--image", tree, name).out
    assert run("pull", "--dry-run", name).out == pinned
    assert run("images", "-o", "json").data["images"] == []
    assert run("pull", name).out == pinned
    [record] = run("images", "-o", "json").data["images"]
    assert (record["reference"], record["blobs"], record["tree"]) == (name, True, None)
    assert record["ownBytes"] > 0
    again = run("pull", name)
    assert again.out == pinned
    assert "already there" in again.err
    table = run("images").out.splitlines()
    assert table[0].split()[:2] == ["REFERENCE", "HANDLER"]
    assert table[1].split()[0] == name
    assert run("fsck").out == ""
    assert run("gc", "-o", "json").data["blobs"] == 0


def test_pull_follows_a_tag_that_moved(fake: FakeRegistry, tree: Path, run: Any) -> None:
    name = f"{fake.host}/a/b:v1"
    run("push", "--image", tree, name)
    before = run("pull", name).out
    (tree / "more").write_text("more")
    run("push", "--image", tree, name)
    after = run("pull", name).out
    assert after != before
    [record] = run("images", "-o", "json").data["images"]
    assert after.strip().endswith(record["digest"])
    assert run("gc", "-o", "json").data["blobs"] > 0


def test_tuples_of_reference_and_handler(fake: FakeRegistry, tree: Path, run: Any) -> None:
    """R4, R7: one handler's record goes, the others stay, and shared bytes are counted once."""
    name = f"{fake.host}/a/b:v1"
    run("push", "--image", tree, name)
    for handler in ("", "kata", "gvisor"):
        run("pull", *(("--runtime-handler", handler) if handler else ()), name)
    shown = run("images", "-o", "json").data
    assert [one["handler"] for one in shown["images"]] == ["", "gvisor", "kata"]
    assert all(one["ownBytes"] == 0 for one in shown["images"])
    assert shown["totalBytes"] == shown["images"][0]["sharedBytes"]
    assert len(run("images", "--runtime-handler", "kata", "-o", "json").data["images"]) == 1
    assert run("rmi", "--dry-run", "--runtime-handler", "kata", name).out == f"{name} (kata)\n"
    assert len(run("images", "-o", "json").data["images"]) == 3
    run("rmi", "--runtime-handler", "kata", name)
    left = run("images", "-o", "json").data
    assert [one["handler"] for one in left["images"]] == ["", "gvisor"]
    assert left["totalBytes"] == shown["totalBytes"]
    assert "is not in the store" in run("rmi", "--runtime-handler", "kata", name, expect=9).err
    digest = left["images"][0]["digest"]
    run("rmi", digest)
    gone = run("images", "-o", "json").data
    assert (gone["images"], gone["totalBytes"]) == ([], 0)


def test_pull_into_a_directory(fake: FakeRegistry, tree: Path, run: Any, tmp_path: Path) -> None:
    name = f"{fake.host}/a/b:v1"
    run("push", tree, name)
    data = run("pull", "-o", "json", name, tmp_path / "out").data
    assert data["references"][0]["reference"] == name
    assert (data["family"], data["path"], data["cached"]) == ("oras", str(tmp_path / "out"), False)
    assert (tmp_path / "out" / "sub" / "file").read_text() == "content\n"
    assert not (tmp_path / "store").exists()
    in_use = run("pull", name, tmp_path / "out", expect=3)
    assert "--replace" in in_use.err
    run("pull", "--sub-path", "sub", name, tmp_path / "part")
    assert os.listdir(tmp_path / "part") == ["file"]
    run("pull", "--only", "sub/*", name, tmp_path / "only")
    assert sorted(os.listdir(tmp_path / "only")) == ["sub"]
    run("pull", "--dry-run", name, tmp_path / "dry")
    assert not (tmp_path / "dry").exists()
    assert "need a directory" in run("pull", "--replace", name, expect=2).err


def test_pull_into_a_directory_and_keep_the_blobs(
    fake: FakeRegistry, tree: Path, run: Any, tmp_path: Path
) -> None:
    name = f"{fake.host}/a/b:v1"
    pinned = run("push", "--image", tree, name).out
    fake.clear_log()
    assert run("pull", "--keep-blobs", name, tmp_path / "out").out == pinned
    assert (tmp_path / "out" / "top").read_text() == "top\n"
    assert len(fake.seen("GET", "/blobs/")) == 2  # config and layer, once each
    [record] = run("images", "-o", "json").data["images"]
    assert (record["reference"], record["blobs"]) == (name, True)


def test_pull_as_a_tar(fake: FakeRegistry, tree: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{fake.host}/a/b:v1"
    run("push", tree, name)

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    with pytest.raises(SystemExit) as ended:
        main(["pull", name, "-"])
    assert ended.value.code == 0
    with tarfile.open(fileobj=io.BytesIO(raw.getvalue())) as archive:
        assert archive.getnames() == ["sub", "sub/file", "top"]


def test_plan_says_what_and_why(fake: FakeRegistry, run: Any) -> None:
    layers = [
        fake.put_blob(
            "m/m", b"w" * 5000, "application/x-weights", {mediatypes.ANNOTATION_TITLE: "weights.bin"}
        ),
        fake.put_blob("m/m", b"free", "text/plain", {mediatypes.ANNOTATION_TITLE: "docs/LICENSE"}),
    ]
    fake.put_artifact("m/m", "v1", layers, "application/vnd.example")
    fake.clear_log()
    shown = run("plan", f"{fake.host}/m/m:v1")
    lines = shown.out.splitlines()
    assert lines[0].split() == ["PATH", "SIZE", "LAYER", "RULE"]
    assert lines[1].split()[:3] == ["docs/LICENSE", "4", "B"]
    assert lines[2].split()[:3] == ["weights.bin", "4.9", "KiB"]
    assert "title" in lines[1]
    assert not fake.seen("GET", "/blobs/")
    data = run("plan", "-o", "json", f"{fake.host}/m/m:v1").data
    assert [(row["path"], row["size"]) for row in data["files"]] == [
        ("docs/LICENSE", 4),
        ("weights.bin", 5000),
    ]
    assert data["fetchBytes"] == 5004


def test_plan_looks_into_archives(fake: FakeRegistry, tree: Path, run: Any) -> None:
    name = f"{fake.host}/a/b:v1"
    run("push", tree, name)
    rows = run("plan", "-o", "json", name).data["files"]
    assert [(row["path"], row["size"]) for row in rows] == [("sub/file", 8), ("top", 4)]
    closed = run("plan", "--files", "never", "-o", "json", name).data["files"]
    assert [(row["path"], row["size"]) for row in closed] == [("./", None)]


def test_nothing_to_make_is_an_error(fake: FakeRegistry, run: Any, tmp_path: Path) -> None:
    """V14: the error lists what is there."""
    layer = fake.put_blob("n/n", b'{"critical":{}}', "application/vnd.dev.cosign.simplesigning.v1+json")
    fake.put_artifact("n/n", "v1", [layer], "application/vnd.dev.cosign.artifact.sig.v1+json")
    for arguments in (("plan",), ("pull",)):
        where = [tmp_path / "out"] if arguments == ("pull",) else []
        failed = run(*arguments, f"{fake.host}/n/n:v1", *where, expect=3)
        assert "simplesigning" in failed.err
    assert not (tmp_path / "out").exists()


def test_inspect(fake: FakeRegistry, tree: Path, run: Any) -> None:
    name = f"{fake.host}/a/b:v1"
    run("push", "--image", tree, name)
    data = run("inspect", "-o", "json", name).data
    assert data["digest"] == fake.repository("a/b").tags["v1"]
    assert data["manifest"]["schemaVersion"] == 2
    kinds = [line.split()[0] for line in run("inspect", name).out.splitlines()]
    assert kinds == ["KIND", "manifest", "config", "layer"]
    raw = run("inspect", "--raw", name).out
    assert str(Digest.of(raw.encode())) == data["digest"]
    assert json.loads(run("inspect", "--config", name).out)["rootfs"]["type"] == "layers"
    assert run("inspect", "--tags", "-o", "json", name).data["tags"] == ["v1"]
    missing = run("inspect", f"{fake.host}/a/b:none", expect=6)
    assert f"{fake.host}/a/b:none" in missing.err


def test_inspect_an_index(fake: FakeRegistry, run: Any) -> None:
    child = fake.put_image("i/i", None, [fake.put_blob("i/i", b"x")])
    entry = child.to_json() | {"platform": {"os": "linux", "architecture": "arm64"}}
    fake.put_manifest(
        "i/i", "v1", {"schemaVersion": 2, "mediaType": mediatypes.OCI_INDEX, "manifests": [entry]}
    )
    name = f"{fake.host}/i/i:v1"
    assert "linux/arm64" in run("inspect", name).out
    assert run("inspect", "--platform", "linux/arm64", "-o", "json", name).data["digest"] == str(child.digest)
    assert "--platform" in run("inspect", "--config", name, expect=2).err
    assert "linux/arm64" in run("inspect", "--platform", "linux/s390x", name, expect=3).err


def test_copy(fake: FakeRegistry, tree: Path, run: Any, tmp_path: Path) -> None:
    name = f"{fake.host}/a/b:v1"
    digest = run("push", tree, name).out.strip().rpartition("@")[2]
    assert run("copy", name, f"{fake.host}/c/d").out == f"{fake.host}/c/d@{digest}\n"
    data = run("copy", "-o", "json", name, f"oci:{tmp_path / 'layout'}:x").data
    assert (data["digest"], data["blobsSent"]) == (digest, 2)
    back = run("copy", f"oci:{tmp_path / 'layout'}:x", f"oci://{fake.host}/e/f:v9").out
    assert back == f"{fake.host}/e/f@{digest}\n"
    assert fake.repository("e/f").tags == {"v9": digest}


def test_login_and_logout(
    fake: FakeRegistry, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.users = {"me": "secret"}
    for given, code in (("wrong", 5), ("secret", 0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(given + "\n"))
        run("login", "-u", "me", "--password-stdin", f"https://{fake.host}/", expect=code)
    stored = json.loads((tmp_path / "docker" / "config.json").read_text())
    assert list(stored["auths"]) == [fake.host]
    assert "tags" in run("inspect", "--tags", f"{fake.host}/a/b", expect=6).err
    assert "logged out" in run("logout", fake.host).out
    assert "not logged in" in run("logout", fake.host).out
    run("inspect", f"{fake.host}/a/b", expect=5)
    run("inspect", "--creds", "me:secret", f"{fake.host}/a/b", expect=6)
    assert "USER:PASSWORD" in run("inspect", "--creds", "me", f"{fake.host}/a/b", expect=3).err
    assert "--username" in run("login", "--password-stdin", fake.host, expect=2).err


def test_time_runs_out(fake: FakeRegistry, run: Any, tmp_path: Path) -> None:
    from tests.fakes.httpd import Response

    fake.fault(lambda request: Response(200, delay=3.0))
    failed = run("pull", "--timeout", "0.2", f"{fake.host}/a/b:v1", tmp_path / "out", expect=12)
    assert "--timeout" in failed.err


def test_fsck_finds_rot(fake: FakeRegistry, tree: Path, run: Any, tmp_path: Path) -> None:
    name = f"{fake.host}/a/b:v1"
    run("push", "--image", tree, name)
    run("pull", name)
    layer = next(
        path
        for path in (tmp_path / "store" / "blobs" / "sha256").iterdir()
        if path.read_bytes()[:2] == b"\x1f\x8b"
    )
    layer.chmod(0o644)
    layer.write_bytes(layer.read_bytes()[:-1] + b"!")
    found = run("fsck", expect=1)
    assert layer.name[:12] in found.out
    assert run("fsck", "--repair", "-o", "json", expect=1).data["problems"][0]["repaired"] is True
    run("fsck")


def test_unmount_only_takes_away_what_we_mounted(fake: FakeRegistry, run: Any, tmp_path: Path) -> None:
    assert "umount" in run("unmount", tmp_path, expect=10).err


def test_short_names_mean_what_they_mean_to_docker(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def connect(settings: object, named: frozenset[str]) -> object:
        asked.append(named)
        raise KeyboardInterrupt

    monkeypatch.setattr("unlade.cli.connect.connect", connect)
    run("inspect", "alpine", expect=130)
    assert asked == [frozenset({"docker.io"})]
