"""Packages as images: other tools read them, digests are stable, copies move only what is missing (P4-P8)."""

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.interop.packages import kpt
from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry
from unlade.packages.fetching import get, pull
from unlade.packages.kptfile import Kptfile, OciUpstream
from unlade.packages.location import LocalDirectory, parse_oci
from unlade.packages.publishing import TagExists, copy, push
from unlade.packages.sources import Sources
from unlade.packages.update import update
from unlade.registry import NotFound

KPTFILE = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: {name}\n"
CONFIG = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: c\ndata:\n  k: {value}\n"


def package(directory: Path, value: str = "1", **files: str) -> Path:
    content = {
        "Kptfile": KPTFILE.format(name="p"),
        "config.yaml": CONFIG.format(value=value),
        "sub/Kptfile": KPTFILE.format(name="sub"),
        "sub/config.yaml": CONFIG.format(value=value),
        "run.sh": "#!/bin/sh\n",
    }
    kpt.write(directory, content | files)
    (directory / "run.sh").chmod(0o755)
    return directory


def test_crane_and_tar_give_the_same_tree(
    registry: RealRegistry, peers: Peers, sources: Sources, tmp_path: Path
) -> None:
    package(tmp_path / "p")
    done = push(str(tmp_path / "p"), sources, version="v1", origin=f"oci://{registry.host}/crane-reads")
    manifest = peers.manifest(done.name, "--insecure")
    assert len(manifest["layers"]) == 1
    (tmp_path / "out").mkdir()
    tar = peers.crane("export", "--insecure", done.name, "-")
    subprocess.run(["tar", "-xf", "-", "-C", tmp_path / "out"], input=tar, check=True)
    ours, theirs = kpt.read(tmp_path / "p"), kpt.read(tmp_path / "out")
    assert Kptfile(ours.pop("Kptfile")).origin == f"{registry.host}/crane-reads:v1"
    assert theirs.pop("Kptfile") == KPTFILE.format(name="p")
    assert ours == theirs
    assert os.access(tmp_path / "out" / "run.sh", os.X_OK)
    assert not os.access(tmp_path / "out" / "config.yaml", os.X_OK)


def test_same_tree_same_digest(registry: RealRegistry, sources: Sources, tmp_path: Path) -> None:
    """P6: umask, owner, times and the order of files on disk do not count."""
    digests = set()
    for number, umask in enumerate((0o022, 0o077, 0o002)):
        old = os.umask(umask)
        try:
            names = [f"f{index}.txt" for index in range(20)]
            random.Random(number).shuffle(names)
            directory = package(tmp_path / f"p{number}", **{name: name for name in names})
        finally:
            os.umask(old)
        for path in directory.rglob("*"):
            os.utime(path, (number * 1000, number * 1000))
            if os.geteuid() == 0:
                os.chown(path, 1000 + number, 1000 + number)
        target = parse_oci(f"oci://{registry.host}/same-digest:v{number}")
        digests.add(copy(LocalDirectory(str(directory)), target, sources).name)
    assert len(digests) == 1


def test_push_remembers_and_increments(registry: RealRegistry, sources: Sources, tmp_path: Path) -> None:
    path = package(tmp_path / "p")
    push(str(path), sources, version="v1.9", origin=f"oci://{registry.host}/bump")
    (path / "config.yaml").write_text(CONFIG.format(value="2"))
    done = push(str(path), sources, bump=True)
    assert done.tagged == f"{registry.host}/bump:v1.10"
    assert Kptfile((path / "Kptfile").read_text()).origin == f"{registry.host}/bump:v1.10"
    again = push(str(path), sources)
    assert again.unchanged
    (path / "config.yaml").write_text(CONFIG.format(value="3"))
    before = kpt.read(path)
    with pytest.raises(TagExists):
        push(str(path), sources)
    assert kpt.read(path) == before
    assert push(str(path), sources, force=True).name != done.name


def test_pull_edit_push(registry: RealRegistry, sources: Sources, tmp_path: Path) -> None:
    push(str(package(tmp_path / "p")), sources, version="v1", origin=f"oci://{registry.host}/working")
    pull(parse_oci(f"oci://{registry.host}/working:v1"), str(tmp_path / "copy"), sources)
    files = kpt.read(tmp_path / "copy")
    assert files["config.yaml"] == CONFIG.format(value="1")
    assert Kptfile(files["Kptfile"]).name == "p"
    assert Kptfile(files["Kptfile"]).upstream is None
    (tmp_path / "copy" / "config.yaml").write_text(CONFIG.format(value="2"))
    assert push(str(tmp_path / "copy"), sources, version="v2").tagged == f"{registry.host}/working:v2"


def test_the_base_survives_its_tag_and_its_manifest(
    registry: RealRegistry, sources: Sources, tmp_path: Path
) -> None:
    """P7: moved tag, deleted tag, deleted manifest; the locked base is at hand."""
    origin = f"oci://{registry.host}/moved"
    path = package(tmp_path / "p")
    push(str(path), sources, version="v1", origin=origin)
    got = get(parse_oci(origin + ":v1"), str(tmp_path / "mine"), sources)
    (tmp_path / "mine" / "sub" / "config.yaml").write_text(
        (tmp_path / "mine" / "sub" / "config.yaml").read_text().replace("k: 1", "k: local")
    )
    (path / "config.yaml").write_text(CONFIG.format(value="2"))
    push(str(path), sources, version="v1", force=True)
    push(str(path), sources, version="v2")
    assert isinstance(got.lock, OciUpstream)
    lock = got.lock.reference
    assert lock.digest is not None
    sources.registry.delete_manifest(lock, lock.digest, deadline=sources.deadline)
    with pytest.raises(NotFound):
        sources.registry.resolve(lock, deadline=sources.deadline)
    # A new run: nothing is remembered but what the store holds.
    with Sources(sources.registry, sources._store) as later:
        outcome = update(str(tmp_path / "mine"), later, version="v2")
    assert outcome.conflicts == []
    assert "k: 2" in (tmp_path / "mine" / "config.yaml").read_text()
    assert "k: local" in (tmp_path / "mine" / "sub" / "config.yaml").read_text()


def test_a_directory_inside_an_image(registry: RealRegistry, sources: Sources, tmp_path: Path) -> None:
    """P1, P8: oci://REPO//SUB:TAG, also by digest, and inside another package."""
    origin = f"oci://{registry.host}/with-sub"
    path = package(tmp_path / "p")
    first = push(str(path), sources, version="v1", origin=origin)
    get(parse_oci(origin + ":v1"), str(tmp_path / "app"), sources)
    get(parse_oci(origin + "//sub:v1"), str(tmp_path / "app" / "another"), sources)
    kptfile = Kptfile((tmp_path / "app" / "another" / "Kptfile").read_text())
    assert kptfile.name == "another"
    assert kptfile.upstream == OciUpstream(f"{registry.host}/with-sub:v1", "/sub")
    digest = first.name.rpartition("@")[2]
    got = get(parse_oci(f"{origin}//sub@{digest}"), str(tmp_path / "pinned"), sources)
    assert got.lock == OciUpstream(first.name, "/sub")
    for name in ("config.yaml", "sub/config.yaml"):
        (path / name).write_text(CONFIG.format(value="2"))
    push(str(path), sources, version="v2")
    outcome = update(str(tmp_path / "app"), sources, version="v2")
    assert [package.directory for package in outcome.packages] == ["", "another"]
    for name in ("config.yaml", "sub/config.yaml", "another/config.yaml"):
        assert "k: 2" in (tmp_path / "app" / name).read_text(), name
    again = Kptfile((tmp_path / "app" / "another" / "Kptfile").read_text()).upstream
    assert again == OciUpstream(f"{registry.host}/with-sub:v2", "/sub")


def test_update_to_a_digest(registry: RealRegistry, sources: Sources, tmp_path: Path) -> None:
    origin = f"oci://{registry.host}/by-digest"
    path = package(tmp_path / "p")
    push(str(path), sources, version="v1", origin=origin)
    get(parse_oci(origin + ":v1"), str(tmp_path / "mine"), sources)
    (path / "config.yaml").write_text(CONFIG.format(value="2"))
    second = push(str(path), sources, version="v2")
    digest = second.name.rpartition("@")[2]
    update(str(tmp_path / "mine"), sources, version=digest)
    kptfile = Kptfile((tmp_path / "mine" / "Kptfile").read_text())
    assert kptfile.upstream == OciUpstream(second.name)
    assert kptfile.lock == OciUpstream(second.name)


def test_two_hundred_packages_between_registries(
    registry: RealRegistry, other_registry: RealRegistry, sources: Sources, tmp_path: Path
) -> None:
    """P5: by one client with kept connections, bytes as they are."""
    names = []
    for number in range(200):
        directory = package(tmp_path / f"p{number}", value=str(number))
        target = parse_oci(f"oci://{registry.host}/many/p{number}:v1")
        names.append(copy(LocalDirectory(str(directory)), target, sources).name)
    start = time.monotonic()
    for number, name in enumerate(names):
        done = copy(
            parse_oci(f"oci://{registry.host}/many/p{number}:v1"),
            parse_oci(f"oci://{other_registry.host}/many/p{number}:v1"),
            sources,
        )
        assert done.name.rpartition("@")[2] == name.rpartition("@")[2]
    spent = time.monotonic() - start
    print(f"200 packages copied between registries in {spent:.1f} s")
    again = copy(
        parse_oci(f"oci://{registry.host}/many/p7:v1"),
        parse_oci(f"oci://{other_registry.host}/many/p7:v1"),
        sources,
    )
    assert again.unchanged
    assert again.bytes_sent == 0
