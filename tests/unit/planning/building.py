"""Manifests for the plan's tests, put together from a few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unlade.model import Descriptor, Digest, Manifest
from unlade.model.mediatypes import ANNOTATION_TITLE, OCI_EMPTY, OCI_LAYER, OCI_MANIFEST
from unlade.planning import Plan, PlanOptions, make_plan


class Made:
    """An artifact in memory that counts what is looked at."""

    def __init__(
        self, *layers: Descriptor, config: Descriptor | None = None, artifact_type: str = ""
    ) -> None:
        self.blobs: dict[Digest, bytes] = {}
        self.peeked: list[Digest] = []
        self.configs_read = 0
        self.config_bytes = b"{}"
        config = config or Descriptor(media_type=OCI_EMPTY, digest=Digest.of(b"{}"), size=2)
        self.manifest = Manifest(
            media_type=OCI_MANIFEST, config=config, layers=layers, artifact_type=artifact_type
        )
        for layer in layers:
            assert layer.data is not None
            self.blobs[layer.digest] = layer.data
        # The bytes are embedded only to carry them here; a registry's descriptors have none.
        self.manifest = Manifest(
            media_type=OCI_MANIFEST,
            config=config,
            layers=tuple(_bare(layer) for layer in layers),
            artifact_type=artifact_type,
        )

    def plan(self, *, one_of_several: bool = False, **options: Any) -> Plan:
        """Plan it under these options."""
        digest = Digest.of(b"manifest")
        return make_plan(
            self.manifest,
            Descriptor(media_type=OCI_MANIFEST, digest=digest, size=100),
            reference="registry.example/made:v1",
            options=PlanOptions(**options),
            one_of_several=one_of_several,
            read_config=self._config,
            peek=self._peek,
        )

    def _config(self) -> bytes:
        self.configs_read += 1
        return self.config_bytes

    def _peek(self, layer: Descriptor, count: int) -> bytes:
        self.peeked.append(layer.digest)
        return self.blobs[layer.digest][:count]


def layer(
    content: bytes, title: str | None = None, media_type: str = OCI_LAYER, **annotations: str
) -> Descriptor:
    """A layer; keyword names stand for annotation keys with dots written as double underscores."""
    keys = {key.replace("__", "."): value for key, value in annotations.items()}
    if title is not None:
        keys[ANNOTATION_TITLE] = title
    return Descriptor(
        media_type=media_type, digest=Digest.of(content), size=len(content), annotations=keys, data=content
    )


def config(media_type: str, content: bytes = b"{}") -> Descriptor:
    """A config descriptor."""
    return Descriptor(media_type=media_type, digest=Digest.of(content), size=len(content))


def summary(plan: Plan) -> Sequence[tuple[str, str]]:
    """Action and path of every step."""
    return [(step.action, step.path) for step in plan.steps]


def _bare(layer: Descriptor) -> Descriptor:
    return Descriptor(
        media_type=layer.media_type, digest=layer.digest, size=layer.size, annotations=layer.annotations
    )
