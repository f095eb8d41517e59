"""What cosign and notation store beside an image: nothing has a name, so the caller must give one (V14)."""

from __future__ import annotations

from typing import Any

from tests.corpus.archives import gzip
from tests.corpus.artifact import CREATED, Artifact, Kit, Node, file
from tests.corpus.images import BASE, add_image
from unlade.errors import NothingProduced
from unlade.model.mediatypes import ANNOTATION_CREATED, OCI_CONFIG, OCI_LAYER_GZIP
from unlade.planning import PlanOptions

_PAYLOAD = b'{"critical":{"type":"cosign container image signature"},"optional":null}'
_SIGNATURE = {"dev.cosignproject.cosign/signature": "MEUCIQ=="}
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def _tagged(
    name: str, media_type: str, payload: bytes, annotations: dict[str, str], **fields: Any
) -> Artifact:
    """The `sha256-….sig` form: an image config over layers that are no tars."""
    kit = Kit()
    layer = kit.blob(media_type, payload, annotations)
    config = {
        "architecture": "",
        "created": "0001-01-01T00:00:00Z",
        "history": [{"created": "0001-01-01T00:00:00Z"}],
        "os": "",
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        "config": {},
    }
    kit.manifest(kit.json(OCI_CONFIG, config), [layer])
    return kit.done(name, "generic", **fields)


def _referring(name: str, artifact_type: str, payload: bytes, **fields: Any) -> Artifact:
    """The referrer form: a subject, an empty config, one untitled layer."""
    kit = Kit()
    image = add_image(kit, [(OCI_LAYER_GZIP, gzip, BASE)])
    kit.manifest(
        kit.empty(data=False),
        [kit.blob(artifact_type, payload)],
        artifact_type=artifact_type,
        subject=image.descriptor(),
        annotations={ANNOTATION_CREATED: CREATED, "dev.sigstore.bundle.content": "dsse-envelope"},
    )
    return kit.done(name, "generic", **fields)


def artifacts() -> list[Artifact]:
    """Each is an error, until the caller names the file."""
    simple = "application/vnd.dev.cosign.simplesigning.v1+json"
    named: dict[str, Node] = {"signature.json": file(_PAYLOAD)}
    return [
        _tagged("cosign-signature", simple, _PAYLOAD, _SIGNATURE, error=NothingProduced),
        _tagged(
            "cosign-signature-named",
            simple,
            _PAYLOAD,
            _SIGNATURE,
            tree=named,
            options=PlanOptions(as_file=("signature.json",)),
        ),
        _tagged(
            "cosign-signature-kept",
            simple,
            _PAYLOAD,
            _SIGNATURE,
            tree={"layer-000.json": file(_PAYLOAD)},
            options=PlanOptions(unpack="never"),
        ),
        _tagged(
            "cosign-attestation",
            "application/vnd.dsse.envelope.v1+json",
            b'{"payloadType":"application/vnd.in-toto+json","payload":"e30=","signatures":[]}',
            {"dev.cosignproject.cosign/signature": "", "predicateType": "https://slsa.dev/provenance/v1"},
            error=NothingProduced,
        ),
        _tagged("cosign-sbom", "text/spdx+json", b'{"spdxVersion":"SPDX-2.3"}', {}, error=NothingProduced),
        _referring("sigstore-bundle", _BUNDLE, b'{"mediaType":"x"}', error=NothingProduced),
        _referring(
            "sigstore-bundle-named",
            _BUNDLE,
            b'{"mediaType":"x"}',
            tree={"bundle.json": file('{"mediaType":"x"}')},
            options=PlanOptions(as_file=("0=bundle.json",)),
        ),
        _referring(
            "notation-signature", "application/jose+json", b'{"payload":"e30"}', error=NothingProduced
        ),
    ]
