"""Where packages come from: one call for images and for git, with the merge base kept locally (P7).

An image is resolved to its digest once, taken into the store under that digest, and unpacked from there by
the engine: so the base of a later merge is at hand after its tag has moved or its repository is gone. What
an image holds is checked before anything else sees it: a package has no links and a lock is a digest.
"""

import os
import tempfile
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from unlade.delivery import Directory, Engine, InStore, Request
from unlade.errors import StoreError
from unlade.model import Deadline, Digest, Reference
from unlade.packages.gitsource import default_branch, fetch_git
from unlade.packages.kptfile import GitUpstream, OciUpstream, Upstream, locked
from unlade.packages.snapshot import NotAPackage, Snapshot, below, has_directory, read_directory
from unlade.registry import Registry
from unlade.store import DirStore
from unlade.transfer import Progress, silent


@dataclass(frozen=True, slots=True)
class Fetched:
    """A package's files at one version, the lock for that version, and links that were left out (git)."""

    files: Snapshot
    upstream: Upstream
    lock: Upstream
    links: tuple[str, ...] = ()


class PackageSource(Protocol):
    """Whoever can fetch packages: all that get, update and diff ask for."""

    def fetch(self, upstream: Upstream) -> Fetched:
        """The package at a tag, digest, branch or commit."""
        ...


class Sources:
    """Fetches packages; remembers what it fetched in this run. A context manager: it holds workers."""

    def __init__(
        self,
        registry: Registry,
        store: DirStore | None,
        *,
        deadline: Deadline | None = None,
        progress: Progress = silent,
    ) -> None:
        self.registry = registry
        self.deadline = deadline or Deadline.never()
        self.progress = progress
        self._store = store
        self._engine: Engine | None = None
        self._images: dict[str, Snapshot] = {}
        self._commits: dict[Upstream, tuple[Snapshot, GitUpstream, tuple[str, ...]]] = {}

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()

    def fetch(self, upstream: Upstream) -> Fetched:
        """The package at a tag, digest, branch or commit."""
        if isinstance(upstream, GitUpstream):
            return self._git(upstream)
        reference = upstream.reference
        digest = reference.digest
        if digest is None:
            digest = self.registry.resolve(reference, deadline=self.deadline).descriptor.digest
        whole = self._image(reference, digest)
        if not has_directory(whole, upstream.directory.strip("/")):
            raise NotAPackage(f"{upstream} has no directory {upstream.directory}")
        files = below(whole, upstream.directory.strip("/"))
        return Fetched(files, upstream, OciUpstream(locked(reference, digest), upstream.directory))

    def _git(self, upstream: GitUpstream) -> Fetched:
        if not upstream.ref:
            upstream = replace(upstream, ref=default_branch(upstream.repo, deadline=self.deadline))
        if upstream not in self._commits:
            self._commits[upstream] = fetch_git(upstream, deadline=self.deadline)
        files, lock, links = self._commits[upstream]
        return Fetched(files, replace(upstream, commit=""), lock, links)

    def _image(self, reference: Reference, digest: Digest) -> Snapshot:
        key = locked(reference, digest)
        if key not in self._images:
            pinned = Reference(reference.registry, reference.repository, None, digest)
            with tempfile.TemporaryDirectory(prefix="unlade-pkg-") as scratch:
                path = os.path.join(scratch, "package")
                self._deliver(pinned, path)
                read = read_directory(path, skip=frozenset())
            if read.links:
                raise NotAPackage(
                    f"{key} contains links ({', '.join(read.links[:3])}): a package holds only files",
                    next_step="publish it again with `unlade pkg push`",
                )
            self._images[key] = read.files
        return self._images[key]

    def _deliver(self, pinned: Reference, path: str) -> None:
        if self._engine is None:
            self._engine = Engine(self.registry, self._store, jobs=1)
        if self._store is not None:
            try:
                self._engine.deliver(
                    Request(references=(pinned,), destination=InStore(), pull="missing"),
                    deadline=self.deadline,
                    progress=self.progress,
                )
            except StoreError:
                # A store that cannot be written costs only the local copy of the base.
                self._store = None
                self._engine.close()
                self._engine = Engine(self.registry, None, jobs=1)
        request = Request(references=(pinned,), destination=Directory(path), pull="missing")
        _, found = self._engine.plan(request, deadline=self.deadline)
        if len(found[0].manifest.layers) == 1:
            # One layer has nothing to white out: the stricter rules of artifacts apply to it.
            request = msgspec.structs.replace(request, family="kpt")
        self._engine.deliver(request, deadline=self.deadline, progress=self.progress)
