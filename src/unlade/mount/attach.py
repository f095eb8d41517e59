"""Mounting a tree: one directory is bound, several layers are stacked by a read-only overlay.

Always `ro,nosuid,nodev`; `noexec` unless the caller asks for `exec` (V8). What is mounted is built
detached and attached by one call, so nobody sees a mount without its flags. A sub-path is resolved
beneath the tree by descriptor, so no link in the content can name a place outside (V10). An SELinux
`context` cannot ride on a bind mount, so a labelled publish is an overlay of its own (V9). Called by
`deliver` and, later, by the CSI face.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from unlade.errors import InvalidInput, MountError
from unlade.kernel import mounts
from unlade.kernel.beneath import open_beneath
from unlade.mount import table

# The kernel's own bound on overlay layers (OVL_MAX_STACK); beyond it the mount call only says EINVAL.
MAX_LAYERS: Final = 500


class NoSuchSubPath(InvalidInput):
    """The sub-path is not in the content, or leads out of it."""

    code = "no-such-sub-path"


@dataclass(frozen=True, slots=True)
class MountOptions:
    """How a tree appears: `executable` lifts noexec, `context` is an SELinux label, `sub_path` a part."""

    executable: bool = False
    context: str = ""
    sub_path: str = ""


def mount_layers(layers: Sequence[str], target: str, options: MountOptions = MountOptions()) -> None:  # noqa: B008 - frozen
    """Mount directories, lowest first, read-only at target, which must exist; raises MountError.

    Atomic: the target either shows the whole content with every flag, or what it showed before.
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
        if len(layers) == 1 and not options.context:
            source = _opened(
                stack, os.open(layers[0], os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            )
            if options.sub_path:
                source = _opened(stack, _sub_path(source, options.sub_path))
            detached = _opened(stack, mounts.clone(source, attributes))
        else:
            detached = _opened(stack, _overlay(stack, layers, attributes, options.context))
            if options.sub_path:
                detached = stack.enter_context(_part_of(detached, options.sub_path, attributes))
        target_fd = _opened(stack, _open_target(target))
        _same_kind(detached, target_fd, target)
        mounts.attach(detached, target_fd)


def unmount(target: str, *, lazy: bool = False) -> None:
    """Take away the topmost mount at target; raises MountError when there is none or it is in use."""
    path = os.fsencode(os.path.realpath(os.path.dirname(os.path.abspath(target))))
    path = os.path.join(path, os.fsencode(os.path.basename(os.path.abspath(target))))
    if table.find(path) is None:
        raise MountError(f"nothing is mounted at {target}", next_step="`unlade images` lists what is mounted")
    mounts.detach(os.fsdecode(path), lazy=lazy)


def _overlay(stack: contextlib.ExitStack, layers: Sequence[str], attributes: int, context: str) -> int:
    lower = list(reversed(layers))
    if len(lower) == 1:
        # A read-only overlay of a single directory is refused by the kernel: an empty one goes below.
        empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="unlade-empty-"))
        lower.append(empty)
    return mounts.overlay(lower, attributes, context=context)


@contextlib.contextmanager
def _part_of(detached: int, sub_path: str, attributes: int) -> Iterator[int]:
    # Cloning out of a detached mount needs Linux 6.15; attached at a private place it works on all.
    with tempfile.TemporaryDirectory(prefix="unlade-mount-") as private:
        private_fd = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mounts.attach(detached, private_fd)
        finally:
            os.close(private_fd)
        try:
            root = os.open(private, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                part = _sub_path(root, sub_path)
            finally:
                os.close(root)
            try:
                cloned = mounts.clone(part, attributes)
            finally:
                os.close(part)
        finally:
            mounts.detach(private, lazy=True)
    try:
        yield cloned
    finally:
        os.close(cloned)


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
