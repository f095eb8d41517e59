"""kpt packages: as an image of one layer, as today's tools push them, and as an artifact of one tar."""

from __future__ import annotations

from tests.corpus.archives import d, f, gzip, tar
from tests.corpus.artifact import Artifact, Kit, file
from tests.corpus.images import DOCKER_LAYER_GZIP, add_image, plain
from unlade.model.mediatypes import OCI_LAYER, OCI_LAYER_GZIP

_KPTFILE = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: app\n"
_FILES = [
    f("Kptfile", _KPTFILE),
    f("deployment.yaml", "kind: Deployment\n"),
    d("sub/"),
    f("sub/Kptfile", _KPTFILE),
]
_TREE = {
    "Kptfile": file(_KPTFILE, 0o644),
    "deployment.yaml": file("kind: Deployment\n", 0o644),
    "sub/Kptfile": file(_KPTFILE, 0o644),
}


def artifacts() -> list[Artifact]:
    """Every way in which a package travels."""
    docker = Kit()
    add_image(docker, [(DOCKER_LAYER_GZIP, gzip, _FILES)], docker=True)
    oci = Kit()
    add_image(oci, [(OCI_LAYER, plain, _FILES)])
    artifact = Kit()
    artifact.manifest(
        artifact.empty(),
        [artifact.blob(OCI_LAYER_GZIP, gzip(tar(_FILES)))],
        artifact_type="application/vnd.example.kpt.package.v1",
    )
    return [
        docker.done("kpt-docker-image", "image", _TREE),
        oci.done("kpt-oci-image", "image", _TREE),
        artifact.done("kpt-artifact", "kpt", _TREE),
    ]
