"""docs/formats.md says what the code does: families, stable names, limits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.planning.building import Made, layer
from unlade.planning.families import FAMILIES
from unlade.planning.select import MAX_INDEX_DEPTH

PAGE = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()


def rows(heading: str) -> list[tuple[str, str]]:
    """The first two columns of the table whose header contains `heading`."""
    table = PAGE.split(heading, 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    return [(first.strip(), second.strip()) for first, second in cells]


def test_every_family_has_its_row() -> None:
    listed = {first.strip("`") for first, _ in rows("| family | recognised by")}
    assert listed == {"image", "(index)", *(family.NAME for family in FAMILIES)}


@pytest.mark.parametrize("vendor", ["docker.ai", "ollama.image"])
def test_stable_names_are_as_documented(vendor: str) -> None:
    family = "docker-model" if vendor == "docker.ai" else "ollama"
    seen = 0
    for kinds, names in rows(f"`application/vnd.{vendor}.…` | name |"):
        documented = re.findall(r"`([^`]+)`", names)
        for kind, name in zip(re.findall(r"`([^`]+)`", kinds), documented, strict=False):
            if name == "…":
                break
            made = Made(layer(b"content", None, f"application/vnd.{vendor}.{kind}"))
            assert [step.path for step in made.plan(family=family).steps] == [name]
            seen += 1
    assert seen >= 5


def test_the_depth_of_indexes_is_as_documented() -> None:
    assert {4: "four"}[MAX_INDEX_DEPTH] in PAGE
