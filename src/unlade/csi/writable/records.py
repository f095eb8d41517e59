"""What is written down about a volume or snapshot: one JSON file each, replaced whole and synced.

The record is the first thing of a volume to exist and the last to go. `creating`: nothing of value is
there yet, whoever finds it may throw it away. `ready`: it may hold a pod's data. `deleting`: it was given
up, and whoever finds it finishes. A record of a later version of this program is left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from unlade.errors import StoreError
from unlade.store.layout import replace_file

VERSION: Final = 1
_NAME: Final = "record.json"
State = Literal["creating", "ready", "deleting"]


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """One volume.

    `size` is what was promised, `grown` what its file system has by now. `tree` is the key of the shared
    tree below it, `digests` what its references resolved to, in order. `origin` is the snapshot or volume
    it was copied from. `owner` names who made it and `bound` says that a PersistentVolume stands for it.
    """

    id: str
    name: str
    size: int
    state: State
    created: float
    parameters: dict[str, str]
    tree: str = ""
    digests: tuple[str, ...] = ()
    grown: int = 0
    origin: str = ""
    owner: str = ""
    bound: bool = False
    warnings: tuple[str, ...] = ()
    version: int = VERSION


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot: a copy of a volume's own file, and the tree that it stands on."""

    id: str
    name: str
    volume: str
    size: int
    state: State
    created: float
    parameters: dict[str, str]
    tree: str = ""
    digests: tuple[str, ...] = ()
    version: int = VERSION


R = TypeVar("R", Volume, Snapshot)

# Made at import: msgspec must not meet a type for the first time in two threads at once.
_VOLUME: Final = msgspec.json.Decoder(Volume)
_SNAPSHOT: Final = msgspec.json.Decoder(Snapshot)


def read_volume(home: Path) -> Volume | None:
    """The record in a volume's directory; None when there is none. Raises StoreError when unreadable."""
    return _read(home, _VOLUME)


def read_snapshot(home: Path) -> Snapshot | None:
    """The record in a snapshot's directory; see `read_volume`."""
    return _read(home, _SNAPSHOT)


def write(home: Path, record: Volume | Snapshot) -> None:
    """Replace the record; durable on return. The caller holds the id's lock."""
    replace_file(home / _NAME, msgspec.json.encode(record), temporary=home / f"{_NAME}.new")


def erase(home: Path) -> None:
    """Remove the record, the last thing in its directory."""
    (home / _NAME).unlink(missing_ok=True)


def _read(home: Path, decoder: msgspec.json.Decoder[R]) -> R | None:
    path = home / _NAME
    try:
        record = decoder.decode(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(
            f"the record {path} cannot be read: {error}", next_step="restore it; its image is left alone"
        ) from error
    if record.version > VERSION:
        raise StoreError(
            f"the record {path} was written by a later version", next_step="run that version on this node"
        )
    return record
