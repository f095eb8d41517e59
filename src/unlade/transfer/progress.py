"""Progress: what a delivery tells whoever watches it.

The library never prints; it calls one function with small frozen events, from any thread. A caller that
draws a bar or feeds a metric must be quick and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from unlade.model import Digest


class ProgressEvent(msgspec.Struct, frozen=True):
    """One step of one blob: `done` of `total` bytes of `digest`, for `reference`.

    `planned`: it will be needed; whether it is there already has yet to be seen. Not every caller tells it.
    """

    kind: Literal["planned", "start", "bytes", "resumed", "present", "done", "failed"]
    reference: str
    digest: Digest
    done: int
    total: int
    label: str = ""


Progress = Callable[[ProgressEvent], None]


def silent(_event: ProgressEvent) -> None:
    """The progress of a caller that does not watch."""
