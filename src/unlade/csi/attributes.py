"""What a volume's author may say: the attributes of an inline volume, and the mount flags.

Attributes are strings by name, checked by nobody before us, so an unknown one is refused by its name: a
misspelt `pullpolicy` must not mean the default. What the kubelet adds has a prefix of its own and is left
alone, known or not. The result is frozen, and its `fingerprint` tells whether a repeated publish asks for
the same thing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal, cast

from unlade.delivery import PullPolicy
from unlade.errors import InvalidInput
from unlade.model import Platform, Reference

_KNOWN: Final = (
    "reference",
    "references",
    "pullPolicy",
    "subPath",
    "unpack",
    "exec",
    "handler",
    "platform",
    "referrer",
)
# The kubelet's own additions, and those of the standard provisioner to volumes it made.
_FOREIGN: Final = ("csi.storage.k8s.io/", "storage.kubernetes.io/")
_POLICIES: Final[Mapping[str, PullPolicy]] = {
    "Always": "always",
    "IfNotPresent": "missing",
    "Never": "never",
}
_UNPACK: Final = ("auto", "always", "never")
_TRUTH: Final = {"true": True, "false": False}
# Flags that say what is so anyway; noexec is a wish where the volume can be written.
_ALWAYS_SO: Final = frozenset({"ro", "nosuid", "nodev", "noexec"})
_CONTEXT: Final = re.compile(r'context="?([A-Za-z0-9_:.,-]+)"?')
# Merging needs every reference's manifest at once; nobody stacks this many by hand.
_MAX_REFERENCES: Final = 64


class InvalidAttribute(InvalidInput):
    """An attribute of the volume that is unknown, missing, or has no such value."""

    code = "invalid-attribute"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One inline volume as its author wrote it."""

    references: tuple[Reference, ...]
    pull: PullPolicy | None = None
    sub_path: str = ""
    unpack: Literal["auto", "always", "never"] = "auto"
    executable: bool = False
    handler: str = ""
    platform: Platform | None = None
    referrer: str = ""
    context: str = ""

    def fingerprint(self) -> str:
        """Equal for volumes that ask for the same."""
        told = asdict(self) | {"references": [str(one) for one in self.references]}
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def parse(attributes: Mapping[str, str], flags: Iterable[str] = ()) -> Wanted:
    """Read a volume's attributes and mount flags; raises InvalidAttribute or InvalidReference."""
    own = {name: value for name, value in attributes.items() if not name.startswith(_FOREIGN)}
    for name in own:
        if name not in _KNOWN:
            raise InvalidAttribute(
                f"unknown volume attribute {name[:80]!r}", next_step=f"there are: {', '.join(_KNOWN)}"
            )
    platform = own.get("platform", "")
    return Wanted(
        references=_references(own),
        pull=cast("PullPolicy | None", _one_of(own, "pullPolicy", _POLICIES)),
        sub_path=_sub_path(own.get("subPath", "")),
        unpack=cast(
            "Literal['auto', 'always', 'never']",
            _one_of(own, "unpack", {value: value for value in _UNPACK}) or "auto",
        ),
        executable=bool(_one_of(own, "exec", _TRUTH)),
        handler=own.get("handler", ""),
        platform=Platform.parse(platform) if platform else None,
        referrer=own.get("referrer", ""),
        context=mount_context(flags),
    )


def _references(own: Mapping[str, str]) -> tuple[Reference, ...]:
    one, several = own.get("reference", "").strip(), own.get("references", "")
    if one and several:
        raise InvalidAttribute("both `reference` and `references` are given", next_step="give one of them")
    names = [one] if one else [name for name in re.split(r"[\s,]+", several) if name]
    if not names:
        raise InvalidAttribute(
            "the volume has no `reference`", next_step="name what to mount: reference: HOST/REPOSITORY:TAG"
        )
    if len(names) > _MAX_REFERENCES:
        raise InvalidAttribute(
            f"{len(names)} references; at most {_MAX_REFERENCES} are merged",
            next_step="push one artifact that holds them all",
        )
    return tuple(Reference.parse(name) for name in names)


def _one_of(own: Mapping[str, str], name: str, values: Mapping[str, object]) -> object:
    value = own.get(name, "")
    if not value:
        return None
    if value not in values:
        raise InvalidAttribute(
            f"{name} cannot be {value[:80]!r}", next_step=f"write one of {', '.join(values)}"
        )
    return values[value]


def _sub_path(text: str) -> str:
    if text.startswith("/") or ".." in text.split("/"):
        raise InvalidAttribute(
            f"subPath {text[:80]!r} must be inside the content", next_step="write it relative, without `..`"
        )
    return text.strip("/")


def mount_context(flags: Iterable[str]) -> str:
    """The SELinux label among mount flags; raises InvalidAttribute for flags that mean nothing here."""
    context = ""
    for flag in flags:
        match = _CONTEXT.fullmatch(flag)
        if match:
            context = match[1]
        elif flag not in _ALWAYS_SO:
            raise InvalidAttribute(
                f"mount option {flag[:80]!r} is not known",
                next_step="take it out: `context=…`, ro, nosuid, nodev and noexec are",
            )
    return context
