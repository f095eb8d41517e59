"""The tree's key: what decides it, and what does not (design decision "identity")."""

from __future__ import annotations

import json

from tests.corpus.archives import f, gzip, tar
from tests.unit.planning.building import Made, config, layer
from unlade.model.mediatypes import OCI_CONFIG
from unlade.planning import Plan, merge_plans

TAR = tar([f("x", "x")])
BASE = Made(layer(b"1", "a"), layer(TAR)).plan()


def test_canonical_bytes_are_stable() -> None:
    """Pinned: a change here orphans every tree in every store, and needs a new RULES_VERSION."""
    plan = Made(layer(b"1", "a", org__cncf__model__filepath="a"), layer(b"2", "b")).plan()
    assert json.loads(plan.canonical()) == {
        "rules": 1,
        "only": {},
        "steps": [
            [
                0,
                "file",
                "sha256:6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b",
                "a",
                None,
                None,
            ],
            [
                0,
                "file",
                "sha256:d4735e3a265e16eee03f59718b9b5d03019c07d8b6c51f90da3a666eec13ab35",
                "b",
                None,
                None,
            ],
        ],
    }
    assert str(plan.key({"owners": "squash"})) == (
        "sha256:bf4b360c4352da20f1afed93f59bc05dcf83ab18b2c7a2a40a6f714a7ea76a30"
    )


def test_what_does_not_change_the_tree_does_not_change_the_key() -> None:
    key = BASE.key()
    assert Made(layer(b"1", "a"), layer(TAR)).plan().key() == key
    other_types = Made(layer(b"1", "a", "text/plain"), layer(TAR, None, "application/x-tar"))
    assert other_types.plan().key() == key
    annotated = Made(
        layer(b"1", "a", some__note="x"), layer(TAR, other__note="y"), artifact_type="application/x"
    )
    assert annotated.plan().key() == key
    assert Made(layer(b"0", "a"), layer(b"1", "a"), layer(TAR)).plan().key() == key, "a shadowed file"
    assert Made(layer(b"1", "a"), layer(TAR)).plan(unpack="always").key() == key
    assert Made(layer(b"1", None, "text/plain"), layer(TAR)).plan(as_file=("a",)).key() == key


def test_what_changes_the_tree_changes_the_key() -> None:
    metadata = "org.cncf.model.file.metadata+json"
    raw = "application/vnd.cncf.model.weight.v1.raw"
    model = config("application/vnd.cncf.model.config.v1+json")

    def with_metadata(text: str) -> Plan:
        weights = layer(b"w", None, raw, org__cncf__model__filepath="w", **{metadata: text})
        return Made(weights, config=model).plan()

    plans = [
        BASE,
        Made(layer(b"2", "a"), layer(TAR)).plan(),
        Made(layer(b"1", "b"), layer(TAR)).plan(),
        Made(layer(TAR), layer(b"1", "a")).plan(),
        Made(layer(b"1", "a"), layer(gzip(TAR))).plan(),
        Made(layer(b"1", "a"), layer(TAR)).plan(unpack="never"),
        Made(layer(b"1", "a"), layer(TAR)).plan(only=("a", "x")),
        Made(layer(TAR), config=config(OCI_CONFIG)).plan(),
        Made(layer(TAR)).plan(),
        merge_plans([BASE, BASE]),
        with_metadata("{}"),
        with_metadata('{"mode":384}'),
        with_metadata('{"mode":384,"mtime":"2026-03-01T10:00:00Z"}'),
    ]
    assert len({plan.key() for plan in plans}) == len(plans)
    assert BASE.key({"owners": "keep"}) != BASE.key({"owners": "squash"})
    assert BASE.key({"a": 1, "b": 2}) == BASE.key({"b": 2, "a": 1})


def test_a_subset_of_files_only_is_the_files() -> None:
    """Once the files are chosen, how they were chosen does not matter."""
    made = Made(layer(b"1", "a"), layer(b"2", "b"))
    assert made.plan(only=("a",)).key() == Made(layer(b"1", "a")).plan().key()
    tarred = Made(layer(TAR), layer(b"1", "a"))
    assert tarred.plan(only=("a", "x")).key() == tarred.plan(only=("x", "a", "x")).key()


def test_files_and_sizes() -> None:
    rows = list(BASE.files())
    assert [(row.path, row.size) for row in rows] == [("a", 1), ("./", None)]
    assert {row.reference for row in rows} == {"registry.example/made:v1"}
    assert BASE.fetch_size() == 1 + len(TAR)
