"""Platforms: which entry of an index is ours (image-spec, "image index", `platform`).

Matching follows containerd: the architecture is normalised (x86_64 is amd64, aarch64 is arm64/v8), a
variant of arm accepts lower ones, Windows compares the build of os.version, and required os.features
must be offered by the host. `match` gives the best candidate, never a guess.
"""

from __future__ import annotations

import platform as _host
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from unlade.errors import InvalidInput

_ARCHITECTURES: Final = {
    "x86_64": "amd64",
    "x86-64": "amd64",
    "aarch64": "arm64",
    "i386": "386",
    "i686": "386",
    "armhf": "arm",
    "armel": "arm",
    "armv7l": "arm",
    "armv6l": "arm",
}
# An arm host runs code of its own variant and of every older one, newest preferred.
_ARM_VARIANTS: Final = ("v8", "v7", "v6", "v5")
_BRACKET: Final = re.compile(r"([A-Za-z0-9]+)\(([0-9.]*)((?:\+[A-Za-z0-9_.-]{1,64})*)\)", re.ASCII)
_PART: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class InvalidPlatform(InvalidInput):
    """Not a platform: `os/architecture[/variant]`."""

    code = "invalid-platform"


@dataclass(frozen=True, slots=True)
class Platform:
    """An operating system and an architecture, as an index entry or a runtime handler has them."""

    os: str
    architecture: str
    variant: str = ""
    os_version: str = ""
    os_features: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Platform:
        """Parse `os/architecture[/variant]`; raises InvalidPlatform.

        As containerd writes them, `os(version+feature+…)/architecture` has os.version and os.features.
        """
        parts = text.split("/")
        os_part, version, features = parts[0], "", ()
        bracket = _BRACKET.fullmatch(os_part)
        if bracket:
            os_part, version = bracket[1], bracket[2]
            features = tuple(filter(None, bracket[3].split("+")))
        if len(parts) in (2, 3) and all(_PART.fullmatch(part) for part in (os_part, *parts[1:])):
            variant = parts[2] if len(parts) == 3 else ""
            parsed = cls(os_part, parts[1], variant, version, features).normalised()
            # Looked at again, because a number as variant gets a letter: what is printed must parse.
            if not parsed.variant or _PART.fullmatch(parsed.variant):
                return parsed
        raise InvalidPlatform(
            f"{text[:140]!r} is not a platform", next_step="write os/architecture, such as linux/arm64"
        )

    @classmethod
    def host(cls) -> Platform:
        """The platform this process runs on, with linux instead of darwin: content is made for Linux."""
        system = "windows" if sys.platform == "win32" else "linux"
        machine = _host.machine().lower()
        variant = {"armv7l": "v7", "armv6l": "v6"}.get(machine, "")
        return cls(system, machine, variant).normalised()

    def normalised(self) -> Platform:
        """The same platform in containerd's spelling."""
        architecture = self.architecture.lower()
        architecture = _ARCHITECTURES.get(architecture, architecture)
        variant = self.variant.lower()
        if variant.isdigit():
            variant = f"v{variant}"
        if architecture == "arm64" and variant == "v8":
            variant = ""  # arm64 has no other baseline: v8 and nothing are one platform
        if architecture == "arm" and not variant:
            variant = "v7"
        if architecture == "amd64" and variant == "v1":
            variant = ""
        return Platform(
            self.os.lower(), architecture, variant, self.os_version, tuple(sorted(self.os_features))
        )

    def score(self, candidate: Platform) -> int | None:
        """How well a candidate suits this platform: None when not at all, else higher is better."""
        mine, theirs = self.normalised(), candidate.normalised()
        if mine.os != theirs.os:
            return None
        if not set(theirs.os_features) <= set(mine.os_features):
            return None
        architecture = _architecture_score(mine, theirs)
        version = _version_score(mine, theirs)
        if architecture is None or version is None:
            return None
        return architecture * 1000 + version * 10 + len(theirs.os_features)

    def match(self, candidates: Iterable[Platform | None]) -> int | None:
        """The index of the best candidate, the first among equals; None when none suits."""
        best: tuple[int, int] | None = None
        for position, candidate in enumerate(candidates):
            score = self.score(candidate) if candidate is not None else None
            if score is not None and (best is None or score > best[0]):
                best = (score, position)
        return best[1] if best else None

    def __str__(self) -> str:
        more = "+".join((self.os_version, *self.os_features))
        version = f"({more})" if more else ""
        return "/".join(part for part in (self.os + version, self.architecture, self.variant) if part)


def _architecture_score(mine: Platform, theirs: Platform) -> int | None:
    if mine.architecture == theirs.architecture == "arm":
        order = _ARM_VARIANTS
        if mine.variant not in order or theirs.variant not in order:
            return 9 if mine.variant == theirs.variant else None
        behind = order.index(theirs.variant) - order.index(mine.variant)
        return 9 - behind if behind >= 0 else None
    if mine.architecture == "arm64" and theirs.architecture == "arm":
        # 64-bit arm hosts run 32-bit content; only when nothing better is there.
        return 4 - _ARM_VARIANTS.index(theirs.variant) if theirs.variant in _ARM_VARIANTS else None
    if mine.architecture != theirs.architecture:
        return None
    return _level_score(mine.variant, theirs.variant)


def _level_score(mine: str, theirs: str) -> int | None:
    # amd64/v3 runs v2 and plain code too, and arm64/v9 runs v8; the nearest is best, a higher one is none.
    if mine == theirs:
        return 9
    mine_level, their_level = _level(mine), _level(theirs)
    if mine_level is None or their_level is None or their_level > mine_level:
        return None
    return max(1, 9 - (mine_level - their_level))


def _level(variant: str) -> int | None:
    if not variant:
        return 0
    return int(variant[1:]) if re.fullmatch(r"v[0-9]{1,3}", variant) else None


def _version_score(mine: Platform, theirs: Platform) -> int | None:
    if mine.os != "windows" or not mine.os_version or not theirs.os_version:
        return 1
    # Windows containers run where the build (third number) equals the host's; the revision may differ (R7).
    mine_build, their_build = mine.os_version.split(".")[:3], theirs.os_version.split(".")[:3]
    if mine_build != their_build:
        return None
    return 9 if mine.os_version == theirs.os_version else 8
