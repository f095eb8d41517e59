"""Every artifact of the corpus, as its tool builds it, planned and carried out in memory (V7, V14, V16)."""

from __future__ import annotations

import pytest

from tests.corpus import Artifact, Node, corpus, differences
from tests.corpus.interpreter import carry_out, plan_of

_MADE = [artifact for artifact in corpus() if artifact.error is None]
_REFUSED = [artifact for artifact in corpus() if artifact.error is not None]


@pytest.mark.parametrize("artifact", _MADE, ids=lambda artifact: artifact.name)
def test_the_plan_gives_the_expected_tree(artifact: Artifact) -> None:
    assert artifact.tree is not None
    plan = plan_of(artifact)
    assert differences(artifact.tree, _with_parents(carry_out(plan, artifact.blobs.__getitem__))) == []
    assert plan.family == artifact.family
    assert all(step.rule for step in plan.steps)


@pytest.mark.parametrize("artifact", _REFUSED, ids=lambda artifact: artifact.name)
def test_what_cannot_be_made_is_refused_with_a_next_step(artifact: Artifact) -> None:
    assert artifact.error is not None
    with pytest.raises(artifact.error) as caught:
        plan_of(artifact)
    assert type(caught.value) is artifact.error
    assert caught.value.next_step


@pytest.mark.parametrize("artifact", _MADE, ids=lambda artifact: artifact.name)
def test_a_plan_lists_files_that_are_really_made(artifact: Artifact) -> None:
    plan = plan_of(artifact)
    made = carry_out(plan, artifact.blobs.__getitem__)
    for row in plan.files():
        if row.path.endswith("/"):
            assert row.size is None
        else:
            content = made[row.path].content
            assert content is not None
            assert len(content) == row.size


def test_every_family_is_there() -> None:
    assert {artifact.family for artifact in corpus()} == {
        "image",
        "oras",
        "helm",
        "flux",
        "modelpack",
        "kitops",
        "docker-model",
        "ollama",
        "wasm",
        "kpt",
        "generic",
    }


def _with_parents(tree: dict[str, Node]) -> dict[str, Node]:
    for path in list(tree):
        while path := path.rpartition("/")[0]:
            tree.setdefault(path, Node())
    return tree
