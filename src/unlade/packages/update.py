"""`pkg update`: a package and its sub-packages brought to another version of their upstreams (P2, P7, P8).

The whole update is computed in memory from three snapshots (the locked base, local, upstream), the root
first, then every sub-package that has an upstream of its own. Only when all of it is known is anything
written, in one exchange of directories (ondisk). So a failure or a conflict under --on-conflict fail leaves
the package as it was, lock and version included, and running the same update again changes nothing.
"""

import os
from dataclasses import dataclass, field, replace

from unlade.errors import InvalidInput, MergeConflict
from unlade.packages.decisions import Decision, OnConflict
from unlade.packages.kptfile import GitUpstream, Kptfile, OciUpstream, Strategy, Upstream
from unlade.packages.location import at_version
from unlade.packages.ondisk import locked_package, replace_package
from unlade.packages.snapshot import (
    KPTFILE,
    File,
    NotAPackage,
    Snapshot,
    below,
    file_of,
    own_files,
    read_directory,
)
from unlade.packages.sources import PackageSource
from unlade.packages.strategies import AddedTwice, apply, local_changes, marked, remote_directories


class NoUpstream(InvalidInput):
    """The package has no upstream to update from."""

    code = "no-upstream"


class Conflicts(MergeConflict):
    """--on-conflict fail, and there were some; nothing was written."""

    code = "conflicts"

    def __init__(self, decisions: list[Decision]) -> None:
        first = "; ".join(str(decision) for decision in decisions[:3])
        more = f" and {len(decisions) - 3} more" if len(decisions) > 3 else ""
        super().__init__(
            f"{len(decisions)} conflict(s): {first}{more}",
            next_step="look with --dry-run -o json, then choose --on-conflict upstream, local or markers",
        )
        self.decisions = decisions


@dataclass(frozen=True, slots=True)
class PackageUpdate:
    """One package of an update: its directory ("" for the root), and how its upstream moved."""

    directory: str
    strategy: Strategy
    upstream: Upstream
    old_lock: Upstream | None
    new_lock: Upstream


@dataclass(slots=True)
class Update:
    """The outcome: packages updated, decisions in order, files before and after."""

    packages: list[PackageUpdate] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    before: Snapshot = field(default_factory=dict)
    after: Snapshot = field(default_factory=dict)
    links: tuple[str, ...] = ()

    @property
    def conflicts(self) -> list[Decision]:
        """The decisions that were conflicts."""
        return [decision for decision in self.decisions if decision.conflict]

    @property
    def changed(self) -> list[str]:
        """Paths that the update adds, rewrites or removes."""
        paths = self.before.keys() | self.after.keys()
        return sorted(path for path in paths if self.before.get(path) != self.after.get(path))


def update(
    path: str,
    sources: PackageSource,
    *,
    version: str = "",
    strategy: Strategy | None = None,
    policy: OnConflict = "kpt",
    dry_run: bool = False,
) -> Update:
    """Update the package at path; version "" keeps its tag or branch and looks at it again."""
    with locked_package(path) as package_fd:
        read = read_directory(path)
        outcome = plan_update(read.files, path, sources, version=version, strategy=strategy, policy=policy)
        outcome.links = read.links
        if policy == "fail" and outcome.conflicts:
            raise Conflicts(outcome.conflicts)
        if not dry_run and outcome.changed:
            replace_package(path, package_fd, outcome.before, outcome.after)
    return outcome


def plan_update(
    files: Snapshot,
    name: str,
    sources: PackageSource,
    *,
    version: str = "",
    strategy: Strategy | None = None,
    policy: OnConflict = "kpt",
) -> Update:
    """Compute an update without writing anything."""
    if KPTFILE not in files:
        raise NotAPackage(f"no Kptfile found at {name!r}", next_step="name a package's directory")
    outcome = Update(before=files, after=dict(files))
    root = Kptfile(files[KPTFILE].text, name=os.path.join(name, KPTFILE))
    was = root.upstream
    if was is None:
        raise NoUpstream(
            f"{name}: package must have an upstream reference",
            next_step="fetch packages with `unlade pkg get`",
        )
    target = at_version(was, version) if version else was
    _update_one(outcome, "", target, strategy or root.strategy or "resource-merge", sources, policy)
    stack = _remote_below(outcome.after, "")
    while stack:
        directory = stack.pop()
        found = outcome.after.get(f"{directory}/{KPTFILE}")
        if found is None:
            continue
        kptfile = Kptfile(found.text, name=f"{directory}/{KPTFILE}")
        upstream = kptfile.upstream
        assert upstream is not None  # _remote_below lists only those
        follows = bool(version) and _follows_root(upstream, was)
        chosen = (strategy if follows else None) or kptfile.strategy or "resource-merge"
        fresh = at_version(upstream, version) if follows else upstream
        _update_one(outcome, directory, fresh, chosen, sources, policy)
        stack += _remote_below(outcome.after, directory)
    outcome.after = marked(outcome.after)
    return outcome


def _remote_below(files: Snapshot, directory: str) -> list[str]:
    prefix = directory + "/" if directory else ""
    return [prefix + found for found in reversed(remote_directories(below(files, directory)))]


def _follows_root(upstream: Upstream, root: Upstream) -> bool:
    """A sub-package from the same place at the same version moves with the root."""
    if isinstance(upstream, GitUpstream) and isinstance(root, GitUpstream):
        same = (upstream.repo, upstream.ref) == (root.repo, root.ref)
    elif isinstance(upstream, OciUpstream) and isinstance(root, OciUpstream):
        same = upstream.image == root.image
    else:
        return False
    outer = root.directory.rstrip("/") + "/"
    return same and (upstream.directory.rstrip("/") + "/").startswith(outer)


def _update_one(
    outcome: Update,
    directory: str,
    upstream: Upstream,
    strategy: Strategy,
    sources: PackageSource,
    policy: OnConflict,
) -> None:
    """Update the package at one directory of the outcome from its own upstream."""
    prefix = directory + "/" if directory else ""
    local = below(outcome.after, directory)
    kptfile = Kptfile(local[KPTFILE].text, name=prefix + KPTFILE)
    lock = kptfile.lock
    compat = kptfile.compatible
    new = sources.fetch(upstream)
    base: Snapshot = sources.fetch(lock).files if lock is not None else {}
    merged = apply(strategy, local, base, new.files, policy=policy)
    files = merged.files
    for sub in remote_directories(local, new.files, base):
        files = _parent_says(files, base, new.files, sub, merged.decisions, policy)
    shown = [
        replace(decision, where=prefix + decision.where) if prefix else decision
        for decision in merged.decisions
    ]
    outcome.decisions += shown
    fresh = Kptfile(files[KPTFILE].text, name=prefix + KPTFILE)
    fresh.set_upstream(new.upstream, strategy, compat=compat)
    fresh.set_lock(new.lock, compat=compat)
    files[KPTFILE] = file_of(fresh.render(), files[KPTFILE].mode)
    outcome.after = {p: f for p, f in outcome.after.items() if prefix and not p.startswith(prefix)}
    outcome.after.update({prefix + p: f for p, f in files.items()})
    outcome.packages.append(PackageUpdate(directory, strategy, new.upstream, lock, new.lock))


def _parent_says(
    files: Snapshot,
    base: Snapshot,
    upstream: Snapshot,
    sub: str,
    decisions: list[Decision],
    policy: OnConflict,
) -> Snapshot:
    """What the parent's upstream did to a sub-package that has an upstream of its own."""
    key = f"{sub}/{KPTFILE}"
    in_local, in_base, in_new = key in files, key in base, key in upstream
    if in_local and in_new and not in_base:
        raise AddedTwice(
            f"sub-package {sub!r} was added both locally and upstream",
            next_step="move the local one to another directory, then update",
        )
    if in_new and not in_local:
        if in_base:
            decisions.append(Decision(sub, "", "local", False, "sub-package deleted locally"))
            return files
        decisions.append(Decision(sub, "", "upstream", False, "sub-package added upstream"))
        return {**files, **_prefixed(sub, own_files(below(upstream, sub)))}
    if not in_local or not in_base:
        return files
    if not in_new:
        if local_changes(below(files, sub), below(base, sub)):
            decisions.append(
                Decision(sub, "", "local", True, "sub-package deleted upstream, changed locally: kept")
            )
            return files
        decisions.append(Decision(sub, "", "upstream", False, "sub-package deleted upstream"))
        return {path: file for path, file in files.items() if not path.startswith(sub + "/")}
    mine, old = (Kptfile(side[key].text, name=key) for side in (files, base))
    if mine.upstream != old.upstream:
        # Updated on its own since it was fetched: the parent no longer decides its version.
        return files
    merged = apply(
        mine.strategy or "resource-merge",
        below(files, sub),
        below(base, sub),
        below(upstream, sub),
        is_root=False,
        policy=policy,
    )
    decisions += [replace(decision, where=f"{sub}/{decision.where}") for decision in merged.decisions]
    kept = {path: file for path, file in files.items() if not path.startswith(sub + "/")}
    return {**kept, **_prefixed(sub, merged.files)}


def _prefixed(directory: str, files: Snapshot) -> dict[str, File]:
    return {f"{directory}/{path}": file for path, file in files.items()}
