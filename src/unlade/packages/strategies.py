"""The four update strategies, as functions from three snapshots to one.

resource-merge: the three-way merge, package by package: the root and every sub-package without an upstream
of its own. fast-forward: refuse when local differs from the base, else take upstream. force-delete-replace:
take upstream, keep the root Kptfile. copy-merge: upstream's files over local's, local additions stay. A
sub-package with its own upstream is not touched here beyond what the parent says of it: update handles it
as a package in its own right. Nothing here reads or writes a disk.
"""

from dataclasses import dataclass, field

from unlade.errors import InvalidInput, MergeConflict
from unlade.packages.compare import same_text
from unlade.packages.decisions import Decision, OnConflict
from unlade.packages.ignore import resource_files
from unlade.packages.kptfile import Kptfile, Strategy
from unlade.packages.kptmerge import merge_kptfile
from unlade.packages.plainfiles import merge_plain_files
from unlade.packages.resources import marked_text, merge_file
from unlade.packages.snapshot import (
    KPTFILE,
    File,
    Snapshot,
    below,
    file_of,
    has_directory,
    inside_any,
    is_krm,
    own_files,
    package_directories,
)
from unlade.packages.yamltext import YamlSyntaxError, parse_documents


class LocalChanges(MergeConflict):
    """fast-forward on a package that was edited."""

    code = "local-changes"


class AddedTwice(InvalidInput):
    """The same sub-package was added on both sides: there is no base to merge with."""

    code = "added-twice"


@dataclass(slots=True)
class Merged:
    """The new files of a package, and everything that was decided on the way."""

    files: Snapshot
    decisions: list[Decision] = field(default_factory=list)

    @property
    def conflicts(self) -> list[Decision]:
        """The decisions that were conflicts."""
        return [decision for decision in self.decisions if decision.conflict]


def has_upstream(files: Snapshot, directory: str) -> bool:
    """Whether the Kptfile of this directory names an upstream; BadKptfile when it cannot be read."""
    found = files.get(f"{directory}/{KPTFILE}")
    if found is None:
        return False
    return Kptfile(found.text, name=f"{directory}/{KPTFILE}").upstream is not None


def remote_directories(*sides: Snapshot) -> list[str]:
    """Direct sub-packages with an upstream of their own, on any side, parents first."""
    found: set[str] = set()
    for files in sides:
        directories = set(package_directories(files))
        found.update(
            directory
            for directory in directories
            if not inside_any(directory, directories) and has_upstream(files, directory)
        )
    return sorted(found)


def local_directories(*sides: Snapshot) -> list[str]:
    """Sub-packages without an upstream of their own, on any side, outside those that have one."""
    remote = set(remote_directories(*sides))
    found: set[str] = set()
    for files in sides:
        found.update(
            directory
            for directory in package_directories(files)
            if directory not in remote
            and not inside_any(directory, remote)
            and not has_upstream(files, directory)
        )
    return sorted(found)


def apply(
    strategy: Strategy,
    local: Snapshot,
    base: Snapshot,
    upstream: Snapshot,
    *,
    is_root: bool = True,
    policy: OnConflict = "kpt",
) -> Merged:
    """Update one package, its local sub-packages included, with a strategy."""
    if strategy == "resource-merge":
        return _resource_merge(local, base, upstream, is_root=is_root, policy=policy)
    if strategy == "copy-merge":
        return _copy_merge(local, base, upstream, is_root=is_root, policy=policy)
    if strategy == "fast-forward":
        changed = local_changes(local, base)
        if changed:
            shown = ", ".join(changed[:10]) + (", …" if len(changed) > 10 else "")
            raise LocalChanges(
                f"local package files have been modified: {shown}",
                next_step="use --strategy resource-merge, or force-delete-replace to lose the changes",
            )
    return _replace(local, base, upstream, is_root=is_root, forward=strategy == "fast-forward")


# -- resource-merge ------------------------------------------------------------------------------


def _resource_merge(
    local: Snapshot, base: Snapshot, upstream: Snapshot, *, is_root: bool, policy: OnConflict
) -> Merged:
    merged = Merged(dict(local))
    for directory in ["", *local_directories(local, upstream, base)]:
        _unit(merged, base, upstream, directory, is_root=is_root and not directory, policy=policy)
    return merged


def _unit(
    merged: Merged, base: Snapshot, upstream: Snapshot, directory: str, *, is_root: bool, policy: OnConflict
) -> None:
    """Merge the package at one directory into merged.files."""
    prefix = directory + "/" if directory else ""
    has_base, has_new = has_directory(base, directory), has_directory(upstream, directory)
    has_local = has_directory(merged.files, directory)
    if not has_base and has_local and has_new:
        raise AddedTwice(
            f"sub-package {directory!r} was added both locally and upstream",
            next_step="move the local one to another directory, then update",
        )
    if not has_local:
        if has_new and not has_base:
            for path, file in own_files(below(upstream, directory)).items():
                merged.files[prefix + path] = file
            merged.decisions.append(Decision(directory, "", "upstream", False, "sub-package added upstream"))
        elif has_new:
            merged.decisions.append(Decision(directory, "", "local", False, "sub-package deleted locally"))
        return
    if not has_new:
        if has_base:
            _deleted_upstream(merged, base, directory, policy)
        return
    sides = (below(merged.files, directory), below(base, directory), below(upstream, directory))
    changes = _merge_package(*sides, prefix, merged.decisions, is_root=is_root, policy=policy)
    for path, change in changes.items():
        if change is None:
            merged.files.pop(prefix + path, None)
        else:
            merged.files[prefix + path] = change


def _deleted_upstream(merged: Merged, base: Snapshot, directory: str, policy: OnConflict) -> None:
    changed = local_changes(below(merged.files, directory), below(base, directory), nested=False)
    if changed and policy != "upstream":
        reason = "sub-package deleted upstream, but changed locally: kept"
        merged.decisions.append(Decision(directory, "", "local", True, reason))
        return
    merged.files = {p: f for p, f in merged.files.items() if not p.startswith(directory + "/")}
    reason = "sub-package deleted upstream"
    merged.decisions.append(Decision(directory, "", "upstream", bool(changed), reason))


def _merge_package(
    local: Snapshot,
    base: Snapshot,
    upstream: Snapshot,
    prefix: str,
    decisions: list[Decision],
    *,
    is_root: bool,
    policy: OnConflict,
) -> dict[str, File | None]:
    """The changed files of one package; local's own sub-package boundaries count on every side."""
    changes: dict[str, File | None] = {}
    kptfile = _merged_kptfile(local, base, upstream, prefix, decisions, is_root=is_root, policy=policy)
    if kptfile is not None:
        changes[KPTFILE] = kptfile
    # A plain directory that became a package upstream is that package's business, not this one's.
    boundaries = package_directories(local) + package_directories(upstream)
    mine, old, new = (resource_files(side, boundaries) for side in (local, base, upstream))
    for path in sorted(mine.keys() | old.keys() | new.keys()):
        ours, before, theirs = mine.get(path), old.get(path), new.get(path)
        outcome = merge_file(
            prefix + path,
            None if before is None else before.text,
            None if ours is None else ours.text,
            None if theirs is None else theirs.text,
            policy=policy,
        )
        decisions += outcome.decisions
        if outcome.text is None:
            if ours is not None:
                changes[path] = None
        elif ours is None:
            if path not in local:
                changes[path] = file_of(outcome.text, theirs.mode if theirs is not None else 0o644)
        elif outcome.text != ours.text:
            changes[path] = file_of(outcome.text, ours.mode)
    plain, more = merge_plain_files(local, base, upstream, where=prefix, policy=policy, boundaries=boundaries)
    decisions += more
    changes.update(plain)
    return changes


def _merged_kptfile(
    local: Snapshot,
    base: Snapshot,
    upstream: Snapshot,
    prefix: str,
    decisions: list[Decision],
    *,
    is_root: bool,
    policy: OnConflict,
) -> File | None:
    """Local's Kptfile after the merge, or None when nothing changed."""
    ours, before, theirs = (side.get(KPTFILE) for side in (local, base, upstream))
    label = prefix + KPTFILE
    if ours is None:
        # A plain directory became a package upstream: its Kptfile arrives like any new file.
        return theirs
    if before is not None and theirs is not None and before.data == theirs.data == ours.data:
        return None
    mine = Kptfile(ours.text, name=f"{label} (local)")
    old = Kptfile(before.text, name=f"{label} (base)") if before is not None else Kptfile.fresh(mine.name)
    new = Kptfile(theirs.text, name=f"{label} (upstream)") if theirs is not None else Kptfile.fresh(mine.name)
    decisions += merge_kptfile(mine, old, new, where=label, policy=policy)
    if not is_root and theirs is not None:
        mine.copy_section("upstream", new)
        mine.copy_section("upstreamLock", new)
    text = mine.render()
    return file_of(text, ours.mode) if text != ours.text else None


# -- fast-forward and force-delete-replace -------------------------------------------------------


def local_changes(local: Snapshot, base: Snapshot, *, nested: bool = True) -> list[str]:
    """The files in which local differs from the base as kpt judges: marks and blank lines do not count."""
    remote = set(remote_directories(local, base))
    mine = {p: f for p, f in (local if nested else own_files(local)).items() if not inside_any(p, remote)}
    old = {p: f for p, f in (base if nested else own_files(base)).items() if not inside_any(p, remote)}
    changed = []
    for path in sorted(mine.keys() | old.keys()):
        ours, before = mine.get(path), old.get(path)
        if path == KPTFILE:
            if ours is not None and not _same_kptfile(ours, before):
                changed.append(path)
        elif (
            ours is None
            or before is None
            or (ours.data != before.data and not (is_krm(path) and _same_resources(path, ours, before)))
        ):
            changed.append(path)
    return changed


def _same_resources(path: str, ours: File, before: File) -> bool:
    texts = [marked_text(file.text, path=path) for file in (ours, before)]
    if texts[0] == texts[1]:
        return True
    try:
        mine, old = ([doc.root for doc in parse_documents(text) if doc.root is not None] for text in texts)
    except YamlSyntaxError:
        return False
    return len(mine) == len(old) and all(same_text(a, b) for a, b in zip(mine, old, strict=True))


def _same_kptfile(ours: File, before: File | None) -> bool:
    """Equal apart from name, upstream and lock; a Kptfile that get made up counts as none."""
    mine = Kptfile(ours.text)
    other = Kptfile(before.text) if before is not None else Kptfile.fresh(mine.name)
    probe = Kptfile(ours.text)
    decisions = merge_kptfile(probe, mine, other, where=KPTFILE, policy="kpt")
    back = merge_kptfile(Kptfile(ours.text), other, mine, where=KPTFILE, policy="kpt")
    return not decisions and not back


def _replace(local: Snapshot, base: Snapshot, upstream: Snapshot, *, is_root: bool, forward: bool) -> Merged:
    remote = set(remote_directories(local))
    theirs = set(remote_directories(upstream))
    merged = Merged(
        {p: f for p, f in local.items() if inside_any(p, remote)}
        | {p: f for p, f in upstream.items() if not inside_any(p, remote | theirs)}
    )
    ours = local.get(KPTFILE)
    if is_root and ours is not None:
        merged.files[KPTFILE] = ours
        if forward:
            # Local is as fetched, so upstream's changes to the Kptfile apply cleanly; kpt leaves them out,
            # and then its next fast-forward fails.
            fresh = _merged_kptfile(local, base, upstream, "", merged.decisions, is_root=True, policy="kpt")
            merged.files[KPTFILE] = fresh or ours
    return merged


def _copy_merge(
    local: Snapshot, base: Snapshot, upstream: Snapshot, *, is_root: bool, policy: OnConflict
) -> Merged:
    merged = Merged(dict(local))
    kptfile = _merged_kptfile(local, base, upstream, "", merged.decisions, is_root=is_root, policy=policy)
    remote = set(remote_directories(local))
    for path in base:
        if path not in upstream and path != KPTFILE and not inside_any(path, remote):
            merged.files.pop(path, None)
    for path, file in upstream.items():
        if path != KPTFILE and not inside_any(path, remote):
            merged.files[path] = file
    if kptfile is not None:
        merged.files[KPTFILE] = kptfile
    return merged


def marked(files: Snapshot, *, attribute: bool = False) -> Snapshot:
    """The files with identity marks on every resource, sub-packages included."""
    out = dict(files)
    for directory in ["", *package_directories(files)]:
        prefix = directory + "/" if directory else ""
        for path, file in resource_files(below(files, directory)).items():
            text = file.text
            fresh = marked_text(text, path=prefix + path, attribute=attribute)
            if fresh is not text and fresh != text:
                out[prefix + path] = file_of(fresh, file.mode)
    return out
