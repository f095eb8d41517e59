"""What `ollama push` writes: Docker's manifest and config types, its own layer types, no names."""

from __future__ import annotations

from typing import Any

from tests.corpus.artifact import Artifact, Kit, Tree, file
from unlade.model.mediatypes import DOCKER_CONFIG, DOCKER_MANIFEST
from unlade.model.paths import UnsafeTitle

_LAYER = "application/vnd.ollama.image."


def _push(name: str, layers: list[tuple[str, bytes]], tree: Tree) -> Artifact:
    kit = Kit()
    made = [kit.blob(f"{_LAYER}{kind}", content) for kind, content in layers]
    config = {
        "model_format": "gguf",
        "model_family": "llama",
        "model_families": ["llama"],
        "model_type": "8.0B",
        "file_type": "Q4_0",
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in made]},
    }
    kit.manifest(kit.json(DOCKER_CONFIG, config), made, media_type=DOCKER_MANIFEST)
    return kit.done(name, "ollama", tree)


def _tensors(name: str, *layers: tuple[str, str, bytes], **fields: Any) -> Artifact:
    """Models kept as tensors: each layer has a field `name`, which OCI does not know."""
    kit = Kit()
    made = [kit.blob(f"{_LAYER}{kind}", content) | {"name": path} for kind, path, content in layers]
    kit.manifest(kit.json(DOCKER_CONFIG, {"model_format": "safetensors"}), made, media_type=DOCKER_MANIFEST)
    return kit.done(name, "ollama", **fields)


def artifacts() -> list[Artifact]:
    """A plain model, and one with everything a Modelfile can add."""
    return [
        _tensors(
            "ollama-tensors",
            ("tensor", "text_encoder/embed.weight", b"tensor one"),
            ("tensor", "vae/decoder.weight", b"tensor two"),
            ("json", "text_encoder/config.json", b"{}"),
            tree={
                "text_encoder/embed.weight": file("tensor one"),
                "vae/decoder.weight": file("tensor two"),
                "text_encoder/config.json": file("{}"),
            },
        ),
        _tensors("ollama-escaping-name", ("tensor", "../../evil", b"tensor"), error=UnsafeTitle),
        _push(
            "ollama-model",
            [
                ("model", b"GGUF"),
                ("template", b"{{ .Prompt }}"),
                ("license", b"MIT\n"),
                ("params", b'{"stop":["x"]}'),
            ],
            {
                "model.gguf": file("GGUF"),
                "template.txt": file("{{ .Prompt }}"),
                "license.txt": file("MIT\n"),
                "params.json": file('{"stop":["x"]}'),
            },
        ),
        _push(
            "ollama-everything",
            [
                ("model", b"GGUF"),
                ("projector", b"clip"),
                ("adapter", b"lora"),
                ("system", b"You are."),
                ("messages", b"[]"),
                ("license", b"MIT\n"),
                ("license", b"BSD\n"),
                ("novelty", b"new kind"),
            ],
            {
                "model.gguf": file("GGUF"),
                "projector.gguf": file("clip"),
                "adapter.gguf": file("lora"),
                "system.txt": file("You are."),
                "messages.json": file("[]"),
                "license-00001-of-00002.txt": file("MIT\n"),
                "license-00002-of-00002.txt": file("BSD\n"),
                "novelty": file("new kind"),
            },
        ),
    ]
