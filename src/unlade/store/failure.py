"""What can go wrong with a store, and one translation of the operating system's errors.

Callers of `store` and `tree` see these errors and never a bare OSError: `explaining` wraps each use of the
disk and says what was being done and what to do next. ENOSPC and EDQUOT are an error of their own, because
they are the ones that a garbage collection can cure.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from unlade.errors import StoreError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
# A full descriptor table or a busy file passes; a read-only or broken disk does not.
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EBUSY, errno.ENOMEM})


class NotInStore(StoreError):
    """The content is not in the store."""

    code = "not-in-store"


class NoSpace(StoreError):
    """The file system of the store is full."""

    code = "no-space"
    retryable = True


class StoreFailure(StoreError):
    """The operating system refused; the OSError is the cause."""

    code = "store-io"


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """Turn an OSError of the block into a StoreError that says what was being done."""
    try:
        yield
    except OSError as error:
        raise explained(what, error) from error


def explained(what: str, error: OSError) -> StoreError:
    """The StoreError for an OSError that came up while doing this."""
    if error.errno in _FULL:
        return NoSpace(f"cannot {what}: {error.strerror}", next_step="free space, or run unlade gc")
    return StoreFailure(
        f"cannot {what}: {error.strerror or error}",
        next_step="check the disk, the permissions and the limit of open files",
        retryable=error.errno in _PASSING,
    )
