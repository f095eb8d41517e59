"""Images and artifacts told apart by their manifests, for the whole corpus."""

from __future__ import annotations

import pytest

from tests.corpus import Artifact, corpus
from unlade.containerd.ordinary import manifest_is_image
from unlade.model import Manifest


@pytest.mark.parametrize("artifact", corpus(), ids=lambda artifact: artifact.name)
def test_the_corpus(artifact: Artifact) -> None:
    top = artifact.document(artifact.top.digest)
    if isinstance(top, Manifest):
        assert manifest_is_image(top) is (artifact.family == "image")
    else:
        children = [artifact.document(entry.digest) for entry in top.manifests]
        images = [manifest_is_image(child) for child in children if isinstance(child, Manifest)]
        assert any(images) is (artifact.family == "image") or not images
