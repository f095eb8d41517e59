"""kill -9 at every step of get and update: the directory is the old or the new package, never between.

Every point of a traced run counts once per time it is reached. A child process runs the same work with one
point armed and dies there by SIGKILL; then the directory is compared, and the same work is done again.
"""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.packages.shelf import Shelf, oci
from unlade.kernel import failpoints, files
from unlade.packages.fetching import get
from unlade.packages.ondisk import Busy, ChangedMeanwhile, Exists, locked_package, recover, replace_package
from unlade.packages.snapshot import file_of, read_directory
from unlade.packages.update import update

KPTFILE = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: p\n"
CONFIG = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: c{number}\ndata:\n  k: {value}\n"
IMAGE = "registry.example.com/p"


def shelf() -> Shelf:
    made = Shelf()
    one = {"Kptfile": KPTFILE, "gone.txt": "gone", "readme.md": "same"}
    one |= {f"d{number % 3}/c{number}.yaml": CONFIG.format(number=number, value=1) for number in range(24)}
    two = {name: text for name, text in one.items() if name != "gone.txt"} | {"new/file.txt": "new"}
    for number in range(0, 24, 2):
        two[f"d{number % 3}/c{number}.yaml"] = CONFIG.format(number=number, value=2)
    made.put(f"{IMAGE}:v1", one)
    made.put(f"{IMAGE}:v2", two)
    return made


def tree(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): p.read_text() for p in sorted(path.rglob("*")) if p.is_file()}


def prepared(directory: Path) -> Path:
    """A fetched package with local content that is none of the package's business."""
    path = directory / "p"
    get(oci(f"{IMAGE}:v1"), str(path), shelf())
    (path / ".git").mkdir()
    (path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (path / "link").symlink_to("readme.md")
    (path / "empty").mkdir()
    return path


def traced(work: Callable[[], object]) -> list[tuple[str, int]]:
    """Every point that the work reaches, with its count."""
    seen: dict[str, int] = {}
    points: list[tuple[str, int]] = []

    def announce(name: str) -> None:
        seen[name] = seen.get(name, 0) + 1
        points.append((name, seen[name]))

    real = failpoints.reach
    failpoints.reach = announce
    try:
        work()
    finally:
        failpoints.reach = real
    return points


def killed_at(point: tuple[str, int], work: Callable[[], object]) -> None:
    """Run the work in a child that dies at the point."""
    child = os.fork()
    if child == 0:
        try:
            failpoints._armed = failpoints._Armed(f"{point[0]}:{point[1]}")
            work()
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), (point, os.waitstatus_to_exitcode(status))
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_update_killed_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    sample = prepared(tmp_path / "trace")
    old = tree(sample)
    points = traced(lambda: update(str(sample), shelf(), version="v2"))
    new = tree(sample)
    assert len(points) >= 50
    assert old != new
    for number, point in enumerate(points):
        home = tmp_path / f"k{number}"
        home.mkdir()
        path = prepared(home)
        killed_at(point, lambda path=path: update(str(path), shelf(), version="v2"))  # type: ignore[misc]
        found = tree(path)
        assert found in (old, new), point
        assert os.readlink(path / "link") == "readme.md"
        assert (path / "empty").is_dir()
        update(str(path), shelf(), version="v2")
        assert tree(path) == new, point
        assert sorted(os.listdir(home)) == ["p"], point


def test_get_killed_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    points = traced(lambda: get(oci(f"{IMAGE}:v1"), str(tmp_path / "trace" / "p"), shelf()))
    new = tree(tmp_path / "trace" / "p")
    assert len(points) >= 50
    for number, point in enumerate(points[:: max(1, len(points) // 25)]):
        home = tmp_path / f"k{number}"
        home.mkdir()
        killed_at(point, lambda home=home: get(oci(f"{IMAGE}:v1"), str(home / "p"), shelf()))  # type: ignore[misc]
        if (home / "p").exists():
            assert tree(home / "p") == new, point
        else:
            get(oci(f"{IMAGE}:v1"), str(home / "p"), shelf())
        recover(str(home / "p"))
        assert sorted(os.listdir(home)) == ["p"], point


def test_without_exchange_a_killed_swap_is_finished_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no exchange here")

    monkeypatch.setattr(files, "exchange", unsupported)
    (tmp_path / "trace").mkdir()
    sample = prepared(tmp_path / "trace")
    old = tree(sample)
    points = traced(lambda: update(str(sample), shelf(), version="v2"))
    new = tree(sample)
    for point in [point for point in points if point[0].startswith("packages.swap")]:
        home = tmp_path / point[0]
        home.mkdir()
        path = prepared(home)
        killed_at(point, lambda path=path: update(str(path), shelf(), version="v2"))  # type: ignore[misc]
        recover(str(path))
        assert tree(path) in (old, new), point
        assert sorted(os.listdir(home)) == ["p"], point


def test_one_changed_file_leaves_the_directory_in_place(tmp_path: Path) -> None:
    """Also killed at every step: the file is the old or the new one, and leftovers are not content."""
    path = prepared(tmp_path)
    before = read_directory(str(path)).files
    after = {**before, "readme.md": file_of("theirs")}
    inode = path.stat().st_ino

    def work() -> None:
        with locked_package(str(path)) as fd:
            replace_package(str(path), fd, before, after)

    for point in ("packages.file.created", "packages.file.written", "packages.file.renamed"):
        killed_at((point, 1), work)
        assert read_directory(str(path)).files.keys() == before.keys()
        assert (path / "readme.md").read_text() in ("same", "theirs")
        recover(str(path))
        assert os.listdir(tmp_path) == ["p"], point
        (path / "readme.md").write_text("same")
    work()
    assert (path / "readme.md").read_text() == "theirs"
    assert path.stat().st_ino == inode


def test_unchanged_files_keep_their_inode_and_time(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    os.utime(path / "d1" / "c1.yaml", (1000, 1000))
    (path / "d1" / "c1.yaml").chmod(0o640)
    before = (path / "d1" / "c1.yaml").stat()
    update(str(path), shelf(), version="v2")
    after = (path / "d1" / "c1.yaml").stat()
    assert (before.st_ino, before.st_mtime, before.st_mode) == (after.st_ino, after.st_mtime, after.st_mode)


def test_a_changed_file_keeps_its_mode(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    (path / "d0" / "c0.yaml").chmod(0o600)
    update(str(path), shelf(), version="v2")
    assert "k: 2" in (path / "d0" / "c0.yaml").read_text()
    assert (path / "d0" / "c0.yaml").stat().st_mode & 0o777 == 0o600


def test_a_second_update_at_the_same_time_is_refused(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    with locked_package(str(path)), pytest.raises(Busy):
        update(str(path), shelf(), version="v2")


def test_an_edit_during_the_update_stops_it(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    before = read_directory(str(path)).files
    after = {**before, "readme.md": file_of("theirs")}
    (path / "readme.md").write_text("mine")
    with locked_package(str(path)) as fd, pytest.raises(ChangedMeanwhile):
        replace_package(str(path), fd, before, after)
    assert (path / "readme.md").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["p"]


def test_a_failing_disk_leaves_the_package_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = prepared(tmp_path)
    old = tree(path)
    monkeypatch.setattr(failpoints, "_armed", failpoints._Armed("packages.stage.file-created:3=ENOSPC"))
    with pytest.raises(Exception, match="No space left"):
        update(str(path), shelf(), version="v2")
    assert tree(path) == old
    assert sorted(os.listdir(tmp_path)) == ["p"]


def test_get_does_not_touch_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Exists):
        get(oci(f"{IMAGE}:v1"), str(tmp_path / "file"), shelf())
    with pytest.raises(Exception, match="parent directory"):
        get(oci(f"{IMAGE}:v1"), str(tmp_path / "a" / "b"), shelf())
    inside = get(oci(f"{IMAGE}:v1"), str(tmp_path), shelf())
    assert inside.path == str(tmp_path / "p")
