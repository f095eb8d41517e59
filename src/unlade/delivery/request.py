"""What is asked of a delivery, and what comes back.

A `Request` says: these references, for this platform and handler, by this policy, as a directory there.
Every face translates its own protocol into one of these and hands it to `Engine.deliver`; nothing about
Kubernetes, a command line or a package stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

import msgspec

from unlade.errors import InvalidInput
from unlade.model import Digest, Platform, Reference
from unlade.planning import Plan

if TYPE_CHECKING:
    from unlade.mount import MountOptions
    from unlade.store import Lease

PullPolicy = Literal["always", "missing", "never"]
# How long a successful pull entitles the same credential to what it pulled (V5): long enough that a
# restarted pod does not ask again, short enough that a withdrawn right ends within the hour.
GRANT_SECONDS: Final = 3600.0


def _plain_mount() -> MountOptions:
    # Imported here: most deliveries mount nothing.
    from unlade.mount import MountOptions

    return MountOptions()


class Directory(msgspec.Struct, frozen=True):
    """A directory of the caller's own: made by one rename. An existing one must be empty, or `replace`d."""

    path: str
    replace: bool = False


class Mounted(msgspec.Struct, frozen=True):
    """A read-only mount at an existing directory (or file, for a sub-path that is one)."""

    path: str
    options: MountOptions = msgspec.field(default_factory=_plain_mount)


class InStore(msgspec.Struct, frozen=True):
    """Blobs in the store, as an OCI image layout that other tools read."""


class AsTree(msgspec.Struct, frozen=True):
    """A shared, read-only tree.

    With a lease of the caller's, the tree is held by it; an engine without a store of its own then leaves
    recording it to the caller. `origins` are references that are known to have supplied this very tree,
    beside those that the engine's store knows (V5).
    """

    lease: Lease | None = None
    origins: tuple[Reference, ...] = ()


class TarStream(msgspec.Struct, frozen=True):
    """A tar archive written to this stream after everything is verified."""

    out: BinaryIO


Destination = Directory | Mounted | InStore | AsTree | TarStream


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery.

    `pull` None means V2's default: always for `latest` or no tag, else only when missing.
    `referrer` is an artifact type: what refers to the reference is delivered instead of it (V12), looked
    for in `referrer_from` when that is another repository. `reauthorize` asks the registry again, with
    these credentials, before cached content is handed out (V5): for callers that serve several tenants.
    `artifact_type` and `annotations` choose among the entries of an index (V11).
    `setid` keeps set-id bits and capabilities of images in a directory of the caller's own.
    """

    references: tuple[Reference, ...]
    destination: Destination
    platform: Platform | None = None
    handler: str = ""
    pull: PullPolicy | None = None
    unpack: Literal["auto", "always", "never"] = "auto"
    only: tuple[str, ...] = ()
    as_file: tuple[str, ...] = ()
    family: str | None = None
    sub_path: str = ""
    referrer: str = ""
    referrer_from: Reference | None = None
    artifact_type: str = ""
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    keep_blobs: bool = False
    setid: bool = False
    reauthorize: bool = False

    def __post_init__(self) -> None:
        if not self.references:
            raise InvalidInput("no reference to deliver", next_step="name at least one reference")
        if len(self.references) > 1 and isinstance(self.destination, InStore):
            raise InvalidInput(
                "several references need a directory to be merged in",
                next_step="pull them one by one, or name DIR",
            )
        if self.sub_path and isinstance(self.destination, InStore):
            raise InvalidInput("a sub-path needs a directory", next_step="name a directory to deliver it to")


class Resolved(msgspec.Struct, frozen=True):
    """What one reference turned out to be: its manifest, and the index it was chosen from."""

    reference: Reference
    digest: Digest
    index: Digest | None = None
    platform: Platform | None = None


class Delivered(msgspec.Struct, frozen=True):
    """What was delivered: where, from what, and how much. `cached`: nothing had to be made."""

    resolved: tuple[Resolved, ...]
    plan: Plan
    path: str | None
    tree: Digest | None
    size: int
    entries: int
    cached: bool
