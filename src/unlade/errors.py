"""The error tree: categories here, concrete errors beside the code that raises them.

::

    UnladeError
    ├── InvalidInput        what the caller wrote cannot be used (reference, option, file)
    │   └── NothingProduced an artifact from which no file can be made (V14)
    ├── RegistryError       the registry refused, is missing the object, or cannot be reached
    ├── IntegrityError      bytes are not what their digest or size promised
    ├── StoreError          the local store cannot do what was asked
    ├── UnsafeArchive       an archive that tries to leave its directory, or to exhaust the machine
    ├── MountError          the kernel refused a mount
    ├── MergeConflict       two sides changed the same thing
    └── DeadlineExceeded    time ran out, or the caller cancelled

Each error says what happened, and `next_step` says what to do about it. `code` is stable: scripts,
events and metrics may depend on it. `retryable` says whether the same call may succeed later. One
table per face maps categories to exit codes, gRPC status and event reasons.
"""

from __future__ import annotations

from typing import ClassVar


class UnladeError(Exception):
    """The root of every error this library raises on purpose."""

    code: ClassVar[str] = "error"
    retryable: bool = False

    def __init__(self, message: str, *, next_step: str = "", retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        return self.message


class InvalidInput(UnladeError):
    """What the caller wrote cannot be used; the same call will fail again."""

    code = "invalid-input"


class NothingProduced(InvalidInput):
    """An artifact from which nothing can be made: never an empty directory (V14)."""

    code = "nothing-produced"


class RegistryError(UnladeError):
    """The registry refused, does not have the object, or cannot be reached."""

    code = "registry"


class IntegrityError(UnladeError):
    """Bytes that are not what their digest, size or record promised."""

    code = "integrity"


class StoreError(UnladeError):
    """The local store cannot do what was asked."""

    code = "store"


class UnsafeArchive(UnladeError):
    """An archive that tries to leave its directory, or to exhaust the machine."""

    code = "unsafe-archive"


class MountError(UnladeError):
    """The kernel refused a mount, or there is none where one was expected."""

    code = "mount"


class MergeConflict(UnladeError):
    """Two sides changed the same thing and the policy says to stop."""

    code = "merge-conflict"


class DeadlineExceeded(UnladeError):
    """Time ran out, or the caller cancelled."""

    code = "deadline"
    retryable = True


def one_line(error: UnladeError, *, what: int = 700, next_step: int = 300) -> str:
    """What happened, then the next step, printable and each no longer than told: for events of a cluster."""
    text = _printable(error.message, what)
    return f"{text}; next: {_printable(error.next_step, next_step)}" if error.next_step else text


def _printable(text: str, length: int) -> str:
    """On one line: names from a registry or an archive may hold anything."""
    clean = "".join(char if char.isprintable() else " " for char in text)
    return clean if len(clean) <= length else clean[: length - 1] + "…"
