"""Layers with links, where unpackers disagree: what this product gives (design, decision 9).

Each case is a stack of two layers and the tree that must come of it: a link's target, a file's content, or
None for a directory. `umoci` and `containerd` say what those tools make of it, where it differs:
`test_stacks_links.py` checks ours and umoci's, the interop test checks containerd's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.fakes.tars import Tar

Shape = dict[str, bytes | str | None]


@dataclass(frozen=True)
class LinkCase:
    """Two layers and what they become; a str is a link's target."""

    name: str
    lower: Tar
    upper: Tar
    ours: Shape
    umoci: Shape | None = None  # None: as ours
    containerd: Shape | Literal["refused"] | None = None  # None: as ours


def _usr() -> Tar:
    return Tar().dir(b"usr").dir(b"usr/lib").file(b"usr/lib/a", b"low").symlink(b"lib", b"usr/lib")


_USR: Shape = {"usr": None, "usr/lib": None, "usr/lib/a": b"low", "lib": "usr/lib"}

LINK_CASES = [
    LinkCase(
        "a file below a lower layer's link replaces the link",
        _usr(),
        Tar().file(b"lib/x", b"up"),
        {**_USR, "lib": None, "lib/x": b"up"},
        umoci={**_USR, "usr/lib/x": b"up"},
    ),
    LinkCase(
        "a whiteout below a lower layer's link hides nothing behind it",
        _usr(),
        Tar().file(b"lib/.wh.a"),
        {**_USR, "lib": None},
        umoci={"usr": None, "usr/lib": None, "lib": "usr/lib"},
    ),
    LinkCase(
        "an opaque marker below a lower layer's link hides nothing behind it",
        _usr(),
        Tar().file(b"lib/.wh..wh..opq"),
        {**_USR, "lib": None},
        umoci={"usr": None, "usr/lib": None, "lib": "usr/lib"},
    ),
    LinkCase(
        "a directory over a lower layer's link replaces it",
        _usr(),
        Tar().dir(b"lib").file(b"lib/x", b"up"),
        {**_USR, "lib": None, "lib/x": b"up"},
    ),
    LinkCase(
        "a link over a lower layer's directory replaces it",
        Tar().dir(b"lib").file(b"lib/a", b"low").dir(b"usr"),
        Tar().symlink(b"lib", b"usr"),
        {"usr": None, "lib": "usr"},
    ),
    LinkCase(
        "a hard link to a lower layer's file",
        Tar().dir(b"d").file(b"d/f", b"low"),
        Tar().link(b"h", b"d/f"),
        {"d": None, "d/f": b"low", "h": b"low"},
        containerd="refused",
    ),
    LinkCase(
        "a hard link to a lower layer's link",
        Tar().symlink(b"s", b"gone"),
        Tar().link(b"h", b"s"),
        {"s": "gone", "h": "gone"},
        containerd="refused",
    ),
    LinkCase(
        "a file through a link of its own layer",
        Tar().dir(b"other"),
        Tar().dir(b"usr").dir(b"usr/lib").symlink(b"lib", b"usr/lib").file(b"lib/x", b"up"),
        {"other": None, "usr": None, "usr/lib": None, "lib": "usr/lib", "usr/lib/x": b"up"},
    ),
    LinkCase(
        "a file through an absolute link of its own layer",
        Tar().dir(b"other"),
        Tar().dir(b"usr").dir(b"usr/lib").symlink(b"lib", b"/usr/lib").file(b"lib/x", b"up"),
        {"other": None, "usr": None, "usr/lib": None, "lib": "/usr/lib", "usr/lib/x": b"up"},
    ),
    LinkCase(
        "a link of its own layer that climbs out stays in",
        Tar().dir(b"other"),
        Tar().symlink(b"up", b"../../../etc").dir(b"etc").file(b"up/x", b"up"),
        {"other": None, "up": "../../../etc", "etc": None, "etc/x": b"up"},
    ),
]  # fmt: skip
