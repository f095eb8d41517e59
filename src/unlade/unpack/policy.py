"""What unpacking may do and how much: the policy going in, the account coming out.

`RULES_VERSION` is part of every layer key: it changes whenever the same archive and policy would give a
different tree, so that trees made by older rules are never taken for new ones. All types are frozen and
plain data, because they cross a process boundary.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from unlade.model.digest import DiffID

RULES_VERSION: Final = 1

Name = bytes  # relative to the destination

Rules = Literal["image", "artifact"]
Whiteouts = Literal["overlay", "record"]
Owners = Literal["keep", "squash"]


class Limits(msgspec.Struct, frozen=True):
    """How much one archive may cost; every number can be raised by a caller who trusts its source."""

    max_entries: int = 1_000_000  # the largest images seen have some 500,000
    max_bytes: int = 128 << 30  # of the uncompressed archive; a node holds about 100 GB of content
    max_ratio: int = 250  # uncompressed to compressed; real layers reach about 40, deflate at most 1032
    ratio_floor: int = 256 << 20  # below this much output the ratio is not looked at: it costs nobody much
    max_depth: int = 128  # directories above an entry; one descriptor each when a tree is removed
    max_name: int = 4095  # PATH_MAX without its NUL, for names and link targets
    max_header_bytes: int = 1 << 20  # pax and GNU long headers of one entry, as Go and libarchive allow
    max_noted_bytes: int = (
        32 << 20
    )  # names kept for the whole run: whiteouts, pending links, implicit parents
    zstd_window_log: int = 27  # 128 MiB: what `zstd --long` and other tools accept without being told


class UnpackPolicy(msgspec.Struct, frozen=True):
    """How an archive becomes a tree.

    `image`: absolute names are re-rooted, links on the way resolve inside the layer, whiteouts hide.
    `artifact`: anything of that kind is refused, and whiteout names are plain data.
    """

    rules: Rules
    whiteouts: Whiteouts = "record"
    owners: Owners = "squash"
    xattrs: bool = False
    setid: bool = False  # False strips setuid, setgid and security.capability
    prefix: bytes = b""  # the directory, relative to the destination, below which entries land
    limits: Limits = Limits()


class Unpacked(msgspec.Struct, frozen=True):
    """What became of an archive. Names are relative to the destination, prefix included."""

    entries: int
    bytes: int  # of file content, each regular file counted once per entry
    diff_id: DiffID
    whiteouts: tuple[Name, ...] = ()  # names to hide in lower layers
    opaques: tuple[Name, ...] = ()  # directories whose lower content is hidden; b"" is the root
    pending_links: tuple[tuple[Name, Name], ...] = ()  # (name, target): hard links to a lower layer's file
    implicit_dirs: tuple[Name, ...] = ()  # parents without an entry of their own, outermost first;
    # b"" when the archive says nothing of the destination itself
    skipped: tuple[Name, ...] = ()  # devices and FIFOs of an image: not made, but they hide lower files
