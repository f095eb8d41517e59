"""Manifests are hostile until decoded (CVE-2021-41190 and its kin)."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from unlade.model import Digest, Index, InvalidManifest, Manifest, Platform, decode_manifest, mediatypes

DIGEST = str(Digest.of(b"x"))
DESCRIPTOR = {"mediaType": "application/octet-stream", "digest": DIGEST, "size": 1}


def manifest(**changes: Any) -> bytes:
    document = {
        "schemaVersion": 2,
        "mediaType": mediatypes.OCI_MANIFEST,
        "config": DESCRIPTOR,
        "layers": [DESCRIPTOR],
    }
    document.update(changes)
    return json.dumps({key: value for key, value in document.items() if value is not None}).encode()


def test_a_manifest() -> None:
    decoded = decode_manifest(manifest(artifactType="a/b", annotations={"k": "v"}, unknown=[1, 2]))
    assert isinstance(decoded, Manifest)
    assert decoded.effective_artifact_type == "a/b"
    assert decoded.layers[0].digest == Digest.of(b"x")
    assert dict(decoded.annotations) == {"k": "v"}


def test_an_index_with_platforms() -> None:
    entry = DESCRIPTOR | {"platform": {"os": "linux", "architecture": "arm64", "os.features": ["a"]}}
    decoded = decode_manifest(json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
    assert isinstance(decoded, Index)
    assert decoded.media_type == mediatypes.OCI_INDEX
    assert decoded.manifests[0].platform == Platform("linux", "arm64", os_features=("a",))


def test_type_from_the_announcement_when_the_document_has_none() -> None:
    decoded = decode_manifest(manifest(mediaType=None), content_type=mediatypes.DOCKER_MANIFEST)
    assert decoded.media_type == mediatypes.DOCKER_MANIFEST


def test_announced_as_plain_text_is_accepted() -> None:
    assert isinstance(decode_manifest(manifest(), content_type="text/plain; charset=utf-8"), Manifest)


def test_embedded_data_must_match() -> None:
    good = DESCRIPTOR | {"data": base64.b64encode(b"x").decode()}
    decoded = decode_manifest(manifest(config=good))
    assert isinstance(decoded, Manifest)
    assert decoded.config.data == b"x"
    with pytest.raises(InvalidManifest):
        decode_manifest(manifest(config=DESCRIPTOR | {"data": base64.b64encode(b"y").decode()}))


@pytest.mark.parametrize(
    ("raw", "content_type"),
    [
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b"{}", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (manifest(schemaVersion=1), None),
        (manifest(schemaVersion="2"), None),
        (manifest(manifests=[DESCRIPTOR]), None),
        (json.dumps({"schemaVersion": 2, "manifests": [], "config": DESCRIPTOR}).encode(), None),
        (manifest(layers=None), None),
        (manifest(config=None), None),
        (manifest(mediaType="application/json"), None),
        (manifest(mediaType=mediatypes.OCI_INDEX), None),
        (manifest(), mediatypes.OCI_INDEX),
        (manifest(), mediatypes.DOCKER_MANIFEST),
        (manifest(mediaType=None), mediatypes.OCI_INDEX),
        (manifest(layers=[DESCRIPTOR | {"size": -1}]), None),
        (manifest(layers=[DESCRIPTOR | {"size": 1 << 62}]), None),
        (manifest(layers=[DESCRIPTOR | {"size": 1.5}]), None),
        (manifest(layers=[DESCRIPTOR | {"digest": DIGEST.upper()}]), None),
        (manifest(layers=[DESCRIPTOR | {"digest": "../x"}]), None),
        (manifest(layers=[DESCRIPTOR] * 10_001), None),
        (manifest(annotations={"k": 1}), None),
        (manifest(annotations={"k": "v" * (4 << 20)}), None),
        (manifest(fsLayers=[], schemaVersion=2), None),
    ],
)
def test_refused(raw: bytes, content_type: str | None) -> None:
    with pytest.raises(InvalidManifest):
        decode_manifest(raw, content_type=content_type)
