"""Options of a pull, from the annotations of its pod: `unlade.dev/…` (V19).

The kubelet copies a pod's annotations into every ImageSpec of the pod, for its containers' images as for
its volumes. So options say which references they are for, and the rest of the pod is left alone:

    unlade.dev/for: registry.example.com/models/large:v1
    unlade.dev/only: "*.safetensors"

A pod with several such volumes puts a group and a dot before the names (`unlade.dev/model.for`,
`unlade.dev/model.only`). A name that we do not know is refused: misspelt options must not be silent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from unlade.containerd import PullOptions
from unlade.errors import InvalidInput
from unlade.model import Reference

PREFIX: Final = "unlade.dev/"
_FOR: Final = "for"


class InvalidAnnotation(InvalidInput):
    """An annotation of ours that cannot be used."""

    code = "invalid-annotation"


def pull_options(annotations: Mapping[str, str], *names: str) -> PullOptions:
    """The options for an image that goes by these names; none unless `for` names it.

    All annotations of the pod are checked, whichever image is asked for. Raises InvalidAnnotation.
    """
    groups: dict[str, dict[str, str]] = {}
    for key, value in annotations.items():
        if key.startswith(PREFIX):
            group, _, option = key.removeprefix(PREFIX).rpartition(".")
            if option != _FOR and option not in _OPTIONS:
                known = ", ".join(sorted({_FOR, *_OPTIONS}))
                raise InvalidAnnotation(
                    f"the pod's annotation {key} is unknown", next_step=f"use one of {known}, after {PREFIX}"
                )
            groups.setdefault(group, {})[option] = value
    wanted = {_canonical(name) for name in names if name}
    found = PullOptions()
    matched = ""
    for group, values in sorted(groups.items()):
        prefix = f"{PREFIX}{group}." if group else PREFIX
        parsed = _parse(prefix, values)
        if wanted.isdisjoint(_canonical(name) for name in _words(values[_FOR])):
            continue
        if matched:
            raise InvalidAnnotation(
                f"the pod's annotations {matched}{_FOR} and {prefix}{_FOR} name the same reference",
                next_step="name each reference once",
            )
        found, matched = parsed, prefix
    return found


def _parse(prefix: str, values: Mapping[str, str]) -> PullOptions:
    if not _words(values.get(_FOR, "")):
        raise InvalidAnnotation(
            f"the pod's annotations {prefix}… do not say for which reference they are",
            next_step=f"add {prefix}{_FOR} with the reference as the volume writes it",
        )
    fields: dict[str, Any] = {}
    for option, value in values.items():
        if option != _FOR:
            field, read = _OPTIONS[option]
            try:
                fields[field] = read(value)
            except ValueError as error:
                raise InvalidAnnotation(
                    f"the pod's annotation {prefix}{option} is {value!r}", next_step=str(error)
                ) from error
    return PullOptions(**fields)


def _canonical(name: str) -> str:
    """One spelling for one reference; text that is none (an image ID) stands for itself."""
    try:
        reference = Reference.parse(name)
    except InvalidInput:
        return name
    if reference.digest is not None:
        return f"{reference.name}@{reference.digest}"
    return f"{reference.name}:{reference.tag_or_latest}"


def _words(value: str) -> tuple[str, ...]:
    """Words apart by commas, spaces or line ends."""
    return tuple(value.replace(",", " ").split())


def _unpack(value: str) -> str:
    if value not in ("auto", "always", "never"):
        raise ValueError("use auto, always or never")
    return value


def _pairs(value: str) -> dict[str, str]:
    pairs = {}
    for word in _words(value):
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ValueError("write KEY=VALUE, several apart by commas")
        pairs[key] = text
    return pairs


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("give it a value, or leave the annotation out")
    return value.strip()


def _repository(value: str) -> str:
    try:
        return Reference.parse(_text(value)).name
    except InvalidInput as error:
        raise ValueError("name a repository, such as registry.example.com/team/signatures") from error


# annotation → (field of PullOptions, how its value is read)
_OPTIONS: Final[dict[str, tuple[str, Callable[[str], object]]]] = {
    "unpack": ("unpack", _unpack),
    "only": ("only", _words),
    "as-file": ("as_file", _words),
    "family": ("family", _text),
    "artifact-type": ("artifact_type", _text),
    "annotations": ("annotations", _pairs),
    "referrer": ("referrer", _text),
    "referrer-from": ("referrer_from", _repository),
}
