"""The image that stands for a tree: the same for the same tree, another for any other, of its size."""

from __future__ import annotations

import json

from unlade.containerd.naming import diff_id
from unlade.containerd.synthetic import synthesize
from unlade.model import Digest, Platform, decode_manifest
from unlade.model.manifest import Manifest

HOST = Platform("linux", "arm64", "v8")
ONE, TWO = Digest.of(b"one"), Digest.of(b"two")


def test_the_image_of_a_tree() -> None:
    made = synthesize(ONE, diff_id(b"salt", ONE), size=10**11, host=HOST)
    manifest = decode_manifest(made.manifest_bytes)
    assert isinstance(manifest, Manifest)
    assert manifest.config == made.config
    assert [layer.size for layer in manifest.layers] == [10**11]
    config = json.loads(made.config_bytes)
    assert config["config"]["Labels"]["unlade.dev/tree"] == str(ONE)
    assert config["rootfs"] == {"type": "layers", "diff_ids": [str(manifest.layers[0].digest)]}
    assert (config["os"], config["architecture"], config["variant"]) == ("linux", "arm64", "v8")
    assert made.id == str(Digest.of(made.config_bytes))
    assert made.manifest.digest == Digest.of(made.manifest_bytes)


def test_same_tree_same_image_other_tree_other_image() -> None:
    def image(tree: Digest) -> str:
        return synthesize(tree, diff_id(b"salt", tree), size=1, host=HOST).id

    assert image(ONE) == image(ONE)
    assert image(ONE) != image(TWO)


def test_who_knows_the_key_does_not_know_the_snapshot() -> None:
    """V5: the name of a snapshot depends on a secret of the node."""
    assert diff_id(b"salt", ONE) != ONE
    assert diff_id(b"salt", ONE) != diff_id(b"other", ONE)
    assert diff_id(b"salt", ONE) == diff_id(b"salt", ONE)
