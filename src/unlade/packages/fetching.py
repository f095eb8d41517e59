"""`pkg get` and `pkg pull`: an upstream becomes a directory (P1, P4, P10).

get makes a new package that has the fetched one as its upstream: its Kptfile takes the directory's name,
upstream and lock, every resource is marked with its identity, and sub-packages that only name an upstream
are fetched too. pull is a working copy of the very package: content unchanged, with the image remembered
as the origin to push back to.
"""

import os
from dataclasses import dataclass

from unlade.packages.kptfile import Kptfile, OciUpstream, Strategy, Upstream
from unlade.packages.location import default_directory
from unlade.packages.ondisk import Exists, write_new
from unlade.packages.snapshot import KPTFILE, NotAPackage, Snapshot, file_of, package_directories
from unlade.packages.sources import Fetched, PackageSource
from unlade.packages.strategies import marked


@dataclass(frozen=True, slots=True)
class Got:
    """What was fetched, where to, and how many packages; links were left out."""

    path: str
    packages: int
    upstream: Upstream
    lock: Upstream
    files: int
    links: tuple[str, ...]


def destination(path: str | None, location: Upstream) -> str:
    """Where a package goes: the named directory, inside it when it exists, or a default name."""
    name = default_directory(location)
    if not path:
        path = name
    elif os.path.isdir(path):
        path = os.path.join(path, name)
    if os.path.lexists(path):
        raise Exists(f"destination directory {path!r} already exists", next_step="choose another name")
    return path


def get(
    location: Upstream,
    path: str | None,
    sources: PackageSource,
    *,
    strategy: Strategy = "resource-merge",
    compat: bool = False,
) -> Got:
    """Fetch a package as a new one downstream of it."""
    target = destination(path, location)
    fetched = sources.fetch(location)
    files, count = _as_downstream(
        fetched, os.path.basename(os.path.abspath(target)), strategy, compat, sources
    )
    files = marked(files, attribute=not os.environ.get("KPT_DISABLE_ATTRIBUTION"))
    write_new(target, files)
    return Got(target, count, fetched.upstream, fetched.lock, len(files), fetched.links)


def _as_downstream(
    fetched: Fetched, name: str, strategy: Strategy, compat: bool, sources: PackageSource
) -> tuple[Snapshot, int]:
    files = dict(fetched.files)
    if not files:
        raise NotAPackage(f"{fetched.upstream} is empty")
    found = files.get(KPTFILE)
    kptfile = (
        Kptfile(found.text, name=f"{fetched.upstream} Kptfile") if found is not None else Kptfile.fresh(name)
    )
    kptfile.set_origin("")
    kptfile.set_name(name)
    kptfile.set_upstream(fetched.upstream, strategy, compat=compat)
    kptfile.set_lock(fetched.lock, compat=compat)
    files[KPTFILE] = file_of(kptfile.render(), found.mode if found is not None else 0o644)
    count = 1
    waiting = package_directories(files)
    while waiting:
        directory = waiting.pop(0)
        key = f"{directory}/{KPTFILE}"
        sub = Kptfile(files[key].text, name=key)
        upstream = sub.upstream
        if upstream is None or sub.lock is not None:
            continue
        inner = sources.fetch(upstream)
        below, more = _as_downstream(
            inner,
            sub.name or directory.rsplit("/", 1)[-1],
            sub.strategy or "resource-merge",
            sub.compatible,
            sources,
        )
        files.update({f"{directory}/{rel}": file for rel, file in below.items()})
        count += more
    return files, count


def pull(location: Upstream, path: str | None, sources: PackageSource) -> Got:
    """Fetch a package as it is, to be edited and pushed back."""
    target = destination(path, location)
    fetched = sources.fetch(location)
    files = dict(fetched.files)
    if KPTFILE not in files:
        raise NotAPackage(
            f"{location} has no Kptfile at its root",
            next_step="use `unlade pull` for content that is no package",
        )
    if isinstance(location, OciUpstream) and location.directory == "/":
        kptfile = Kptfile(files[KPTFILE].text, name=f"{location} Kptfile")
        kptfile.set_origin(_origin(location))
        files[KPTFILE] = file_of(kptfile.render(), files[KPTFILE].mode)
    write_new(target, files)
    return Got(target, 1, fetched.upstream, fetched.lock, len(files), fetched.links)


def _origin(location: OciUpstream) -> str:
    """The origin to remember: a tag to push to; a digest names none, so its repository alone."""
    reference = location.reference
    return f"{reference.name}:{reference.tag}" if reference.tag else reference.name
