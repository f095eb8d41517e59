"""Digests: the names of content (OCI image-spec, "Digests").

A `Digest` is made by `parse` or `of` and is valid from then on: algorithm from a short list, lower-case
hex of the exact length. It is therefore safe as a file name, which CVE-2024-3727 shows a raw string is
not. `DiffID` (of an uncompressed layer) and `ChainID` (of a stack of layers) are types of their own, so
that mypy refuses the mix-up that has bitten every other implementation.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NewType

from unlade.errors import InvalidInput

if TYPE_CHECKING:
    from hashlib import _Hash

# Only algorithms that are both registered by OCI and collision-resistant today.
_HEX_LENGTH: Final = {"sha256": 64, "sha512": 128}
_LOWER_HEX: Final = re.compile(r"[0-9a-f]+", re.ASCII)


class InvalidDigest(InvalidInput):
    """Not a digest by the strict grammar."""

    code = "invalid-digest"


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """An algorithm and lower-case hex; `str(d)` is the OCI form."""

    algorithm: str
    hex: str

    def __post_init__(self) -> None:
        length = _HEX_LENGTH.get(self.algorithm)
        if length is None:
            raise InvalidDigest(
                f"digest algorithm {self.algorithm[:32]!r} is not accepted",
                next_step="use a sha256 or sha512 digest",
            )
        if len(self.hex) != length or not _LOWER_HEX.fullmatch(self.hex):
            raise InvalidDigest(
                f"{self.algorithm} digest must be {length} lower-case hex digits, got {self.hex[:140]!r}",
                next_step="copy the digest whole, as the registry shows it",
            )

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Parse `algorithm:hex`; raises InvalidDigest."""
        algorithm, colon, hexadecimal = text.partition(":")
        if not colon:
            raise InvalidDigest(
                f"{text[:140]!r} is not a digest", next_step="write it as sha256:<64 hex digits>"
            )
        return cls(algorithm, hexadecimal)

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> Digest:
        """The sha256 of data."""
        return cls("sha256", hashlib.sha256(data).hexdigest())

    def hasher(self) -> _Hash:
        """A fresh hash object of this digest's algorithm."""
        return hashlib.new(self.algorithm)

    def matches(self, hasher: _Hash) -> bool:
        """Whether a finished hasher gives this digest."""
        return hasher.hexdigest() == self.hex

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"


DiffID = NewType("DiffID", Digest)
ChainID = NewType("ChainID", Digest)


def chain_id(parent: ChainID | None, diff: DiffID) -> ChainID:
    """The identity of a stack: the diff ID itself for the first layer (image-spec, "Layer ChainID")."""
    if parent is None:
        return ChainID(diff)
    return ChainID(Digest.of(f"{parent} {diff}".encode()))
