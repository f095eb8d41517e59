"""Directories written whole: a package on disk is the old one or the new one, never between.

A new package is staged beside its place and renamed there. An update stages the complete next version in a
sibling directory (unchanged files are hard-linked, so they keep inode, time and owner, and everything that
is not the package's business, such as .git, comes along), syncs it, and exchanges the two names in one
rename; a single changed file is renamed into place by itself. Where the system cannot exchange, two renames
do it, and the next run finishes what was cut short. Leftovers of a killed run carry no lock and are removed
by the next. Steps are named failpoints.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Mapping

from unlade.errors import InvalidInput, StoreError
from unlade.kernel import failpoints, files
from unlade.packages.snapshot import File, Snapshot

_MARK = ".unlade-"
# The second half of the two renames that stand in for an exchange: the old package waits under this name.
_ASIDE = ".unlade-aside"


class Busy(StoreError):
    """Another process is updating the same package."""

    code = "package-busy"
    retryable = True


class ChangedMeanwhile(StoreError):
    """The package was edited while its update was computed; nothing was written."""

    code = "package-changed"
    retryable = True


class CannotReplace(StoreError):
    """The directory cannot be replaced as a whole (a mount point, a read-only parent)."""

    code = "cannot-replace"


class Exists(InvalidInput):
    """The destination is already there."""

    code = "destination-exists"


def _split(path: str) -> tuple[str, str]:
    path = os.path.abspath(path)
    return os.path.dirname(path), os.path.basename(path)


def recover(path: str) -> None:
    """Finish or undo what a killed run left beside a package; cheap when there is nothing."""
    parent, name = _split(path)
    aside = os.path.join(parent, "." + name + _ASIDE)
    if not os.path.lexists(path) and os.path.isdir(aside):
        # Killed between the two renames: the old package is whole, put it back.
        os.rename(aside, path)
    if not os.path.isdir(parent):
        return
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in os.listdir(parent):
            if entry.startswith("." + name + _MARK):
                _remove_if_dead(parent_fd, entry)
    finally:
        os.close(parent_fd)


def _remove_if_dead(parent_fd: int, entry: str) -> None:
    try:
        fd = os.open(entry, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    finally:
        os.close(fd)
    files.remove_tree(parent_fd, os.fsencode(entry))


@contextlib.contextmanager
def locked_package(path: str) -> Iterator[int]:
    """Hold a package for an update; Busy when another process does."""
    recover(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", next_step="name a package's directory") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Busy(
                f"{path}: another update is running", next_step="wait for it, then try again"
            ) from error
        yield fd
    finally:
        os.close(fd)


class _Stage:
    """A sibling directory that becomes the package."""

    def __init__(self, parent: str, name: str) -> None:
        self.parent = parent
        self.entry = f".{name}{_MARK}{os.getpid()}-{secrets.token_hex(4)}"
        self.path = os.path.join(parent, self.entry)
        try:
            os.mkdir(self.path, 0o700)
        except OSError as error:
            raise CannotReplace(
                f"{parent}: {error.strerror}", next_step="the package's parent directory must be writable"
            ) from error
        failpoints.reach("packages.stage.made")
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        failpoints.reach("packages.stage.locked")

    def discard(self) -> None:
        parent_fd = os.open(self.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            files.remove_tree(parent_fd, os.fsencode(self.entry))
        finally:
            os.close(parent_fd)

    def close(self) -> None:
        os.close(self.fd)

    def write(self, path: str, file: File, umask: int) -> None:
        target = os.path.join(self.path, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(target, flags, 0o600)
        with os.fdopen(fd, "wb") as out:
            failpoints.reach("packages.stage.file-created")
            out.write(file.data)
            os.fchmod(fd, file.mode & ~umask if file.mode & 0o077 else file.mode)
        failpoints.reach("packages.stage.file-written")

    def sync(self) -> None:
        failpoints.reach("packages.stage.before-sync")
        files.syncfs(self.fd)
        failpoints.reach("packages.stage.synced")


def write_new(path: str, content: Mapping[str, File]) -> None:
    """A directory that was not there, with exactly these files; Exists when something is in its place."""
    parent, name = _split(path)
    if not os.path.isdir(parent):
        raise InvalidInput(f"parent directory {parent!r} does not exist", next_step="create it first")
    if os.path.lexists(path):
        raise Exists(f"destination directory {path!r} already exists", next_step="choose another name")
    stage = _Stage(parent, name)
    try:
        umask = files.current_umask()
        for rel in sorted(content):
            stage.write(rel, content[rel], umask)
        os.fchmod(stage.fd, 0o777 & ~umask)
        stage.sync()
        parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            files.rename_new(parent_fd, os.fsencode(stage.entry), parent_fd, os.fsencode(name))
            failpoints.reach("packages.stage.renamed")
            os.fsync(parent_fd)
        finally:
            os.close(parent_fd)
    except OSError as error:
        stage.discard()
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise Exists(f"destination directory {path!r} already exists") from error
        raise CannotReplace(f"{path}: {error.strerror}") from error
    except BaseException:
        stage.discard()
        raise
    finally:
        stage.close()


def replace_package(path: str, package_fd: int, before: Snapshot, after: Snapshot) -> None:
    """Turn the package at path from `before` into `after` in one step; ChangedMeanwhile if it moved on.

    package_fd is locked_package's. Everything in the directory that is not in `before` stays.
    """
    parent, name = _split(path)
    if os.path.ismount(path):
        raise CannotReplace(f"{path} is a mount point", next_step="keep the package in a directory below it")
    _check_unchanged(path, before, after)
    changed = [rel for rel in before.keys() | after.keys() if before.get(rel) != after.get(rel)]
    if len(changed) == 1 and changed[0] in before and changed[0] in after:
        _replace_file(path, changed[0], after[changed[0]])
        return
    stage = _Stage(parent, name)
    try:
        umask = files.current_umask()
        _carry_over(path, stage, before, after)
        for rel in sorted(after):
            old = before.get(rel)
            if old is None or old.data != after[rel].data:
                stage.write(rel, after[rel], umask if old is None else 0)
        status = os.fstat(package_fd)
        os.fchmod(stage.fd, stat.S_IMODE(status.st_mode))
        with contextlib.suppress(PermissionError):
            os.fchown(stage.fd, status.st_uid, status.st_gid)
        stage.sync()
        _check_unchanged(path, before, after)
        _swap(path, parent, name, stage, package_fd)
    except OSError as error:
        stage.discard()
        raise CannotReplace(f"{path}: {error.strerror}", next_step="nothing was changed") from error
    except BaseException:
        stage.discard()
        raise
    finally:
        stage.close()


def _replace_file(path: str, rel: str, file: File) -> None:
    """One file is one rename: the directory itself stays, and with it whoever works in it."""
    parent, name = _split(path)
    target = os.path.join(path, rel)
    # Beside the package and locked, as a stage is: a leftover is never taken for content.
    fresh = os.path.join(parent, f".{name}{_MARK}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(fresh, "xb") as out:
            fcntl.flock(out.fileno(), fcntl.LOCK_EX)
            failpoints.reach("packages.file.created")
            out.write(file.data)
            out.flush()
            os.fchmod(out.fileno(), file.mode)
            os.fsync(out.fileno())
            failpoints.reach("packages.file.written")
            os.replace(fresh, target)
            failpoints.reach("packages.file.renamed")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise CannotReplace(f"{target}: {error.strerror}", next_step="nothing was changed") from error


def _swap(path: str, parent: str, name: str, stage: _Stage, package_fd: int) -> None:
    parent_fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not os.path.samestat(os.fstat(package_fd), os.stat(name, dir_fd=parent_fd, follow_symlinks=False)):
            raise ChangedMeanwhile(f"{path} was replaced meanwhile", next_step="try again")
        failpoints.reach("packages.swap.before")
        try:
            files.exchange(parent_fd, os.fsencode(stage.entry), parent_fd, os.fsencode(name))
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            aside = "." + name + _ASIDE
            os.rename(name, aside, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
            failpoints.reach("packages.swap.aside")
            os.rename(stage.entry, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
            os.rename(aside, stage.entry, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
        failpoints.reach("packages.swap.done")
        os.fsync(parent_fd)
        failpoints.reach("packages.swap.synced")
        files.remove_tree(parent_fd, os.fsencode(stage.entry))
        failpoints.reach("packages.swap.cleaned")
    finally:
        os.close(parent_fd)


def _carry_over(path: str, stage: _Stage, before: Snapshot, after: Snapshot) -> None:
    """Link everything that stays into the stage: unchanged files, and what is not the package's."""
    stack = [""]
    while stack:
        here = stack.pop()
        kept = False
        with os.scandir(os.path.join(path, here) if here else path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            rel = f"{here}/{entry.name}" if here else entry.name
            if entry.is_dir(follow_symlinks=False):
                stack.append(rel)
                continue
            if rel in before and (rel not in after or before[rel].data != after[rel].data):
                continue
            target = os.path.join(stage.path, rel)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            kept = True
            _link(entry.path, target)
            failpoints.reach("packages.stage.linked")
        if here and (kept or not found):
            # Directory modes are the user's; an empty directory that was there stays.
            target = os.path.join(stage.path, here)
            os.makedirs(target, exist_ok=True)
            os.chmod(target, stat.S_IMODE(os.stat(os.path.join(path, here)).st_mode) | 0o700)
            failpoints.reach("packages.stage.directory")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EXDEV):
            raise
        _copy(source, target)


def _copy(source: str, target: str) -> None:
    """For file systems without hard links."""
    status = os.lstat(source)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
        return
    with open(source, "rb") as src, open(target, "xb") as out:
        while block := src.read(1 << 20):
            out.write(block)
        os.fchmod(out.fileno(), stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _check_unchanged(path: str, before: Snapshot, after: Snapshot) -> None:
    """The files that the update rewrites or removes must still be what it read."""
    for rel, file in before.items():
        fresh = after.get(rel)
        if fresh is not None and fresh.data == file.data:
            continue
        try:
            with open(os.path.join(path, rel), "rb") as current:
                same = current.read() == file.data
        except OSError:
            same = False
        if not same:
            raise ChangedMeanwhile(
                f"{os.path.join(path, rel)} was edited while its update was computed", next_step="try again"
            )
    for rel in after:
        if rel not in before and os.path.lexists(os.path.join(path, rel)):
            raise ChangedMeanwhile(
                f"{os.path.join(path, rel)} is in the way of a new file", next_step="move it away"
            )
