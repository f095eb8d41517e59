"""The table of families, in the order in which they are asked.

Families with types of their own come first; ORAS, which knows titles and one annotation only, comes after
them, and the general rules last. Images are not in the table: rule 1 is asked before all of them.
"""

from __future__ import annotations

from typing import Final

from unlade.errors import InvalidInput
from unlade.model import Manifest
from unlade.planning import (
    docker_model,
    flux,
    generic,
    helm,
    kitops,
    kpt,
    modelpack,
    ollama,
    oras,
    wasm,
)
from unlade.planning.view import Family

FAMILIES: Final[tuple[Family, ...]] = (
    helm,
    flux,
    modelpack,
    kitops,
    docker_model,
    ollama,
    wasm,
    kpt,
    oras,
    generic,
)


def recognise(manifest: Manifest) -> Family:
    """The first family that knows the manifest; the general one knows all."""
    return next(family for family in FAMILIES if family.recognise(manifest))


def by_name(name: str) -> Family:
    """The family a caller named; raises InvalidInput."""
    for family in FAMILIES:
        if name == family.NAME:
            return family
    known = ", ".join(["image", *(family.NAME for family in FAMILIES)])
    raise InvalidInput(f"there is no format family {name[:64]!r}", next_step=f"use one of {known}")
