"""Identity marks, ignore rules, the tree, init, project settings, git: the small parts (P9, P10, P11)."""

import os
import subprocess
from pathlib import Path

import pytest

from unlade.cli import pkg as command
from unlade.errors import UnladeError
from unlade.model import Deadline
from unlade.packages.decisions import ON_CONFLICT
from unlade.packages.diffing import DIFF_TYPES
from unlade.packages.gitsource import GitFailed, UnknownRef, default_branch, fetch_git
from unlade.packages.identity import BadMergeComment, identify
from unlade.packages.ignore import Ignore
from unlade.packages.kptfile import STRATEGIES, GitUpstream, Kptfile
from unlade.packages.listing import init, tree
from unlade.packages.project import BadSettings, kpt_compat
from unlade.packages.registries import origin_of, upstreams_below
from unlade.packages.resources import marked_text, merge_file
from unlade.packages.snapshot import NotAPackage, read_directory
from unlade.packages.yamltext import Map, YamlSyntaxError, parse_documents


def root(text: str) -> Map:
    found = parse_documents(text)[0].root
    assert isinstance(found, Map)
    return found


def test_identity_is_upstreams_name_not_the_version() -> None:
    one = "apiVersion: apps/v1\nkind: Deployment\nmetadata: # kpt-merge: prod/app\n  name: renamed\n"
    two = "apiVersion: apps/v1beta1\nkind: Deployment\nmetadata:\n  name: app\n  namespace: prod\n"
    assert identify(root(one), "a.yaml") == identify(root(two), "a.yaml")
    assert identify(root(one), "a.yaml") != identify(root(two), "b.yaml")
    assert str(identify(root(two), "a.yaml")) == "a.yaml: Deployment.apps prod/app"


def test_a_malformed_merge_comment_is_an_error_that_says_how() -> None:
    for comment in ("kpt-merge: x", "see kpt-merge: a/b"):
        with pytest.raises(BadMergeComment):
            identify(root(f"kind: A\nmetadata: # {comment}\n  name: a\n"), "a.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind: A\nspec: 1\n", "kind: A\nspec: 1\n"),
        ("kind: A\nmetadata: {}\n", "kind: A\nmetadata: {}\n"),
        (
            "kind: A\nmetadata: {name: a}\n",
            "kind: A\nmetadata: # kpt-merge: /a\n  name: a\n  annotations:\n"
            "    internal.kpt.dev/upstream-identifier: '|A|default|a'\n",
        ),
        (
            "kind: A\nmetadata: # mine\n  name: a\n  annotations: {x: y}\n",
            "kind: A\n# mine\nmetadata: # kpt-merge: /a\n  name: a\n  annotations:\n    x: y\n"
            "    internal.kpt.dev/upstream-identifier: '|A|default|a'\n",
        ),
        ("a: [1\n", "a: [1\n"),
        ("# only\n", "# only\n"),
        (
            "kind: A\r\nmetadata:\r\n  name: a",
            "kind: A\r\nmetadata: # kpt-merge: /a\r\n  name: a\r\n  annotations:\r\n"
            "    internal.kpt.dev/upstream-identifier: '|A|default|a'",
        ),
    ],
)
def test_marks(text: str, expected: str) -> None:
    assert marked_text(text) == expected


def test_a_comment_on_the_metadata_line_makes_room() -> None:
    """kpt replaces it by its mark; here it moves above the line, and stays there."""
    text = "kind: A\nmetadata: # mine\n  name: a\nn: {}\n"
    local = marked_text(text.format("1"))
    merged = merge_file("a.yaml", text.format("1"), local, text.format("2")).text
    assert merged == local.replace("n: 1", "n: 2")
    assert merged.count("# mine") == 1


def test_config_connector_resources_are_attributed() -> None:
    text = "apiVersion: storage.cnrm.cloud.google.com/v1\nkind: B\nmetadata:\n  name: b\n"
    assert "cnrm.cloud.google.com/blueprint: 'kpt-pkg'" in marked_text(text, attribute=True)
    assert "blueprint" not in marked_text(text)


def test_one_unreadable_file_does_not_cancel_the_marks_of_others(tmp_path: Path) -> None:
    """kpt silently marks nothing in a package with one file that is not YAML."""
    assert marked_text("a: [1\n") == "a: [1\n"
    assert "kpt-merge" in marked_text("kind: A\nmetadata:\n  name: a\n")


def test_an_untouched_unreadable_file_does_not_block_an_update() -> None:
    """kpt refuses to update a package with a broken file, even one that nobody changed."""
    assert merge_file("a.yaml", "a: [1\n", "a: [1\n", "a: [1\n").text == "a: [1\n"
    with pytest.raises(YamlSyntaxError):
        merge_file("a.yaml", "a: [1\n", "a: [1\n", "a: 2\n")


def test_folded_text_keeps_its_value() -> None:
    """kpt's writer changes the value of folded text with indented lines at every update (#2925)."""
    head = "kind: A\nmetadata:\n  name: a\nspec:\n"
    folded = "  text: >\n    one\n      indented\n    two\n"
    merged = merge_file(
        "a.yaml", head + folded + "  n: 1\n", head + folded + "  n: 1\n", head + folded + "  n: 2\n"
    ).text
    assert merged is not None
    assert folded in merged
    again = merge_file("a.yaml", head + folded + "  n: 2\n", merged, head + folded + "  n: 3\n").text
    assert again is not None
    assert folded in again


def test_a_document_that_had_to_be_normalised_is_written_back_as_it_was() -> None:
    """Only an edit makes the normal form visible; a neighbour's edit does not."""
    odd = "kind: A\nmetadata: # kpt-merge: /a\n  name: a\n  annotations:\n"
    odd += "    internal.kpt.dev/upstream-identifier: '|A|default|a'\ndata: {a: 1,  # why\n   b:   2}\n"
    rest = "---\nkind: B\nmetadata:\n  name: b\nn: {}\n"
    merged = merge_file("a.yaml", odd + rest.format(1), odd + rest.format(1), odd + rest.format(2)).text
    assert merged is not None
    assert merged.startswith(odd)
    assert "n: 2\n" in merged


def test_line_ends_are_the_files_own() -> None:
    text = "kind: A\r\nmetadata:\r\n  name: a\r\nn: 1\r\n"
    merged = merge_file("a.yaml", text, text, text.replace("n: 1", "n: 2")).text
    assert merged is not None
    assert "n: 2\r\n" in merged
    assert "\n" not in merged.replace("\r\n", "")
    added = merge_file("a.yaml", None, None, text).text
    assert added is not None
    assert "\n" not in added.replace("\r\n", "")


def test_comment_only_documents_stay() -> None:
    """kpt loses documents that hold only comments (#3941)."""
    text = "# license\n---\nkind: A\nmetadata:\n  name: a\nn: 1\n---\n# tail\n"
    merged = merge_file("a.yaml", text, text, text.replace("n: 1", "n: 2")).text
    assert merged is not None
    assert merged.startswith("# license\n---\n")
    assert merged.endswith("n: 2\n---\n# tail\n")


@pytest.mark.parametrize(
    ("rules", "path", "ignored"),
    [
        ("*.tpl.yaml", "a/b.tpl.yaml", True),
        ("/a.yaml", "a.yaml", True),
        ("/a.yaml", "b/a.yaml", False),
        ("vendor/", "vendor/x/y.yaml", True),
        ("vendor/", "vendor", False),
        ("a/**/z.yaml", "a/b/c/z.yaml", True),
        ("a/**/z.yaml", "a/z.yaml", True),
        ("*.yaml\n!keep.yaml", "keep.yaml", False),
        ("# comment\n\n?.yaml", "x.yaml", True),
        ("dir", "dir/file.yaml", True),
    ],
)
def test_ignore_rules(rules: str, path: str, ignored: bool) -> None:
    assert Ignore(rules).covers(path) is ignored


def test_init_then_tree(tmp_path: Path) -> None:
    directory = tmp_path / "app"
    directory.mkdir()
    (directory / "README.md").write_text("mine")
    made = init(str(directory), description="a: b", keywords=("x", "y"), site="https://example.com")
    assert [os.path.basename(path) for path in made] == ["Kptfile", "package-context.yaml"]
    assert (directory / "README.md").read_text() == "mine"
    kptfile = Kptfile((directory / "Kptfile").read_text())
    assert kptfile.name == "app"
    assert 'description: "a: b"' in kptfile.render()
    assert init(str(directory)) == []
    (directory / "db").mkdir()
    (directory / "db" / "Kptfile").write_text(kptfile.render())
    (directory / "db" / "a.yaml").write_text("kind: A\nmetadata:\n  name: n\n  namespace: s\n---\nkind: B\n")
    (directory / "db.yaml").write_text("kind: C\nmetadata:\n  name: c\n")
    (directory / "dir").mkdir()
    (directory / "dir" / "bad.yaml").write_text("a: [1\n")
    assert tree(str(directory)).lines() == [
        'Package "app"',
        "├── [Kptfile]  Kptfile app",
        "├── [db.yaml]  C c",
        "├── [package-context.yaml]  ConfigMap kptfile.kpt.dev",
        '├── Package "db"',
        "│   ├── [Kptfile]  Kptfile app",
        "│   ├── [a.yaml]  A s/n",
        "│   └── [a.yaml]  B",
        "└── dir",
        "    └── [bad.yaml]  not valid YAML",
    ]
    with pytest.raises(UnladeError, match="no such directory"):
        init(str(tmp_path / "missing"))


def test_project_settings(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / ".unlade.toml").write_text("[packages]\nkpt-compat = true\n")
    assert kpt_compat(str(inner)) is True
    (tmp_path / "a" / ".unlade.toml").write_text("")
    assert kpt_compat(str(inner)) is False
    for bad in ("[packages]\nkpt-compat = 1\n", "packages = 1\n", "=\n"):
        (tmp_path / "a" / ".unlade.toml").write_text(bad)
        with pytest.raises(BadSettings):
            kpt_compat(str(inner))


def test_registries_named_below_a_directory(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "Kptfile").write_text(
        "apiVersion: kpt.dev/v1\nkind: Kptfile\n"
        "metadata:\n  annotations:\n    unlade.dev/origin: r.example.com/o:v1\n"
    )
    (tmp_path / "sub" / "Kptfile").write_text(
        "apiVersion: kpt.dev/v1\nkind: Kptfile\n"
        "upstream:\n  type: oci\n  oci:\n    image: s.example.com/p:v1\n"
    )
    assert [str(found) for found in upstreams_below(str(tmp_path))] == ["oci://s.example.com/p:v1"]
    assert origin_of(str(tmp_path)) == "oci://r.example.com/o:v1"
    assert origin_of(str(tmp_path / "sub")) == ""


def run_git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    made = tmp_path / "repo"
    (made / "pkg").mkdir(parents=True)
    run_git(made, "init", "-q", "-b", "trunk")
    (made / "pkg" / "a.txt").write_text("one")
    (made / "pkg" / "run").write_text("#!/bin/sh\n")
    (made / "pkg" / "run").chmod(0o755)
    (made / "pkg" / "link").symlink_to("a.txt")
    run_git(made, "add", "-A")
    run_git(made, "commit", "-q", "-m", "1")
    run_git(made, "tag", "v1")
    (made / "pkg" / "a.txt").write_text("two")
    run_git(made, "commit", "-q", "-a", "-m", "2")
    return made


def test_git_by_tag_branch_and_commit(repo: Path) -> None:
    never = Deadline.never()
    first = run_git(repo, "rev-parse", "v1^{commit}")
    files, lock, links = fetch_git(GitUpstream(str(repo), "/pkg", "v1"), deadline=never)
    assert (files["a.txt"].text, files["run"].mode, links) == ("one", 0o755, ("link",))
    assert lock == GitUpstream(str(repo), "/pkg", "v1", first)
    assert default_branch(str(repo), deadline=never) == "trunk"
    files, lock, _ = fetch_git(GitUpstream(str(repo), "/pkg", "trunk"), deadline=never)
    assert files["a.txt"].text == "two"
    files, _, _ = fetch_git(GitUpstream(str(repo), "/pkg", "gone", first), deadline=never)
    assert files["a.txt"].text == "one"
    files, _, _ = fetch_git(GitUpstream(str(repo), "/", "v1"), deadline=never)
    assert "pkg/a.txt" in files


def test_git_errors_say_what_is_missing(repo: Path, tmp_path: Path) -> None:
    never = Deadline.never()
    with pytest.raises(UnknownRef, match="v9"):
        fetch_git(GitUpstream(str(repo), "/pkg", "v9"), deadline=never)
    with pytest.raises(NotAPackage, match="no directory /nope"):
        fetch_git(GitUpstream(str(repo), "/nope", "v1"), deadline=never)
    with pytest.raises(GitFailed):
        fetch_git(GitUpstream(str(tmp_path / "none"), "/", "v1"), deadline=never)
    with pytest.raises(GitFailed):
        fetch_git(GitUpstream("ext::sh -c touch% " + str(tmp_path / "evil"), "/", "v1"), deadline=never)
    assert not (tmp_path / "evil").exists()


def test_a_directory_is_read_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "secret").write_text("s")
    (tmp_path / "d" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "d" / "loop").symlink_to(".")
    read = read_directory(str(tmp_path / "d"))
    assert read.files == {}
    assert read.links == ("link", "loop")
    os.mkfifo(tmp_path / "d" / "pipe")
    with pytest.raises(NotAPackage, match="pipe"):
        read_directory(str(tmp_path / "d"))


def test_the_command_line_offers_what_the_room_has() -> None:
    assert command.STRATEGIES == STRATEGIES
    assert command.ON_CONFLICT == ON_CONFLICT
    assert command.DIFF_TYPES == DIFF_TYPES
