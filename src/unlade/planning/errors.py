"""Why a plan cannot be made: each error lists what the artifact holds, so that the user can decide (V14)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from unlade.errors import InvalidInput, NothingProduced
from unlade.model import Descriptor, Digest

# A terminal's worth; the rest is counted.
_SHOWN: Final = 20
HOW_TO_DECIDE: Final = (
    "name the files with --as-file NAME (or INDEX=NAME), take every layer as a file with --unpack never, "
    "or unpack every archive with --unpack always"
)


class Unplaced(msgspec.Struct, frozen=True):
    """A layer from which nothing is made, and why."""

    index: int
    layer: Descriptor
    reason: str

    def __str__(self) -> str:
        # Types and titles are the publisher's words: shown escaped and shortened.
        title = f"title {self.layer.title[:80]!a}" if self.layer.title else "untitled"
        kind = ascii(self.layer.media_type[:120])[1:-1] or "no media type"
        return f"layer {self.index}: {kind}, {self.layer.size} bytes, {title}: {self.reason}"


class UnplacedLayers(InvalidInput):
    """Some layers have no name and are no archive, so their place is unknown."""

    code = "unplaced-layers"


class NotATar(InvalidInput):
    """A layer that its publisher calls an archive, and whose bytes are none."""

    code = "not-a-tar"


class PathConflict(InvalidInput):
    """One path would be both a file and a directory."""

    code = "path-conflict"


@contextmanager
def about(reference: str, digest: Digest) -> Iterator[None]:
    """Name the reference and the digest in whatever is raised inside (V15); errors that do are left alone."""
    try:
        yield
    except InvalidInput as error:
        if reference and reference not in error.message:
            # A reference by digest names it already.
            pinned = "" if str(digest) in reference else f" ({digest})"
            error.message = f"{reference}{pinned}: {error.message}"
        raise


def nothing_produced(
    what: str, layers: Sequence[Unplaced], *, next_step: str = HOW_TO_DECIDE
) -> NothingProduced:
    """The error for an artifact that would be an empty directory."""
    if not layers:
        return NothingProduced(
            f"nothing can be made of {what}: it has no layers", next_step="check what was pushed"
        )
    return NothingProduced(f"nothing can be made of {what}: {listing(layers)}", next_step=next_step)


def listing(layers: Sequence[Unplaced]) -> str:
    """The layers, one after the other, a terminal's worth of them."""
    shown = "; ".join(str(layer) for layer in layers[:_SHOWN])
    more = f"; and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
    return shown + more
