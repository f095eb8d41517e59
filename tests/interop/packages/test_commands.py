"""`unlade pkg` as a script uses it: exit codes, formats, and what goes to stdout."""

import json
import sys
from pathlib import Path

import pytest

from tests.interop.packages import kpt
from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry

UNLADE = (sys.executable, "-m", "unlade")
KPTFILE = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: p\n"
CONFIG = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: c\ndata:\n  k: {value}\n"


@pytest.fixture
def app(registry: RealRegistry, peers: Peers, tmp_path: Path) -> Path:
    """A fetched package with one local edit; v2 changes the same field."""
    repository = f"oci://{registry.host}/commands/{tmp_path.name}".lower()
    for version in ("v1", "v2"):
        kpt.write(tmp_path / "p", {"Kptfile": KPTFILE, "c.yaml": CONFIG.format(value=version)})
        said = peers.unlade(
            "pkg", "push", f"p@{version}", "--origin", repository, "--plain-http", cwd=tmp_path
        )
        assert said.startswith(repository.removeprefix("oci://") + "@sha256:")
    said = peers.unlade("pkg", "get", repository + ":v1", "app", "--plain-http", cwd=tmp_path)
    assert said == "app\n"
    path = tmp_path / "app" / "c.yaml"
    path.write_text(path.read_text().replace("k: v1", "k: mine"))
    return tmp_path


def test_update_in_every_way(app: Path, peers: Peers) -> None:
    plan = json.loads(
        peers.unlade("pkg", "update", "app@v2", "--dry-run", "-o", "json", "--plain-http", cwd=app)
    )
    assert plan["conflicts"] == 1
    assert plan["changedFiles"] == ["Kptfile", "c.yaml"]
    [decision] = plan["decisions"]
    assert decision["path"] == "data.k"
    assert (decision["base"], decision["local"], decision["upstream"]) == ("v1", "mine", "v2")
    assert decision["taken"] == "upstream"
    assert plan["packages"][0]["from"] != plan["packages"][0]["to"]
    error = peers.unlade_error(
        "pkg", "update", "app@v2", "--on-conflict", "fail", "--plain-http", cwd=app, expect=11
    )
    assert "error: 1 conflict(s)" in error
    assert "next: " in error
    listed = json.loads(
        peers.unlade(
            "pkg",
            "update",
            "app@v2",
            "--on-conflict",
            "fail",
            "-o",
            "json",
            "--plain-http",
            cwd=app,
            expect=11,
        )
    )
    assert [row["path"] for row in listed["decisions"]] == ["data.k"]
    peers.unlade("pkg", "update", "app@v2", "--on-conflict", "markers", "--plain-http", cwd=app, expect=1)
    assert (
        "<<<<<<< local\n  k: mine\n=======\n  k: v2\n>>>>>>> upstream\n"
        in (app / "app" / "c.yaml").read_text()
    )


def test_the_default_warns_and_does_what_kpt_does(app: Path, peers: Peers) -> None:
    done = peers.run("env", *UNLADE, "pkg", "update", "app@v2", "--plain-http", cwd=app)
    assert b"warning: conflict: c.yaml: ConfigMap c: data.k" in done.stderr
    assert done.stdout == b""
    assert "k: v2" in (app / "app" / "c.yaml").read_text()
    again = peers.run("env", *UNLADE, "pkg", "update", "app@v2", "--plain-http", cwd=app)
    assert b"Updated 1 package(s), 0 files." in again.stderr


def test_update_from_inside_the_package(app: Path, peers: Peers) -> None:
    done = peers.run(*UNLADE, "pkg", "update", "@v2", "--plain-http", cwd=app / "app")
    assert b"run `cd .`" in done.stderr
    assert "k: v2" in (app / "app" / "c.yaml").read_text()


def test_diff_exit_codes(app: Path, peers: Peers) -> None:
    said = peers.unlade("pkg", "diff", "app", "--plain-http", cwd=app)
    assert "-  k: v1\n+  k: mine\n" in said
    peers.unlade("pkg", "diff", "app", "--exit-code", "--plain-http", cwd=app, expect=1)
    coloured = peers.unlade("pkg", "diff", "app", "--color", "always", "--plain-http", cwd=app)
    assert "\x1b[31m-  k: v1\x1b[0m" in coloured
    peers.unlade("pkg", "diff", "app@v1", "--diff-type", "remote", "--exit-code", "--plain-http", cwd=app)
    both = json.loads(
        peers.unlade("pkg", "diff", "app@v2", "--diff-type", "3way", "-o", "json", "--plain-http", cwd=app)
    )
    assert [(change["old"], change["new"]) for change in both] == [
        ("upstream", "local"),
        ("upstream", "target"),
    ]


def test_errors_have_their_codes(app: Path, peers: Peers, registry: RealRegistry) -> None:
    for code, arguments in {
        3: ("get", "somewhere", "x"),
        6: ("get", f"oci://{registry.host}/not/there:v1", "x", "--plain-http"),
        11: ("update", "app@v2", "--strategy", "fast-forward", "--plain-http"),
    }.items():
        error = peers.unlade_error("pkg", *arguments, cwd=app, expect=code)
        assert error.splitlines()[-2].startswith("error: "), error
        assert error.splitlines()[-1].startswith("next: "), error
