"""Runtime handlers as this node has them, and the options a pull may carry.

A handler decides two things about an image: the platform whose entry of an index is meant (R3), and the
snapshotter that must hold it (R6). The node's configuration names every handler; an unknown one is refused
rather than taken for the default, as containerd would do (R2). What containerd is asked for is decided by
(reference, handler, options), so options have a fingerprint that is part of a record's key. The service notes
its handlers in containerd (`remember`), so that commands on the same node know what it knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from unlade.containerd.connection import Containerd
from unlade.containerd.errors import UnknownHandler
from unlade.errors import InvalidInput
from unlade.model import Platform

DEFAULT_SNAPSHOTTER = "overlayfs"
_LABEL: Final = "unlade.dev/handlers"
# containerd refuses labels whose name and value are longer together.
_LONGEST: Final = 4096 - len(_LABEL)


@dataclass(frozen=True, slots=True)
class Handler:
    """One runtime handler: what its guests are, and where their images must be."""

    name: str
    platform: Platform
    snapshotter: str = DEFAULT_SNAPSHOTTER


@dataclass(frozen=True, slots=True)
class Handlers:
    """The handlers of a node."""

    default: str
    known: Mapping[str, Handler]

    def __post_init__(self) -> None:
        if self.default not in self.known:
            raise InvalidInput(
                f"the default runtime handler {self.default!r} is not among the node's handlers",
                next_step="correct the node's configuration",
            )

    @classmethod
    def single(
        cls,
        name: str = "runc",
        platform: Platform | None = None,
        snapshotter: str = DEFAULT_SNAPSHOTTER,
    ) -> Handlers:
        """A node with one handler, for the host's own platform unless told."""
        return cls(name, {name: Handler(name, platform or Platform.host(), snapshotter)})

    def resolve(self, name: str) -> Handler:
        """The handler of this name, the default for an empty one; raises UnknownHandler."""
        found = self.known.get(name or self.default)
        if found is None:
            raise UnknownHandler(
                f"the runtime handler {name!r} is not configured on this node",
                next_step=f"use one of {', '.join(sorted(self.known))}, or configure it on the node",
            )
        return found

    def snapshotters(self) -> frozenset[str]:
        """Every snapshotter that some handler uses."""
        return frozenset(handler.snapshotter for handler in self.known.values())


@dataclass(frozen=True, slots=True)
class PullOptions:
    """What the caller wants otherwise than the rules would (V19); the names are those of `Request`."""

    unpack: Literal["auto", "always", "never"] = "auto"
    only: tuple[str, ...] = ()
    as_file: tuple[str, ...] = ()
    family: str | None = None
    artifact_type: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    referrer: str = ""
    referrer_from: str = ""

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for beyond the reference."""
        return self == PullOptions()

    def fingerprint(self) -> str:
        """Tells options apart in a record's key; empty when there are none."""
        if self.plain:
            return ""
        asked = {
            "unpack": self.unpack,
            "only": sorted(set(self.only)),
            "as_file": list(self.as_file),
            "family": self.family,
            "artifact_type": self.artifact_type,
            "annotations": dict(sorted(self.annotations.items())),
            "referrer": self.referrer,
        }
        if self.referrer_from:
            # Later than the others: what was recorded without it keeps its fingerprint.
            asked["referrer_from"] = self.referrer_from
        return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:16]


class _Noted(msgspec.Struct):
    platform: str
    snapshotter: str


class _AllNoted(msgspec.Struct):
    default: str
    known: dict[str, _Noted]


_ALL_NOTED: Final = msgspec.json.Decoder(_AllNoted)


def remember(containerd: Containerd, handlers: Handlers) -> None:
    """Note a node's handlers where `recall` finds them; more than containerd keeps are not noted."""
    known = {name: _Noted(str(one.platform), one.snapshotter) for name, one in handlers.known.items()}
    text = msgspec.json.encode(_AllNoted(handlers.default, known)).decode()
    containerd.note(_LABEL, text if len(text) <= _LONGEST else "")


def recall(containerd: Containerd) -> Handlers | None:
    """The handlers that the node's service noted; None when no service did."""
    try:
        noted = _ALL_NOTED.decode(containerd.noted(_LABEL) or "null")
        known = {
            name: Handler(name, Platform.parse(one.platform), one.snapshotter)
            for name, one in noted.known.items()
        }
        return Handlers(noted.default, known)
    except (msgspec.DecodeError, InvalidInput):
        return None  # of another version, or none
