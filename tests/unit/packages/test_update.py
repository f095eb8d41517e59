"""Updates of packages with sub-packages, strategies, policies and get's first copy (P1, P2, P7, P8)."""

from pathlib import Path

import pytest

from tests.unit.packages.shelf import Shelf, oci
from unlade.errors import UnladeError
from unlade.packages.diffing import compare, sides
from unlade.packages.fetching import get, pull
from unlade.packages.kptfile import Kptfile, OciUpstream
from unlade.packages.strategies import LocalChanges
from unlade.packages.update import Conflicts, NoUpstream, update

IMAGE = "registry.example.com/p"
OTHER = "registry.example.com/other"
KPTFILE = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: p\n"


def config(value: str, name: str = "c") -> str:
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\ndata:\n  k: {value}\n"


def upstream(image: str, directory: str = "/", *, lock: str = "") -> str:
    text = KPTFILE + f"upstream:\n  type: oci\n  oci:\n    image: {image}\n"
    if directory != "/":
        text += f"    directory: {directory}\n"
    text += "  updateStrategy: resource-merge\n"
    return text + (f"upstreamLock:\n  type: oci\n  oci:\n    image: {lock}\n" if lock else "")


def versions(shelf: Shelf, **more: str) -> None:
    shelf.put(f"{IMAGE}:v1", {"Kptfile": KPTFILE, "c.yaml": config("1"), **more})
    shelf.put(
        f"{IMAGE}:v2", {"Kptfile": KPTFILE + "info:\n  description: two\n", "c.yaml": config("2"), **more}
    )


@pytest.fixture
def shelf() -> Shelf:
    made = Shelf()
    versions(made)
    return made


@pytest.fixture
def app(shelf: Shelf, tmp_path: Path) -> Path:
    get(oci(f"{IMAGE}:v1"), str(tmp_path / "app"), shelf)
    return tmp_path / "app"


def test_get_writes_name_upstream_lock_and_marks(app: Path, shelf: Shelf) -> None:
    kptfile = Kptfile((app / "Kptfile").read_text())
    assert kptfile.name == "app"
    assert kptfile.upstream == OciUpstream(f"{IMAGE}:v1")
    assert kptfile.lock == OciUpstream(f"{IMAGE}@{shelf.tags[f'{IMAGE}:v1']}")
    assert kptfile.strategy == "resource-merge"
    text = (app / "c.yaml").read_text()
    assert "metadata: # kpt-merge: /c\n" in text
    assert "internal.kpt.dev/upstream-identifier: '|ConfigMap|default|c'" in text


def test_get_makes_a_kptfile_where_there_is_none(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put("registry.example.com/bare:v1", {"c.yaml": config("1")})
    got = get(oci("registry.example.com/bare:v1"), str(tmp_path / "bare"), shelf)
    assert got.files == 2
    assert Kptfile((tmp_path / "bare" / "Kptfile").read_text()).name == "bare"


def test_get_fetches_sub_packages_that_only_name_an_upstream(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put(f"{OTHER}:v5", {"Kptfile": KPTFILE, "o.yaml": config("5", "o")})
    shelf.put("registry.example.com/parent:v1", {"Kptfile": KPTFILE, "dep/Kptfile": upstream(f"{OTHER}:v5")})
    got = get(oci("registry.example.com/parent:v1"), str(tmp_path / "app"), shelf)
    assert got.packages == 2
    assert "k: 5" in (tmp_path / "app" / "dep" / "o.yaml").read_text()
    inner = Kptfile((tmp_path / "app" / "dep" / "Kptfile").read_text())
    assert inner.lock == OciUpstream(f"{OTHER}@{shelf.tags[f'{OTHER}:v5']}")
    assert inner.name == "p"


def test_pull_changes_nothing_but_the_origin(shelf: Shelf, tmp_path: Path) -> None:
    pull(oci(f"{IMAGE}:v1"), str(tmp_path / "copy"), shelf)
    assert (tmp_path / "copy" / "c.yaml").read_text() == config("1")
    kptfile = Kptfile((tmp_path / "copy" / "Kptfile").read_text())
    assert kptfile.origin == f"{IMAGE}:v1"
    assert kptfile.upstream is None


def test_update_moves_upstream_and_lock(app: Path, shelf: Shelf) -> None:
    outcome = update(str(app), shelf, version="v2")
    kptfile = Kptfile((app / "Kptfile").read_text())
    assert kptfile.upstream == OciUpstream(f"{IMAGE}:v2")
    assert kptfile.lock == OciUpstream(f"{IMAGE}@{shelf.tags[f'{IMAGE}:v2']}")
    assert "description: two" in kptfile.render()
    assert outcome.changed == ["Kptfile", "c.yaml"]
    assert update(str(app), shelf, version="v2").changed == []


def test_update_without_a_version_follows_a_moved_tag(app: Path, shelf: Shelf) -> None:
    shelf.put(f"{IMAGE}:v1", {"Kptfile": KPTFILE, "c.yaml": config("moved")})
    update(str(app), shelf)
    assert "k: moved" in (app / "c.yaml").read_text()
    assert Kptfile((app / "Kptfile").read_text()).upstream == OciUpstream(f"{IMAGE}:v1")


def test_decisions_about_functions_name_their_image(shelf: Shelf, tmp_path: Path) -> None:
    functions = "pipeline:\n  mutators:\n    - image: example.com/fn:{}\n"
    for version in ("v1", "v2"):
        shelf.put(f"{IMAGE}:{version}", {"Kptfile": KPTFILE + functions.format(version)})
    get(oci(f"{IMAGE}:v1"), str(tmp_path / "app"), shelf)
    text = (tmp_path / "app" / "Kptfile").read_text()
    (tmp_path / "app" / "Kptfile").write_text(text.replace("fn:v1", "fn:mine"))
    [decision] = update(str(tmp_path / "app"), shelf, version="v2").decisions
    assert decision.path == "pipeline.mutators[image=example.com/fn].image"
    assert (decision.conflict, decision.local, decision.upstream) == (
        True,
        "example.com/fn:mine",
        "example.com/fn:v2",
    )
    assert "name: _kpt" not in (tmp_path / "app" / "Kptfile").read_text()


def test_without_a_lock_the_base_is_empty(app: Path, shelf: Shelf) -> None:
    kptfile = app / "Kptfile"
    text = kptfile.read_text()
    kptfile.write_text(text[: text.index("upstreamLock:")])
    (app / "c.yaml").write_text((app / "c.yaml").read_text().replace("k: 1", "mine: 1"))
    outcome = update(str(app), shelf, version="v2")
    assert "k: 2" in (app / "c.yaml").read_text()
    assert "mine: 1" in (app / "c.yaml").read_text()
    assert outcome.packages[0].old_lock is None
    assert Kptfile(kptfile.read_text()).lock == OciUpstream(f"{IMAGE}@{shelf.tags[f'{IMAGE}:v2']}")


def test_dry_run_changes_nothing(app: Path, shelf: Shelf) -> None:
    before = {p.name: p.read_text() for p in app.iterdir()}
    outcome = update(str(app), shelf, version="v2", dry_run=True)
    assert outcome.changed
    assert {p.name: p.read_text() for p in app.iterdir()} == before


def test_on_conflict_fail_writes_nothing(app: Path, shelf: Shelf) -> None:
    (app / "c.yaml").write_text((app / "c.yaml").read_text().replace("k: 1", "k: mine"))
    before = {p.name: p.read_text() for p in app.iterdir()}
    with pytest.raises(Conflicts, match=r"1 conflict.*base 1, local mine, upstream 2") as caught:
        update(str(app), shelf, version="v2", policy="fail")
    assert [decision.path for decision in caught.value.decisions] == ["data.k"]
    assert {p.name: p.read_text() for p in app.iterdir()} == before


def test_the_stored_strategy_is_honoured(shelf: Shelf, tmp_path: Path) -> None:
    get(oci(f"{IMAGE}:v1"), str(tmp_path / "app"), shelf, strategy="force-delete-replace")
    (tmp_path / "app" / "c.yaml").write_text("mine: 1\n")
    update(str(tmp_path / "app"), shelf, version="v2")
    assert "k: 2" in (tmp_path / "app" / "c.yaml").read_text()
    assert Kptfile((tmp_path / "app" / "Kptfile").read_text()).strategy == "force-delete-replace"


def test_fast_forward_updates_the_kptfile_and_can_be_repeated(app: Path, shelf: Shelf) -> None:
    shelf.put(f"{IMAGE}:v3", {"Kptfile": KPTFILE + "info:\n  description: three\n", "c.yaml": config("3")})
    update(str(app), shelf, version="v2", strategy="fast-forward")
    assert "description: two" in (app / "Kptfile").read_text()
    update(str(app), shelf, version="v3")
    assert "description: three" in (app / "Kptfile").read_text()
    assert "k: 3" in (app / "c.yaml").read_text()


@pytest.mark.parametrize("edit", ["c.yaml", "Kptfile", "extra.txt"])
def test_fast_forward_refuses_edits(edit: str, app: Path, shelf: Shelf) -> None:
    path = app / edit
    if edit == "Kptfile":
        path.write_text(path.read_text() + "pipeline:\n  mutators:\n    - image: mine\n")
    else:
        path.write_text((path.read_text() if path.exists() else "") + "# mine\nx: y\n")
    with pytest.raises(LocalChanges, match=edit):
        update(str(app), shelf, version="v2", strategy="fast-forward")


def test_copy_merge_overwrites_and_keeps_additions(shelf: Shelf, tmp_path: Path) -> None:
    shelf.put(f"{IMAGE}:v1", {"Kptfile": KPTFILE, "c.yaml": config("1"), "gone.txt": "1"})
    get(oci(f"{IMAGE}:v1"), str(tmp_path / "app"), shelf)
    app = tmp_path / "app"
    (app / "c.yaml").write_text(config("mine"))
    (app / "mine.txt").write_text("mine")
    update(str(app), shelf, version="v2", strategy="copy-merge")
    assert "k: 2" in (app / "c.yaml").read_text()
    assert (app / "mine.txt").read_text() == "mine"
    assert not (app / "gone.txt").exists()
    assert "description: two" in (app / "Kptfile").read_text()


def test_a_sub_package_with_its_own_upstream_is_updated_on_its_own(shelf: Shelf, tmp_path: Path) -> None:
    """P8: another repository keeps its version; the same one at the same version follows."""
    digest = shelf.put(f"{OTHER}:v5", {"Kptfile": KPTFILE, "o.yaml": config("5", "o")})
    get(oci(f"{IMAGE}:v1"), str(tmp_path / "app"), shelf)
    get(oci(f"{OTHER}:v5"), str(tmp_path / "app" / "other"), shelf)
    get(oci(f"{IMAGE}:v1"), str(tmp_path / "app" / "again"), shelf)
    shelf.put(f"{OTHER}:v5", {"Kptfile": KPTFILE, "o.yaml": config("moved", "o")})
    outcome = update(str(tmp_path / "app"), shelf, version="v2")
    assert {package.directory: str(package.upstream) for package in outcome.packages} == {
        "": f"oci://{IMAGE}:v2",
        "other": f"oci://{OTHER}:v5",
        "again": f"oci://{IMAGE}:v2",
    }
    assert "k: moved" in (tmp_path / "app" / "other" / "o.yaml").read_text()
    assert "k: 2" in (tmp_path / "app" / "again" / "c.yaml").read_text()
    assert str(digest) not in (tmp_path / "app" / "other" / "Kptfile").read_text()


def test_a_sub_package_added_deleted_and_pinned_by_its_parent(shelf: Shelf, tmp_path: Path) -> None:
    lock = f"{OTHER}@{shelf.put(f'{OTHER}:v5', {'Kptfile': KPTFILE, 'o.yaml': config('5', 'o')})}"
    dep = {"dep/Kptfile": upstream(f"{OTHER}:v5", lock=lock), "dep/o.yaml": config("5", "o")}
    name = "registry.example.com/parent"
    shelf.put(f"{name}:v1", {"Kptfile": KPTFILE})
    shelf.put(f"{name}:v2", {"Kptfile": KPTFILE, **dep})
    shelf.put(f"{name}:v3", {"Kptfile": KPTFILE})
    app = tmp_path / "app"
    get(oci(f"{name}:v1"), str(app), shelf)
    update(str(app), shelf, version="v2")
    assert "k: 5" in (app / "dep" / "o.yaml").read_text()
    update(str(app), shelf, version="v3")
    assert not (app / "dep").exists()
    update(str(app), shelf, version="v2")
    (app / "dep" / "o.yaml").write_text(config("mine", "o"))
    outcome = update(str(app), shelf, version="v3")
    assert "k: mine" in (app / "dep" / "o.yaml").read_text()
    assert any("deleted upstream, changed locally" in decision.reason for decision in outcome.conflicts)


def test_a_failure_in_a_sub_package_writes_nothing(shelf: Shelf, tmp_path: Path) -> None:
    """kpt leaves the parent half updated; all or nothing here."""
    shelf.put(f"{OTHER}:v5", {"Kptfile": KPTFILE, "o.yaml": config("5", "o")})
    get(oci(f"{IMAGE}:v1"), str(tmp_path / "app"), shelf)
    get(oci(f"{OTHER}:v5"), str(tmp_path / "app" / "other"), shelf)
    shelf.put(f"{OTHER}:v5", {"Kptfile": KPTFILE, "o.yaml": "a: [1\n"})
    before = {str(p): p.read_text() for p in (tmp_path / "app").rglob("*") if p.is_file()}
    with pytest.raises(UnladeError, match="not valid YAML"):
        update(str(tmp_path / "app"), shelf, version="v2")
    assert {str(p): p.read_text() for p in (tmp_path / "app").rglob("*") if p.is_file()} == before


def test_update_needs_an_upstream(tmp_path: Path, shelf: Shelf) -> None:
    (tmp_path / "Kptfile").write_text(KPTFILE)
    with pytest.raises(NoUpstream):
        update(str(tmp_path), shelf)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnladeError, match="no Kptfile found"):
        update(str(tmp_path / "empty"), shelf)


def test_files_that_kpt_ignores_stay_as_they_are(shelf: Shelf, tmp_path: Path) -> None:
    files = {"Kptfile": KPTFILE, ".krmignore": "vendor/\n*.tpl.yaml\n", "vendor/v.yaml": config("1", "v")}
    shelf.put(f"{IMAGE}:v1", {**files, "a.tpl.yaml": "{{ not: yaml"})
    shelf.put(f"{IMAGE}:v2", {**files, "vendor/v.yaml": config("2", "v"), "a.tpl.yaml": "{{ changed"})
    get(oci(f"{IMAGE}:v1"), str(tmp_path / "app"), shelf)
    assert (tmp_path / "app" / "vendor" / "v.yaml").read_text() == config("1", "v")
    update(str(tmp_path / "app"), shelf, version="v2")
    assert (tmp_path / "app" / "vendor" / "v.yaml").read_text() == config("1", "v")
    assert (tmp_path / "app" / "a.tpl.yaml").read_text() == "{{ not: yaml"


@pytest.mark.parametrize(
    ("kind", "version", "expected"),
    [
        ("local", "", ["-  k: 1", "+  k: mine"]),
        ("remote", "v2", ["-  k: 1", "+  k: 2"]),
        ("combined", "v2", ["-  k: 2", "+  k: mine"]),
    ],
)
def test_diff_types(kind: str, version: str, expected: list[str], app: Path, shelf: Shelf) -> None:
    """P3: kpt's types; the base is the lock, so a moved tag shows nothing of its own."""
    (app / "c.yaml").write_text((app / "c.yaml").read_text().replace("k: 1", "k: mine"))
    shelf.put(f"{IMAGE}:v1", {"Kptfile": KPTFILE, "c.yaml": config("moved")})
    old, new = sides(str(app), shelf, version=version, kind=kind)  # type: ignore[arg-type]
    [change] = compare(old, new)
    lines = list(change.lines())
    assert [line for line in lines if line.startswith(("-  ", "+  "))] == expected
    assert lines[0] == f"--- {old.name}/c.yaml"


def test_diff_three_ways_and_nothing(app: Path, shelf: Shelf) -> None:
    found = sides(str(app), shelf, version="v2", kind="3way")
    assert [side.name for side in found] == ["upstream", "local", "target"]
    assert compare(found[0], found[1]) == []
    assert len(compare(found[0], found[2])) == 1


def test_diff_of_binary_and_missing_files(app: Path, shelf: Shelf) -> None:
    (app / "blob").write_bytes(b"\0\xff")
    (app / "c.yaml").unlink()
    changes = {change.path: list(change.lines()) for change in compare(*sides(str(app), shelf))}
    assert changes["blob"] == ["Binary files upstream/blob and local/blob differ"]
    assert changes["c.yaml"][1] == "+++ /dev/null"
