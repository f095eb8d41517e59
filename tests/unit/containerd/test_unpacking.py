"""Chain IDs, and which manifests are images to containerd."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.corpus.artifact import Kit
from unlade.containerd.handlers import Handler
from unlade.containerd.ordinary import OrdinaryImage, manifest_is_image, only_image_layers
from unlade.containerd.unpacking import chain_ids
from unlade.model import Digest, Manifest, Platform, Reference, decode_manifest, mediatypes


def test_chain_ids() -> None:
    """The example of image-spec, "Layer ChainID": each is the hash of the one below and the layer's own."""
    a, b, c = (Digest.of(text) for text in (b"a", b"b", b"c"))
    two = "sha256:" + hashlib.sha256(f"{a} {b}".encode()).hexdigest()
    three = "sha256:" + hashlib.sha256(f"{two} {c}".encode()).hexdigest()
    assert [str(one) for one in chain_ids([a, b, c])] == [str(a), two, three]
    assert chain_ids([]) == []


def _manifest(*types: str, config: str = mediatypes.OCI_CONFIG) -> Manifest:
    kit = Kit()
    layers: list[dict[str, Any]] = [kit.blob(kind, kind.encode()) for kind in types]
    document = decode_manifest(kit.manifest(kit.blob(config, b"{}"), layers).raw, content_type=None)
    assert isinstance(document, Manifest)
    return document


@pytest.mark.parametrize(
    ("types", "some", "only"),
    [
        ((), True, True),
        ((mediatypes.OCI_LAYER_GZIP,), True, True),
        (("application/vnd.oci.image.layer.v1.tar+gzip+encrypted",), True, True),
        (("application/vnd.oci.image.layer.nydus.blob.v1", mediatypes.OCI_LAYER_GZIP), True, True),
        ((mediatypes.OCI_LAYER, "application/vnd.example.soci"), True, False),
        (("application/vnd.dev.cosign.simplesigning.v1+json",), False, False),
    ],
)
def test_what_is_an_image_to_containerd(types: tuple[str, ...], some: bool, only: bool) -> None:
    manifest = _manifest(*types)
    assert (manifest_is_image(manifest), only_image_layers(manifest)) == (some, only)
    other = _manifest(*types, config="application/vnd.example.config")
    assert not manifest_is_image(other)
    assert not only_image_layers(other)


def test_guests_of_another_platform_are_foreign() -> None:
    def made(platform: Platform) -> OrdinaryImage:
        digest = Digest.of(b"x")
        return OrdinaryImage(Reference.parse("r.example/a:1"), Handler("vm", platform), digest, digest)

    assert not made(Platform.host()).foreign
    assert made(Platform("linux", "riscv64")).foreign
    host = Platform.host()
    assert made(Platform(host.os, host.architecture, host.variant, "", ("erofs",))).foreign
    assert made(host).name == f"r.example/a@{Digest.of(b'x')}"
