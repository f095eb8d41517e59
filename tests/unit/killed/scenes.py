"""What is killed: the commands pull, push, mount, unmount, rmi and gc, each on a store that is in use.

A scene has a store as it stands before (made once, copied for each run), the command, and what must be true
when the command was killed at any point and when it was then run to its end. Beside every scene another
image, which shares a layer with what the scene handles, stays mounted and must stay readable.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.content_store import blob
from tests.unit.store.crash_scenario import write
from unlade.cli import main
from unlade.model import Digest
from unlade.mount import find, unmount
from unlade.mount.table import read_table
from unlade.store import DirStore, collect
from unlade.store.gc import garbage
from unlade.tree import DirTrees, fsck

Listing = dict[str, tuple[object, ...]]


@dataclass(frozen=True)
class Place:
    """Where one run happens, and the registry that it talks to."""

    root: Path
    host: str
    number: int = 0

    @property
    def store(self) -> Path:
        """The store."""
        return self.root / "store"

    def words(self, *words: str) -> list[str]:
        """A command line: REGISTRY, OUT, AT, BY, SRC and RUN are put in."""
        names = {
            "REGISTRY": self.host,
            "OUT": str(self.root / "out"),
            "AT": str(self.root / "at"),
            "BY": str(self.root / "by"),
            "SRC": str(self.root / "src"),
            "RUN": str(self.number),
        }
        found = []
        for word in words:
            text = word
            for name, value in names.items():
                text = text.replace(name, value)
            found.append(text)
        return found


def run(place: Place, *words: str) -> int:
    """One command of ours in this process; its exit code."""
    command, *rest = place.words(*words)
    plain = ["--plain-http"] if command in ("pull", "push", "mount") else []
    where = [] if command == "push" else ["--store", str(place.store)]
    try:
        main([command, "-q", *plain, *where, *rest])
    except SystemExit as ended:
        return int(ended.code or 0)


def listing(root: Path) -> Listing:
    """Path → type, permissions, content or target."""
    found: Listing = {}
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = Path(directory) / name
            info = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
            target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
            found[str(path.relative_to(root))] = (info.st_mode, content, target)
    return found


@dataclass(frozen=True)
class Scene:
    """One command in one situation. `again` are the exit codes a second run may have beside 0.

    `trees` maps what the command makes (`out`, `at`) to the references whose content it may hold.
    """

    name: str
    command: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    prepare: Callable[[Place], None] | None = None
    mounts: tuple[tuple[str, ...], ...] = ()
    trees: dict[str, tuple[str, ...]] = field(default_factory=dict)
    final: dict[str, str | None] = field(default_factory=dict)
    again: tuple[int, ...] = ()
    pushed: str = ""

    def set_up(self, place: Place) -> None:
        """The store as it stands before, without mounts; done once."""
        place.root.mkdir()
        for name in ("at", "by"):
            (place.root / name).mkdir()
        # Present, so that mounting it in each run is quick.
        succeed(place, "mount", "REGISTRY/by:v1", "BY")
        succeed(place, "unmount", "BY")
        for words in self.before:
            succeed(place, *words)
        if self.prepare is not None:
            self.prepare(place)

    def begin(self, place: Place) -> None:
        """What cannot be copied: mounts, and what is in the registry."""
        succeed(place, "mount", "--pull", "never", "REGISTRY/by:v1", "BY")
        for words in self.mounts:
            succeed(place, *words)

    def check_killed(self, place: Place, contents: dict[str, Listing]) -> None:
        """Sound whatever happened: the store, the bystander, and what is visible of the result."""
        with DirStore(place.store) as store:
            problems = fsck(store)
            assert problems == [], f"after the kill: {problems}"
            assert os.listdir(store.layout.staging) == []
            assert os.listdir(store.layout.trash) == []
        assert listing(place.root / "by") == contents["by:v1"], "what is mounted stays readable"
        for name, allowed in self.trees.items():
            path = place.root / name
            seen = listing(path) if path.exists() else {}
            assert seen == {} or seen in [contents[one] for one in allowed], (
                f"{name} is neither whole nor absent"
            )
        if self.pushed:
            self._check_pushed(place, contents)

    def check_done(self, place: Place, contents: dict[str, Listing]) -> None:
        """The command's own result; then everything can go, and goes."""
        assert listing(place.root / "by") == contents["by:v1"]
        for name, wanted in self.final.items():
            path = place.root / name
            seen = listing(path) if path.exists() else {}
            assert seen == (contents[wanted] if wanted else {}), name
        if self.pushed:
            self._check_pushed(place, contents, final=True)
        left = [name for name in os.listdir(place.root) if name.startswith(".out.unlade-")]
        assert left == [], "a killed delivery's staging goes with the next one"
        with DirStore(place.store) as store:
            assert fsck(store) == [], "after the retry"
            collect(store, mounted=[entry.path for entry in read_table()])
            assert garbage(store) == []
            for one in (store.layout.staging, store.layout.trash, store.layout.locks):
                assert os.listdir(one) == []
            assert store.leases.all() == []
            assert {record.mountpoint for record in store.mounts.all()} == {
                os.fsencode(place.root / name)
                for name in ("at", "by")
                if find(os.fsencode(place.root / name))
            }
        assert listing(place.root / "by") == contents["by:v1"], "a collection leaves what is mounted"

    def _check_pushed(self, place: Place, contents: dict[str, Listing], *, final: bool = False) -> None:
        """The tag names something whole: what it named before, or what was pushed."""
        back = Place(place.root / "back", place.host, place.number)
        back.root.mkdir()
        succeed(back, "pull", self.pushed, "OUT")
        seen = listing(back.root / "out")
        shutil.rmtree(back.root)
        new = listing(place.root / "src")
        assert seen == new or (not final and seen == contents["old"]), "the tag's content is whole"


def succeed(place: Place, *words: str) -> None:
    """A command that must end well."""
    code = run(place, *words)
    assert code == 0, f"{' '.join(words)}: exit {code}"


def clear(place: Place) -> None:
    """Take mounts and files away."""
    for name in ("at", "by"):
        while find(os.fsencode(place.root / name)):
            unmount(str(place.root / name), lazy=True)
    with suppress(FileNotFoundError):
        shutil.rmtree(place.root)


def _litter(place: Place) -> None:
    """Garbage of every kind: blobs in chains, trees, a partial, strays, a dead process' lease."""
    with DirStore(place.store) as store:
        parent = None
        for number in range(12):
            data = b"garbage %d" % number
            store.put(blob(data), data, children=[parent] if parent else [])
            parent = Digest.of(data)
        for number in range(6):
            with DirTrees(store).stage(Digest.of(b"tree %d" % number)) as staging:
                write(staging, "file", b"text")
                staging.commit(size=4)
        partial = store.layout.partial(Digest.of(b"partial"))
        partial.write_bytes(b"par")
        os.utime(partial, (0, 0))
        store.layout.blob(Digest.of(b"stray")).write_bytes(b"stray")


def _source(place: Place) -> None:
    source = place.root / "src"
    for number in range(8):
        (source / f"d{number % 3}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 3}" / f"f{number}").write_bytes(b"%d" % number * 3000)


OLD = {"d0/old": b"what the tag named before"}
_PUSHED = "REGISTRY/pushed-RUN:v1"

SCENES: Sequence[Scene] = (
    Scene("pull", ("pull", "REGISTRY/app:v1")),
    Scene("pull an index", ("pull", "REGISTRY/index:v1")),
    Scene(
        "pull an update",
        ("pull", "REGISTRY/app:v2"),
        before=(("pull", "REGISTRY/app:v1"),),
    ),
    Scene(
        "pull DIR",
        ("pull", "REGISTRY/app:v1", "OUT"),
        trees={"out": ("app:v1",)},
        final={"out": "app:v1"},
        again=(3,),
    ),
    Scene(
        "pull --replace",
        ("pull", "--replace", "REGISTRY/model:v1", "OUT"),
        before=(("pull", "REGISTRY/app:v2", "OUT"),),
        trees={"out": ("app:v2", "model:v1")},
        final={"out": "model:v1"},
    ),
    Scene(
        "mount",
        ("mount", "REGISTRY/app:v1", "AT"),
        trees={"at": ("app:v1",)},
        final={"at": "app:v1"},
        again=(10,),
    ),
    Scene(
        "mount --keep-blobs",
        ("mount", "--keep-blobs", "REGISTRY/app:v2", "AT"),
        before=(("pull", "REGISTRY/app:v1"),),
        trees={"at": ("app:v2",)},
        final={"at": "app:v2"},
        again=(10,),
    ),
    Scene(
        "mount an artifact",
        ("mount", "REGISTRY/model:v1", "AT"),
        trees={"at": ("model:v1",)},
        final={"at": "model:v1"},
        again=(10,),
    ),
    Scene(
        "unmount",
        ("unmount", "AT"),
        before=(("mount", "REGISTRY/app:v1", "AT"), ("unmount", "AT")),
        mounts=(("mount", "--pull", "never", "REGISTRY/app:v1", "AT"),),
        trees={"at": ("app:v1",)},
        final={"at": None},
        again=(10,),
    ),
    Scene(
        "rmi",
        ("rmi", "REGISTRY/app:v1"),
        before=(
            ("pull", "REGISTRY/app:v1"),
            ("mount", "REGISTRY/app:v2", "AT"),
            ("unmount", "AT"),
        ),
        mounts=(("mount", "--pull", "never", "REGISTRY/app:v2", "AT"),),
        trees={"at": ("app:v2",)},
        final={"at": "app:v2"},
        again=(9,),
    ),
    Scene(
        "gc",
        ("gc",),
        before=(("mount", "REGISTRY/app:v2", "AT"), ("unmount", "AT"), ("pull", "REGISTRY/model:v1")),
        prepare=_litter,
        mounts=(("mount", "--pull", "never", "REGISTRY/app:v2", "AT"),),
        trees={"at": ("app:v2",)},
        final={"at": "app:v2"},
    ),
    Scene(
        "push",
        ("push", "--image", "SRC", _PUSHED),
        prepare=_source,
        pushed=_PUSHED,
    ),
    Scene(
        "push files",
        ("push", *(f"SRC/d{number % 3}/f{number}" for number in range(8)), "REGISTRY/files-RUN:v1"),
        prepare=_source,
    ),
)
