"""Packages made to harm: archives that leave, links, Kptfiles that lie, YAML that explodes (hostile, P).

A registry is not trusted more than its content: every case ends with a typed error, a destination that does
not exist, and an outside that is as it was.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.fakes.tars import Tar, gz
from unlade.errors import UnladeError
from unlade.model import Digest
from unlade.packages.fetching import get, pull
from unlade.packages.kptfile import OciUpstream
from unlade.packages.location import LocalDirectory, parse_oci
from unlade.packages.publishing import copy, publishable
from unlade.packages.resources import merge_file
from unlade.packages.snapshot import NotAPackage
from unlade.packages.sources import Sources
from unlade.packages.update import update
from unlade.packages.yamltext import YamlSyntaxError, parse_documents
from unlade.registry import NoCredentials, Registry, RegistryConfig

KPTFILE = b"apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: p\n"


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as running:
        yield running


@pytest.fixture
def sources(registry: FakeRegistry) -> Iterator[Sources]:
    config = RegistryConfig(plain_http=frozenset({registry.host}))
    with Registry(config, NoCredentials()) as client, Sources(client, None) as made:
        yield made


def publish(registry: FakeRegistry, archive: bytes, tag: str = "v1") -> OciUpstream:
    data = gz(archive)
    layer = registry.put_blob("p", data)
    rootfs = {"type": "layers", "diff_ids": [str(Digest.of(archive))]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs})
    registry.put_image("p", tag, [layer], config.encode())
    return parse_oci(f"oci://{registry.host}/p:{tag}")


def package() -> Tar:
    return Tar().file(b"Kptfile", KPTFILE)


ARCHIVES = {
    "dotdot": package().file(b"../evil", b"x"),
    "dotdot inside": package().file(b"a/../../evil", b"x"),
    "symlink out": package().symlink(b"link", b"/etc/passwd"),
    "symlink in": package().symlink(b"link", b"Kptfile"),
    "symlinked directory": package().symlink(b"dir", b"/tmp").file(b"dir/evil", b"x"),
    "hard link out": package().link(b"hard", b"/etc/passwd"),
    "kptfile is a link": Tar().symlink(b"Kptfile", b"/etc/passwd"),
    "kptfile is a directory": Tar().dir(b"Kptfile").file(b"Kptfile/x", b"x"),
    "fifo": package().entry(b"pipe", kind=b"6"),
    "device": package().entry(b"dev", kind=b"3"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_that_no_package_may_be(
    name: str, registry: FakeRegistry, sources: Sources, tmp_path: Path
) -> None:
    location = publish(registry, bytes(ARCHIVES[name]))
    for fetch in (get, pull):
        with pytest.raises(UnladeError):
            fetch(location, str(tmp_path / "app"), sources)
        assert os.listdir(tmp_path) == [], name


def kptfile(body: str) -> bytes:
    return bytes(Tar().file(b"Kptfile", KPTFILE + body.encode()))


KPTFILES = {
    "not yaml": bytes(Tar().file(b"Kptfile", b"a: [1")),
    "another kind": bytes(Tar().file(b"Kptfile", b"apiVersion: v1\nkind: Secret\n")),
    "empty": bytes(Tar().file(b"Kptfile", b"")),
    "binary": bytes(Tar().file(b"Kptfile", b"\0\xff\xfe")),
    "two documents": bytes(Tar().file(b"Kptfile", KPTFILE + b"---\n" + KPTFILE)),
    "sub-package's upstream leaves": bytes(
        package().file(
            b"s/Kptfile",
            KPTFILE
            + b"upstream:\n  type: oci\n  oci:\n    image: r.example.com/p:v1\n    directory: ../../etc\n",
        )
    ),
    "sub-package's upstream is an option": bytes(
        package().file(
            b"s/Kptfile",
            KPTFILE
            + b"upstream:\n  type: git\n  git:\n    repo: --upload-pack=touch /tmp/evil\n    ref: main\n",
        )
    ),
    "sub-package's upstream runs a command": bytes(
        package().file(
            b"s/Kptfile",
            KPTFILE + b"upstream:\n  type: git\n  git:\n    repo: 'ext::sh -c false'\n    ref: main\n",
        )
    ),
}


@pytest.mark.parametrize("name", KPTFILES)
def test_kptfiles_that_lie(name: str, registry: FakeRegistry, sources: Sources, tmp_path: Path) -> None:
    location = publish(registry, KPTFILES[name])
    with pytest.raises(UnladeError):
        get(location, str(tmp_path / "app"), sources)
    assert os.listdir(tmp_path) == []


def test_a_lock_of_another_repository_is_fetched_from_there_only(
    registry: FakeRegistry, sources: Sources, tmp_path: Path
) -> None:
    """A package that names its own lock: get overwrites both, whatever the Kptfile said."""
    digest = "sha256:" + "0" * 64
    body = "upstream:\n  type: oci\n  oci:\n    image: evil.invalid/p:v9\n"
    body += f"upstreamLock:\n  type: oci\n  oci:\n    image: evil.invalid/p@{digest}\n"
    location = publish(registry, kptfile(body))
    get(location, str(tmp_path / "app"), sources)
    text = (tmp_path / "app" / "Kptfile").read_text()
    assert "evil.invalid" not in text
    assert registry.host in text


def test_a_hostile_update_leaves_the_package_alone(
    registry: FakeRegistry, sources: Sources, tmp_path: Path
) -> None:
    location = publish(registry, bytes(package().file(b"a.yaml", b"kind: A\nmetadata:\n  name: a\n")))
    get(location, str(tmp_path / "app"), sources)
    before = {path.name: path.read_text() for path in (tmp_path / "app").iterdir()}
    for number, archive in enumerate([*ARCHIVES.values(), package().file(b"a.yaml", b"a: [1")]):
        publish(registry, bytes(archive), f"bad{number}")
        with pytest.raises(UnladeError):
            update(str(tmp_path / "app"), sources, version=f"bad{number}")
    assert {path.name: path.read_text() for path in (tmp_path / "app").iterdir()} == before
    assert os.listdir(tmp_path) == ["app"]


def test_what_is_pushed_holds_no_links(tmp_path: Path, sources: Sources, registry: FakeRegistry) -> None:
    (tmp_path / "Kptfile").write_bytes(KPTFILE)
    (tmp_path / "secret").symlink_to("/etc/passwd")
    with pytest.raises(NotAPackage, match="links"):
        publishable(str(tmp_path))
    with pytest.raises(NotAPackage, match="links"):
        copy(LocalDirectory(str(tmp_path)), parse_oci(f"oci://{registry.host}/p:v1"), sources)
    assert registry.repositories == {}


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{', '.join(['*' + chr(97 + level)] * 9)}]\n"
    for level in range(9)
)
EXPLOSIVE = {
    "billion laughs": LAUGHS,
    "deep mapping": "".join(" " * level + "a:\n" for level in range(5000)),
    "deep sequence": "- " * 5000 + "a\n",
    "deep flow": "a: " + "[" * 5000 + "]" * 5000 + "\n",
    "open flow": "a: " + "[" * 50_000 + "\n",
    "open quote": 'a: "' + "x\n  " * 20_000,
    "many keys": "".join(f"k{number}: 1\n" for number in range(50_000)),
    "same key twice": "a: 1\na: 2\n",
    "long line": "a: " + "x" * 5_000_000 + "\n",
    "colons": "a" + ":" * 200_000 + "\n",
    "spaces": " " * 1_000_000 + "\n",
    "hashes": "#" * 1_000_000 + "\n",
    "blanks inside a scalar": "a: b" + " " * 1_000_000 + "c\n",
    "blanks inside a key": "a" + " " * 1_000_000 + "b: c\n",
    "blanks and no colon": "a" + " " * 1_000_000 + "b\n",
    "hashes inside a scalar": "a: b" + "#" * 1_000_000 + "\n",
    "quotes": "a: " + "'" * 1_000_001 + "\n",
    "backslashes": 'a: "' + "\\\\" * 500_000 + '"\n',
    "flow over many lines": "a: [\n" + "  x,\n" * 100_000 + "  ]\n",
    "open flow over many lines": "a: [\n" + "  x,\n" * 100_000,
    "plain over many lines": "a: x\n" + "  y\n" * 50_000,
    "comments": "a: 1\n" + "  # c\n" * 200_000,
    "nested comments": "".join("  " * level + "a:\n" for level in range(90)) + "# c\n" * 50_000,
    "tabs": "\ta: 1\n",
    "too large": "a: 1\n" * 4_000_000,
}


MERGES = {
    "many fields": ("".join(f"k{number}: 1\n" for number in range(8_000)), "k: 1\n"),
    "maybe nulls": ("a: b\n" + "{" * 500_000 + "\n", "a: b\n"),
    "many empty keys": ("".join(f"k{number}:\n\n" for number in range(8_000)), "a: 1\n"),
    "too many ports": (
        "kind: Service\napiVersion: v1\nspec:\n  ports:\n"
        + "".join(f"  - port: {n}\n" for n in range(5_000)),
        "kind: Service\napiVersion: v1\nspec:\n  ports:\n  - port: 1\n",
    ),
    "many ports": (
        "kind: Service\napiVersion: v1\nspec:\n  ports:\n" + "".join(f"  - port: {n}\n" for n in range(500)),
        "kind: Service\napiVersion: v1\nspec:\n  ports:\n  - port: 1\n",
    ),
}


@pytest.mark.parametrize("name", MERGES)
def test_merges_that_explode_end_soon(name: str) -> None:
    start = time.process_time()
    large, small = MERGES[name]
    for sides in ((large, large, large), (large, small, small), (small, small, large), (small, large, large)):
        try:
            merge_file("a.yaml", *sides)
        except UnladeError as error:
            assert str(error)
    assert time.process_time() - start < 60


@pytest.mark.parametrize("name", EXPLOSIVE)
def test_yaml_that_explodes_ends_soon(name: str) -> None:
    """An error or a tree, within seconds and without recursion running out."""
    start = time.process_time()
    try:
        documents = parse_documents(EXPLOSIVE[name])
        assert "".join(document.render() for document in documents)
    except YamlSyntaxError as error:
        assert str(error)
    assert time.process_time() - start < 20
