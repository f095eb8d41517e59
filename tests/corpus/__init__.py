"""Artifacts as each tool builds them, with the tree each must become: one corpus for every kind of test.

`corpus()` gives every artifact: its blobs, its manifests (children first) and the expected tree, or the
error that is right. Media types, annotations and config content are the tools' own. Nothing here knows a
registry: unit tests plan from memory, interop tests push to the real one, the cluster tests do the same.
"""

from __future__ import annotations

from functools import cache

from tests.corpus import (
    anything_else,
    docker_model,
    flux,
    helm,
    images,
    indexes,
    kitops,
    kpt,
    modelpack,
    ollama,
    oras,
    signatures,
    wasm,
)
from tests.corpus.artifact import Artifact, Document, Node, Tree, differences, snapshot

__all__ = ["Artifact", "Document", "Node", "Tree", "corpus", "differences", "snapshot"]

_MODULES = (
    images,
    indexes,
    oras,
    helm,
    flux,
    modelpack,
    kitops,
    docker_model,
    ollama,
    wasm,
    kpt,
    signatures,
    anything_else,
)


@cache
def corpus() -> tuple[Artifact, ...]:
    """Every artifact, by family; names are unique and good as tags and test ids."""
    found = tuple(artifact for module in _MODULES for artifact in module.artifacts())
    names = [artifact.name for artifact in found]
    assert len(set(names)) == len(names), "two artifacts of one name"
    return found
