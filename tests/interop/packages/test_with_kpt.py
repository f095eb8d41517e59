"""Packages handed back and forth between kpt and us (P9, P11)."""

import subprocess
from pathlib import Path

import pytest

from tests.interop.packages import kpt
from tests.interop.real_registry import RealRegistry
from unlade.packages.fetching import get
from unlade.packages.kptfile import GitUpstream, Kptfile
from unlade.packages.location import LocalDirectory, parse_git, parse_oci
from unlade.packages.publishing import copy
from unlade.packages.sources import Sources
from unlade.packages.update import update

needs_kpt = pytest.mark.skipif(kpt.available() is None, reason="kpt is not installed")
DEPLOYMENT = """apiVersion: apps/v1
kind: Deployment
metadata:
  name: app
spec:
  replicas: 1 # how many
  template:
    spec:
      containers:
      - name: main
        image: nginx:1
"""
KPTFILE = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: app\ninfo:\n  description: d\n"
V1 = {"Kptfile": KPTFILE, "app.yaml": DEPLOYMENT, "README.md": "one\n"}
V2 = {**V1, "app.yaml": DEPLOYMENT.replace("nginx:1", "nginx:2"), "README.md": "two\n"}
V3 = {**V2, "app.yaml": DEPLOYMENT.replace("nginx:1", "nginx:3"), "extra.txt": "new\n"}


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    kpt.publish(tmp_path / "up", {"v1": V1, "v2": V2, "v3": V3})
    return tmp_path / "up"


def edit(path: Path) -> None:
    text = (path / "app.yaml").read_text()
    assert "replicas: 1" in text
    (path / "app.yaml").write_text(text.replace("replicas: 1", "replicas: 7"))


@needs_kpt
def test_fetched_by_kpt_updated_by_us(repo: Path, sources: Sources, tmp_path: Path) -> None:
    done = kpt.run_kpt(tmp_path, "pkg", "get", f"{repo}/.git/pkg@v1", "app", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    edit(tmp_path / "app")
    outcome = update(str(tmp_path / "app"), sources, version="v2")
    assert outcome.conflicts == []
    text = (tmp_path / "app" / "app.yaml").read_text()
    assert "replicas: 7 # how many" in text
    assert "nginx:2" in text
    assert (tmp_path / "app" / "README.md").read_text() == "two\n"
    lock = Kptfile((tmp_path / "app" / "Kptfile").read_text()).lock
    assert isinstance(lock, GitUpstream)
    commit = subprocess.run(
        ["git", "rev-parse", "v2^{commit}"], cwd=repo, capture_output=True, text=True, check=True
    )
    assert lock.commit == commit.stdout.strip()
    # And kpt goes on from there.
    done = kpt.run_kpt(tmp_path, "pkg", "update", "app@v3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nginx:3" in (tmp_path / "app" / "app.yaml").read_text()
    assert "replicas: 7" in (tmp_path / "app" / "app.yaml").read_text()


@needs_kpt
def test_fetched_by_us_updated_by_kpt(repo: Path, sources: Sources, tmp_path: Path) -> None:
    got = get(parse_git(f"{repo}/.git/pkg@v1"), str(tmp_path / "app"), sources)
    assert got.packages == 1
    edit(tmp_path / "app")
    done = kpt.run_kpt(tmp_path, "pkg", "update", "app@v2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "app" / "app.yaml").read_text()
    assert "replicas: 7" in text
    assert "nginx:2" in text
    # And we go on from there.
    assert update(str(tmp_path / "app"), sources, version="v3").conflicts == []
    assert "nginx:3" in (tmp_path / "app" / "app.yaml").read_text()
    assert (tmp_path / "app" / "extra.txt").read_text() == "new\n"


@needs_kpt
def test_same_first_fetch(repo: Path, sources: Sources, tmp_path: Path) -> None:
    """What get writes equals what kpt writes, apart from layout."""
    done = kpt.run_kpt(tmp_path, "pkg", "get", f"{repo}/.git/pkg@v1", "app", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "ours").mkdir()
    get(parse_git(f"{repo}/.git/pkg@v1"), str(tmp_path / "ours" / "app"), sources)
    ours, theirs = kpt.read(tmp_path / "ours" / "app"), kpt.read(tmp_path / "app")
    assert kpt.normal(ours, second=True) == kpt.normal(theirs, second=True)
    locks = [Kptfile(files["Kptfile"]) for files in (ours, theirs)]
    assert locks[0].upstream == locks[1].upstream
    assert locks[0].lock == locks[1].lock
    assert locks[0].strategy == locks[1].strategy


@needs_kpt
@pytest.mark.parametrize("strategy", ["fast-forward", "force-delete-replace"])
def test_other_strategies_as_kpt(strategy: str, repo: Path, sources: Sources, tmp_path: Path) -> None:
    for place in ("theirs", "ours"):
        (tmp_path / place).mkdir()
        done = kpt.run_kpt(tmp_path, "pkg", "get", f"{repo}/.git/pkg@v1", "app", cwd=tmp_path / place)
        assert done.returncode == 0, done.stderr
        if strategy == "force-delete-replace":
            edit(tmp_path / place / "app")
            (tmp_path / place / "app" / "mine.txt").write_text("mine")
    done = kpt.run_kpt(tmp_path, "pkg", "update", "app@v3", f"--strategy={strategy}", cwd=tmp_path / "theirs")
    assert done.returncode == 0, done.stderr
    update(str(tmp_path / "ours" / "app"), sources, version="v3", strategy=strategy)  # type: ignore[arg-type]
    ours, theirs = (kpt.normal(kpt.read(tmp_path / place / "app")) for place in ("ours", "theirs"))
    assert ours == theirs


@needs_kpt
def test_fast_forward_is_refused_by_both_on_edits(repo: Path, sources: Sources, tmp_path: Path) -> None:
    done = kpt.run_kpt(tmp_path, "pkg", "get", f"{repo}/.git/pkg@v1", "app", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    edit(tmp_path / "app")
    before = kpt.read(tmp_path / "app")
    with pytest.raises(Exception, match=r"local package files have been modified: app\.yaml"):
        update(str(tmp_path / "app"), sources, version="v2", strategy="fast-forward")
    assert kpt.read(tmp_path / "app") == before
    done = kpt.run_kpt(tmp_path, "pkg", "update", "app@v2", "--strategy=fast-forward", cwd=tmp_path)
    assert done.returncode == 1
    assert "local package files have been modified" in done.stderr


@needs_kpt
def test_kpt_reads_what_we_fetch_in_compatible_form(
    registry: RealRegistry, sources: Sources, tmp_path: Path
) -> None:
    """P11: with fields kpt refuses the Kptfile, with annotations `kpt fn render` runs."""
    kpt.write(tmp_path / "src", V1)
    copy(LocalDirectory(str(tmp_path / "src")), parse_oci(f"oci://{registry.host}/compat:v1"), sources)
    for name, compat in (("fields", False), ("notes", True)):
        get(parse_oci(f"oci://{registry.host}/compat:v1"), str(tmp_path / name), sources, compat=compat)
    refused = kpt.run_kpt(tmp_path, "fn", "render", "fields", cwd=tmp_path)
    assert refused.returncode != 0
    done = kpt.run_kpt(tmp_path, "fn", "render", "notes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # What kpt rewrote is still a package of ours.
    kpt.write(tmp_path / "src", V2)
    copy(LocalDirectory(str(tmp_path / "src")), parse_oci(f"oci://{registry.host}/compat:v2"), sources)
    outcome = update(str(tmp_path / "notes"), sources, version="v2")
    assert outcome.conflicts == []
    assert "nginx:2" in (tmp_path / "notes" / "app.yaml").read_text()
    kptfile = Kptfile((tmp_path / "notes" / "Kptfile").read_text())
    assert kptfile.compatible
    assert "upstream:" not in kptfile.render()
    assert str(kptfile.upstream).endswith("compat:v2")


def test_git_to_registry(repo: Path, registry: RealRegistry, sources: Sources, tmp_path: Path) -> None:
    """P5: git is a source of copy; the default branch is taken without a ref."""
    done = copy(parse_git(f"{repo}/.git/pkg"), parse_oci(f"oci://{registry.host}/from-git:v3"), sources)
    assert done.name.startswith(f"{registry.host}/from-git@sha256:")
    got = get(parse_oci(f"oci://{registry.host}/from-git:v3"), str(tmp_path / "app"), sources)
    assert (tmp_path / "app" / "extra.txt").read_text() == "new\n"
    assert got.files == 4


def test_a_git_lock_survives_a_moved_tag(repo: Path, sources: Sources, tmp_path: Path) -> None:
    """P7 for git: the base is the locked commit, whatever the tag says now."""
    get(parse_git(f"{repo}/.git/pkg@v1"), str(tmp_path / "app"), sources)
    edit(tmp_path / "app")
    kpt.git(repo, "tag", "-f", "v1", "v3")
    outcome = update(str(tmp_path / "app"), sources, version="v2")
    assert outcome.conflicts == []
    assert "replicas: 7" in (tmp_path / "app" / "app.yaml").read_text()
