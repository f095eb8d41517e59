"""Mounting a tree: one directory is bound, several layers are stacked by a read-only overlay.

Always `ro,nosuid,nodev`; `noexec` unless the caller asks for `exec` (V8). What is mounted is built
detached and attached by one call, so nobody sees a mount without its flags. A sub-path is resolved
beneath the tree by descriptor, so no link in the content can name a place outside (V10). An SELinux
`context` cannot ride on a bind mount, so a labelled publish is an overlay of its own (V9). Called by
`deliver` and by the CSI face.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from unlade.errors import InvalidInput, MountError
from unlade.kernel import failpoints, mounts
from unlade.kernel.beneath import open_beneath
from unlade.mount import table

# The kernel's own bound on overlay layers (OVL_MAX_STACK); beyond it the mount call only says EINVAL.
MAX_LAYERS: Final = 500


class NoSuchSubPath(InvalidInput):
    """The sub-path is not in the content, or leads out of it."""

    code = "no-such-sub-path"


@dataclass(frozen=True, slots=True)
class MountOptions:
    """How a tree appears: `executable` lifts noexec, `context` is an SELinux label, `sub_path` a part.

    `sealed` makes even a single directory a file system of its own that is read-only in itself: container
    runtimes bind-mount what they are given and set flags of their own, so a pod that does not say readOnly
    would write to a shared tree through a bind mount. `empty` names an empty directory that stays, for the
    overlay of a single one; else one is made for it.
    """

    executable: bool = False
    context: str = ""
    sub_path: str = ""
    empty: str = ""
    sealed: bool = False


def mount_layers(
    layers: Sequence[str],
    target: str,
    options: MountOptions = MountOptions(),  # noqa: B008 - frozen
    *,
    make_target: bool = False,
) -> None:
    """Mount directories, lowest first, read-only at target, which must exist; raises MountError.

    Atomic: the target either shows the whole content with every flag, or what it showed before. With
    `make_target` the target is made, as a directory or an empty file, whichever the content is.
    """
    mounts.require()
    if not layers:
        raise MountError("nothing to mount")
    if len(layers) > MAX_LAYERS:
        raise MountError(
            f"{len(layers)} layers; the kernel stacks at most {MAX_LAYERS}",
            next_step="use `unlade pull REF DIR`, which merges them into one directory",
        )
    attributes = mounts.ATTR_RDONLY | mounts.ATTR_NOSUID | mounts.ATTR_NODEV
    if not options.executable:
        attributes |= mounts.ATTR_NOEXEC
    with contextlib.ExitStack() as stack:
        if len(layers) == 1 and not options.context and not options.sealed:
            source = _opened(
                stack, os.open(layers[0], os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            )
            if options.sub_path:
                source = _opened(stack, _sub_path(source, options.sub_path))
            detached = _opened(stack, mounts.clone(source, attributes))
        else:
            detached = _opened(stack, _overlay(stack, layers, attributes, options))
            if options.sub_path:
                detached = stack.enter_context(_part_of(detached, options.sub_path, attributes))
        if make_target:
            _make_target(target, directory=stat.S_ISDIR(os.fstat(detached).st_mode))
            failpoints.reach("mount.target.made")
        target_fd = _opened(stack, _open_target(target))
        _same_kind(detached, target_fd, target)
        mounts.attach(detached, target_fd)
        failpoints.reach("mount.attach.attached")


def unmount(target: str, *, lazy: bool = False) -> None:
    """Take away the topmost mount at target; raises MountError when there is none or it is in use."""
    path = os.fsencode(os.path.realpath(os.path.dirname(os.path.abspath(target))))
    path = os.path.join(path, os.fsencode(os.path.basename(os.path.abspath(target))))
    if table.find(path) is None:
        raise MountError(f"nothing is mounted at {target}", next_step="`unlade images` lists what is mounted")
    mounts.detach(os.fsdecode(path), lazy=lazy)


def unpublish(target: str) -> None:
    """Take away every mount at target, and the target itself; idempotent. Raises MountError.

    A mount that is still in use is detached: it vanishes here at once, and for its users when they end.
    What is in the target without being mounted there is not ours: it is left.
    """
    while table.is_mount_point(target):
        try:
            mounts.detach(target, lazy=False)
        except MountError:
            if table.is_mount_point(target):
                mounts.detach(target, lazy=True)
        failpoints.reach("mount.detach.detached")
    try:
        _remove_target(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise MountError(
                f"remove {target}: {error.strerror}", next_step="look at what is there"
            ) from error
    failpoints.reach("mount.target.removed")


def _remove_target(target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(target)
        except NotADirectoryError:
            if os.lstat(target).st_size == 0:
                os.unlink(target)


def _make_target(target: str, *, directory: bool) -> None:
    """Make the mount point, in the place of an empty one of the other kind."""
    for _ in range(2):
        try:
            if directory:
                os.mkdir(target, 0o750)
            else:
                os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640))
            return
        except FileExistsError:
            if stat.S_ISDIR(os.lstat(target).st_mode) == directory:
                return
            with contextlib.suppress(OSError):
                _remove_target(target)
        except OSError as error:
            raise MountError(
                f"make the mount point {target}: {error.strerror}",
                next_step="its parent directory must exist",
            ) from error


def _overlay(
    stack: contextlib.ExitStack, layers: Sequence[str], attributes: int, options: MountOptions
) -> int:
    lower = list(reversed(layers))
    if len(lower) == 1:
        # A read-only overlay of a single directory is refused by the kernel: an empty one goes below.
        empty = options.empty
        lower.append(empty or stack.enter_context(tempfile.TemporaryDirectory(prefix="unlade-empty-")))
    return mounts.overlay(lower, attributes, context=options.context)


@contextlib.contextmanager
def _part_of(detached: int, sub_path: str, attributes: int) -> Iterator[int]:
    try:
        cloned = _cloned_part(detached, sub_path, attributes)
    except MountError:
        # Cloning out of a detached mount needs Linux 6.15; attached at a private place it works on all,
        # but a crash in between leaves the private mount behind.
        cloned = _cloned_privately(detached, sub_path, attributes)
    try:
        yield cloned
    finally:
        os.close(cloned)


def _cloned_part(root: int, sub_path: str, attributes: int) -> int:
    part = _sub_path(root, sub_path)
    try:
        return mounts.clone(part, attributes)
    finally:
        os.close(part)


def _cloned_privately(detached: int, sub_path: str, attributes: int) -> int:
    with tempfile.TemporaryDirectory(prefix="unlade-mount-") as private:
        private_fd = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mounts.attach(detached, private_fd)
        finally:
            os.close(private_fd)
        try:
            root = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return _cloned_part(root, sub_path, attributes)
            finally:
                os.close(root)
        finally:
            mounts.detach(private, lazy=True)


def _sub_path(root: int, sub_path: str) -> int:
    try:
        return open_beneath(root, os.fsencode(sub_path), os.O_PATH | os.O_CLOEXEC, links="beneath")
    except OSError as error:
        raise NoSuchSubPath(
            f"sub-path {sub_path!r}: {error.strerror}",
            next_step="`unlade plan REF` lists the paths; links that lead out of the content are refused",
        ) from error


def _open_target(target: str) -> int:
    try:
        return os.open(target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise MountError(f"mount point {target} does not exist", next_step=f"mkdir -p {target}") from error


def _same_kind(source: int, target: int, name: str) -> None:
    source_is_directory = stat.S_ISDIR(os.fstat(source).st_mode)
    target_mode = os.fstat(target).st_mode
    if stat.S_ISLNK(target_mode) or stat.S_ISDIR(target_mode) != source_is_directory:
        kind = "directory" if source_is_directory else "file"
        raise MountError(
            f"{name} must be a {kind} to mount a {kind} there", next_step=f"create a {kind} there first"
        )


def _opened(stack: contextlib.ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor
