"""The Kptfile: both forms of the oci facts, git's fields, and text that stays as it was (P1, P11)."""

import pytest

from unlade.packages.kptfile import BadKptfile, GitUpstream, Kptfile, OciUpstream

DIGEST = "sha256:" + "a" * 64
HEAD = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: app\n"
GIT = (
    HEAD + "upstream:\n  type: git\n  git:\n"
    "    repo: https://git.example.com/r\n    directory: /sub\n    ref: v1\n"
    "  updateStrategy: fast-forward\nupstreamLock:\n  type: git\n  git:\n    repo: https://git.example.com/r\n"
    f"    directory: /sub\n    ref: v1\n    commit: {'b' * 40}\n"
)


def test_git_fields() -> None:
    kptfile = Kptfile(GIT)
    assert kptfile.upstream == GitUpstream("https://git.example.com/r", "/sub", "v1")
    assert kptfile.lock == GitUpstream("https://git.example.com/r", "/sub", "v1", "b" * 40)
    assert kptfile.strategy == "fast-forward"
    assert kptfile.render() == GIT


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("directory", ["/", "/sub/dir"])
def test_oci_facts_in_either_form(compat: bool, directory: str) -> None:
    kptfile = Kptfile(HEAD + "info:\n  description: d # keep\n")
    kptfile.set_upstream(OciUpstream("registry.example.com/p:v1", directory), "resource-merge", compat=compat)
    kptfile.set_lock(OciUpstream(f"registry.example.com/p@{DIGEST}", directory), compat=compat)
    again = Kptfile(kptfile.render())
    assert again.upstream == OciUpstream("registry.example.com/p:v1", directory)
    assert again.lock == OciUpstream(f"registry.example.com/p@{DIGEST}", directory)
    assert again.strategy == "resource-merge"
    assert again.compatible is compat
    assert ("upstream:" in kptfile.render()) is not compat
    assert kptfile.render().endswith("info:\n  description: d # keep\n")


def test_changing_the_form_leaves_nothing_of_the_other() -> None:
    kptfile = Kptfile(HEAD)
    image, lock = OciUpstream("registry.example.com/p:v1"), OciUpstream(f"registry.example.com/p@{DIGEST}")
    kptfile.set_upstream(image, "resource-merge")
    kptfile.set_lock(lock)
    kptfile.set_upstream(image, "resource-merge", compat=True)
    kptfile.set_lock(lock, compat=True)
    assert "upstream:" not in kptfile.render()
    kptfile.set_upstream(image, "resource-merge")
    kptfile.set_lock(lock)
    assert "unlade.dev" not in kptfile.render()
    assert "annotations" not in kptfile.render()


def test_editing_keeps_comments_order_and_unknown_fields() -> None:
    text = "# ours\napiVersion: kpt.dev/v1\nkind: Kptfile\n\nmetadata:\n  name: 'app' # quoted\n"
    text += "  labels: {a: b}\nfuture: 1\n"
    kptfile = Kptfile(text)
    kptfile.set_name("other")
    kptfile.set_origin("registry.example.com/p:v1")
    rendered = kptfile.render()
    assert rendered == text.replace("'app'", "'other'").replace(
        "  labels: {a: b}\n",
        "  labels: {a: b}\n  annotations:\n    unlade.dev/origin: registry.example.com/p:v1\n",
    )
    kptfile.set_origin("")
    assert kptfile.render() == text.replace("'app'", "'other'")


def test_sections_stand_where_kpt_puts_them() -> None:
    kptfile = Kptfile(HEAD + "pipeline:\n  mutators: []\ninfo:\n  description: d\n")
    kptfile.set_lock(OciUpstream(f"registry.example.com/p@{DIGEST}"))
    kptfile.set_upstream(OciUpstream("registry.example.com/p:v1"), "copy-merge")
    assert kptfile.root.names() == [
        "apiVersion",
        "kind",
        "metadata",
        "upstream",
        "upstreamLock",
        "pipeline",
        "info",
    ]


def test_an_image_shows_its_directory() -> None:
    assert str(OciUpstream("registry.example.com/p:v1", "/a/b")) == "oci://registry.example.com/p//a/b:v1"
    assert str(OciUpstream("registry.example.com/p:v1")) == "oci://registry.example.com/p:v1"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("apiVersion: v1\nkind: ConfigMap\n", "not a Kptfile"),
        ("- a\n", "one mapping"),
        ("{apiVersion: kpt.dev/v1, kind: Kptfile}\n", "flow style"),
        (HEAD + "upstream: text\n", "not a mapping"),
        (HEAD + "upstream:\n  type: svn\n", "'svn'"),
        (HEAD + "upstream:\n  type: oci\n", "needs a section"),
        (HEAD + "upstream:\n  type: oci\n  oci: {}\n", "image is missing"),
        (HEAD + "upstream:\n  type: oci\n  oci:\n    image: r.example.com/UPPER\n", "repository"),
        (
            HEAD + "upstream:\n  type: oci\n  oci:\n    image: r.example.com/p:v1\n    directory: /../etc\n",
            "leaves",
        ),
        (HEAD + "upstream:\n  type: git\n  git:\n    repo: --upload-pack=evil\n    ref: v1\n", "dash"),
        (HEAD + "upstream:\n  type: git\n  git:\n    repo: r\n    ref: -x\n", "dash"),
        (HEAD + "upstream:\n  type: git\n  git:\n    repo: r\n", "repo and ref"),
    ],
)
def test_a_kptfile_that_lies_is_refused(body: str, reason: str) -> None:
    with pytest.raises(BadKptfile, match=reason):
        assert Kptfile(body).upstream is None


@pytest.mark.parametrize(
    ("lock", "reason"),
    [
        ("type: oci\n  oci:\n    image: registry.example.com/p:v1\n", "no digest"),
        (f"type: oci\n  oci:\n    image: registry.example.com/p@sha256:{'a' * 40}\n", "sha256"),
        ("type: git\n  git:\n    repo: r\n    ref: v1\n    commit: HEAD\n", "not a commit"),
    ],
)
def test_a_lock_is_exact(lock: str, reason: str) -> None:
    with pytest.raises(BadKptfile, match=reason):
        assert Kptfile(HEAD + "upstreamLock:\n  " + lock).lock is None


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(BadKptfile, match="unknown update strategy 'bogus'"):
        assert Kptfile(GIT.replace("fast-forward", "bogus")).strategy is None
