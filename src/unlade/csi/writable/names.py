"""Names and ids: an id is made from the name that the caller chose, and is a file's name.

The same request therefore always meets the same directory, on whatever day and after whatever crash; and
an id that did not come from here is recognised before it gets near a path.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from unlade.csi import WRITABLE_PREFIX

SNAPSHOT_PREFIX: Final = "s-"
# Half of a SHA-256: no two names meet by chance, and paths stay short.
_DIGITS: Final = 32


def volume_id_of(name: str) -> str:
    """The id of the volume of a name."""
    return WRITABLE_PREFIX + _hash(name)


def snapshot_id_of(name: str) -> str:
    """The id of the snapshot of a name."""
    return SNAPSHOT_PREFIX + _hash(name)


def is_writable(volume_id: str) -> bool:
    """Whether an id is of the form that writable volumes have."""
    return _well_formed(volume_id, WRITABLE_PREFIX)


def is_snapshot(snapshot_id: str) -> bool:
    """Whether an id is of the form that snapshots have."""
    return _well_formed(snapshot_id, SNAPSHOT_PREFIX)


def resolved(target: str) -> str:
    """A target as the mount table spells it: links in its parents followed, the last name as it is."""
    absolute = os.path.abspath(target)
    return os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))


def _well_formed(text: str, prefix: str) -> bool:
    digits = text.removeprefix(prefix)
    return text.startswith(prefix) and len(digits) == _DIGITS and not digits.strip("0123456789abcdef")


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
