"""`pkg diff`: what local, the upstream it is at, and a target version differ in (P3).

kpt's types: local (upstream at the lock to local), remote (lock to target), combined (target against local),
3way (all three). The base is the lock, so a tag that moved shows no phantom edits. Identity marks are added
on every side before comparing and the root Kptfile is left out, as in kpt; unlike kpt, directories are
followed to the bottom and lines that differ are shown in one unified diff.
"""

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from unlade.packages.kptfile import Kptfile
from unlade.packages.location import at_version
from unlade.packages.snapshot import KPTFILE, File, NotAPackage, Snapshot, inside_any, read_directory
from unlade.packages.sources import PackageSource
from unlade.packages.strategies import marked, remote_directories
from unlade.packages.update import NoUpstream

DiffType = Literal["local", "remote", "combined", "3way"]
DIFF_TYPES: tuple[DiffType, ...] = ("local", "remote", "combined", "3way")


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: a short name and its files."""

    name: str
    files: Snapshot


@dataclass(frozen=True, slots=True)
class FileDiff:
    """One file that differs: its lines as a unified diff, None on a side that lacks it."""

    path: str
    old: File | None
    new: File | None
    old_name: str
    new_name: str

    def lines(self, context: int = 3) -> Iterator[str]:
        """Unified diff lines without newlines; binary files say only that they differ."""
        texts = [_lines(file) for file in (self.old, self.new)]
        if texts[0] is None or texts[1] is None:
            yield f"Binary files {self.old_name}/{self.path} and {self.new_name}/{self.path} differ"
            return
        names = [
            f"{name}/{self.path}" if file is not None else "/dev/null"
            for name, file in ((self.old_name, self.old), (self.new_name, self.new))
        ]
        yield from difflib.unified_diff(texts[0], texts[1], names[0], names[1], lineterm="", n=context)


def _lines(file: File | None) -> list[str] | None:
    if file is None:
        return []
    try:
        text = file.data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.splitlines()


def sides(path: str, sources: PackageSource, *, version: str = "", kind: DiffType = "local") -> list[Side]:
    """The two (or for 3way three) sides of a comparison, ready to be compared."""
    read = read_directory(path)
    if KPTFILE not in read.files:
        raise NotAPackage(f"no Kptfile found at {path!r}", next_step="name a package's directory")
    kptfile = Kptfile(read.files[KPTFILE].text, name=os.path.join(path, KPTFILE))
    upstream, lock = kptfile.upstream, kptfile.lock
    if upstream is None:
        raise NoUpstream(f"{path}: package must have an upstream reference")
    made: dict[str, Side] = {}

    def local() -> Side:
        return made.setdefault("local", Side("local", _comparable(read.files)))

    def base() -> Side:
        wanted = lock if lock is not None else upstream
        return made.setdefault("base", Side("upstream", _comparable(sources.fetch(wanted).files)))

    def target() -> Side:
        wanted = at_version(upstream, version) if version else upstream
        return made.setdefault("target", Side("target", _comparable(sources.fetch(wanted).files)))

    if kind == "local":
        return [base(), local()]
    if kind == "remote":
        return [base(), target()]
    if kind == "combined":
        return [target(), local()]
    return [base(), local(), target()]


def _comparable(files: Snapshot) -> Snapshot:
    """Marked, without the root Kptfile and without sub-packages that have an upstream of their own."""
    remote = set(remote_directories(files))
    kept = {path: file for path, file in files.items() if path != KPTFILE and not inside_any(path, remote)}
    return marked(kept)


def compare(old: Side, new: Side) -> list[FileDiff]:
    """The files in which two sides differ, by path."""
    found = []
    for path in sorted(old.files.keys() | new.files.keys()):
        before, after = old.files.get(path), new.files.get(path)
        if before is None or after is None or before.data != after.data:
            found.append(FileDiff(path, before, after, old.name, new.name))
    return found
