"""The directories of a store, and the durable moves between them.

::

    STORE/oci-layout, index.json, blobs/<algorithm>/<hex>     an OCI image layout (image-spec, "image layout")
    STORE/.unlade/state.db      records, edges, leases, grants, mounts
                  ingest/       partial blobs, named by their digest; kept for resume
                  staging/      trees in the making, named by their key
                  trees/        committed trees: <key>/root and <key>/files
                  trash/        what was unmade and is being deleted
                  quarantine/   what fsck found rotten
                  locks/        held names;  owners/: live processes

All of it must be one file system: a commit is a rename. `.unlade` is closed to other users, because trees
may hold set-id files and private content. The order everywhere: data synced, renamed, directory synced,
then the record.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Final

from unlade.errors import StoreError
from unlade.kernel import failpoints
from unlade.kernel.files import write_all
from unlade.model import Digest
from unlade.store.failure import explaining

_MARKER: Final = {"imageLayoutVersion": "1.0.0"}
_ALGORITHMS: Final = ("sha256", "sha512")
_PRIVATE: Final = ("ingest", "staging", "trees", "trash", "quarantine", "locks", "owners")


class NotAStore(StoreError):
    """The directory holds something else."""

    code = "not-a-store"


class Layout:
    """The paths of one store. Making it creates what is missing; idempotent, safe among processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.private = root / ".unlade"
        self.ingest = self.private / "ingest"
        self.staging = self.private / "staging"
        self.trees = self.private / "trees"
        self.trash = self.private / "trash"
        self.quarantine = self.private / "quarantine"
        self.locks = self.private / "locks"
        self.owners = self.private / "owners"
        self.database = self.private / "state.db"
        self.index = root / "index.json"
        with explaining(f"prepare the store {root}"):
            self._create()

    def blob(self, digest: Digest) -> Path:
        """Where a committed blob lies."""
        return self.root / "blobs" / digest.algorithm / digest.hex

    def partial(self, digest: Digest) -> Path:
        """Where a blob lies while it arrives."""
        return self.ingest / file_name(digest)

    def tree(self, key: Digest) -> Path:
        """Where a committed tree lies."""
        return self.trees / file_name(key)

    def staged(self, key: Digest) -> Path:
        """Where a tree lies while it is made."""
        return self.staging / file_name(key)

    def blob_directories(self) -> list[Path]:
        """The directories that hold committed blobs."""
        return [self.root / "blobs" / algorithm for algorithm in _ALGORITHMS]

    def discard(self, path: Path) -> Path | None:
        """Move something out of sight, to be deleted later outside any lock; None when it is not there."""
        grave = self.trash / uuid.uuid4().hex
        try:
            os.rename(path, grave)
        except FileNotFoundError:
            return None
        failpoints.reach("store.layout.discarded")
        return grave

    def _create(self) -> None:
        root = self.root
        root.mkdir(parents=True, exist_ok=True)
        marker = root / "oci-layout"
        ours = self.private.exists()
        if not marker.exists() and not ours and any(root.iterdir()):
            raise NotAStore(
                f"{root} is not empty and is not a store",
                next_step="name an empty or missing directory with --store",
            )
        self.private.mkdir(mode=0o700, exist_ok=True)
        for directory in self.blob_directories():
            directory.mkdir(parents=True, exist_ok=True)
        for name in _PRIVATE:
            (self.private / name).mkdir(mode=0o700, exist_ok=True)
        if not marker.exists():
            self.write_marker()
        elif not ours and not self.marker_is_right():
            raise NotAStore(
                f"{root} is an image layout of another version",
                next_step="name another directory with --store",
            )

    def marker_is_right(self) -> bool:
        """Whether `oci-layout` says what readers of the layout look for."""
        try:
            return bool(json.loads((self.root / "oci-layout").read_bytes()) == _MARKER)
        except (OSError, ValueError):
            return False

    def write_marker(self) -> None:
        """Write `oci-layout`."""
        # Every process that opens a new store at the same moment writes the same. A temporary file that a
        # crash leaves there is swept with the locks of the dead.
        temporary = self.locks / uuid.uuid4().hex
        replace_file(self.root / "oci-layout", json.dumps(_MARKER).encode(), temporary=temporary)
        # A record is only as durable as the directories that lead to what it names.
        for directory in (self.private, self.root / "blobs", self.root.parent):
            sync_directory(directory)


def file_name(digest: Digest) -> str:
    """A digest as one file name."""
    return f"{digest.algorithm}-{digest.hex}"


def from_file_name(name: str) -> Digest:
    """The digest that `file_name` wrote; raises InvalidDigest."""
    return Digest.parse(name.replace("-", ":", 1))


def replace_file(path: Path, data: bytes, *, temporary: Path) -> None:
    """Write a file so that readers and crashes see the old or the new one, whole; durable on return.

    The caller makes sure that nobody else uses the temporary path at the same time.
    """
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        failpoints.reach("store.layout.file-synced")
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    failpoints.reach("store.layout.file-renamed")
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames into (or out of) a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
