"""Media types that decide how bytes are read (image-spec, "media types"; Docker's older names).

Only types that more than one room needs stand here; a format family keeps its own in `plan/`.
"""

from __future__ import annotations

from typing import Final

OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
OCI_EMPTY: Final = "application/vnd.oci.empty.v1+json"
OCI_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYER_GZIP: Final = "application/vnd.oci.image.layer.v1.tar+gzip"
OCI_LAYER_ZSTD: Final = "application/vnd.oci.image.layer.v1.tar+zstd"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG: Final = "application/vnd.docker.container.image.v1+json"

MANIFESTS: Final = frozenset({OCI_MANIFEST, DOCKER_MANIFEST})
INDEXES: Final = frozenset({OCI_INDEX, DOCKER_INDEX})
IMAGE_CONFIGS: Final = frozenset({OCI_CONFIG, DOCKER_CONFIG})
IMAGE_LAYERS: Final = frozenset(
    {
        OCI_LAYER,
        OCI_LAYER_GZIP,
        OCI_LAYER_ZSTD,
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "application/vnd.docker.image.rootfs.diff.tar.zstd",
        "application/vnd.docker.image.rootfs.foreign.diff.tar",
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
    }
)
# What a manifest request accepts, in order of preference.
ACCEPT: Final = (OCI_INDEX, OCI_MANIFEST, DOCKER_INDEX, DOCKER_MANIFEST)

ANNOTATION_TITLE: Final = "org.opencontainers.image.title"
ANNOTATION_REF_NAME: Final = "org.opencontainers.image.ref.name"
ANNOTATION_CREATED: Final = "org.opencontainers.image.created"

# The two bytes `{}`: the config of every artifact that has none (image-spec, "empty descriptor").
EMPTY_JSON: Final = b"{}"
