"""What `docker model package` writes, with names and, as its first releases did, without."""

from __future__ import annotations

from typing import Any

from tests.corpus.archives import d, f, tar
from tests.corpus.artifact import CREATED, Artifact, Kit, Tree, file
from tests.corpus.modelpack import MTIME, metadata

_AI = "application/vnd.docker.ai."
_V01, _V02 = f"{_AI}model.config.v0.1+json", f"{_AI}model.config.v0.2+json"


def _push(
    name: str,
    config_type: str,
    layers: list[tuple[str, str | None, bytes]],
    tree: Tree,
    format_: str = "gguf",
) -> Artifact:
    kit = Kit()
    made: list[dict[str, Any]] = []
    for kind, path, content in layers:
        annotations = None
        if path is not None:
            annotations = {
                "org.cncf.model.filepath": path,
                "org.cncf.model.file.metadata+json": metadata(path, len(content), 0o644),
                "org.cncf.model.file.mediatype.untested": "false",
            }
        made.append(kit.blob(f"{_AI}{kind}", content, annotations))
    config = {
        "config": {
            "format": format_,
            "quantization": "Q4_K_M",
            "parameters": "361.82 M",
            "architecture": "llama",
            "size": "256.35 MiB",
        },
        "descriptor": {"created": CREATED},
        "rootfs": {"type": "rootfs", "diff_ids": [layer["digest"] for layer in made]},
    }
    kit.manifest(kit.json(config_type, config), made)
    return kit.done(name, "docker-model", tree)


def artifacts() -> list[Artifact]:
    """GGUF, shards, safetensors with vLLM's config archive, a directory, and a v0.2 tree."""
    vllm = tar([f("config.json", "{}\n"), f("tokenizer.json", "{}\n")])
    folder = tar([d("text_encoder/"), f("text_encoder/config.json", "{}\n")])
    return [
        _push(
            "docker-model-gguf-unnamed",
            _V01,
            [
                ("gguf.v3", None, b"GGUF weights"),
                ("license", None, b"MIT\n"),
                ("license", None, b"Apache\n"),
                ("mmproj", None, b"projector"),
                ("chat.template.jinja", None, b"{{ m }}"),
            ],
            {
                "model.gguf": file("GGUF weights", 0o644),
                "LICENSE-00001-of-00002": file("MIT\n"),
                "LICENSE-00002-of-00002": file("Apache\n"),
                "model.mmproj": file("projector"),
                "template.jinja": file("{{ m }}"),
            },
        ),
        _push(
            "docker-model-shards-unnamed",
            _V01,
            [("gguf.v3", None, b"one"), ("gguf.v3", None, b"two"), ("gguf.v3", None, b"three")],
            {
                "model-00001-of-00003.gguf": file("one"),
                "model-00002-of-00003.gguf": file("two"),
                "model-00003-of-00003.gguf": file("three"),
            },
        ),
        _push(
            "docker-model-gguf-named",
            _V01,
            [("gguf.v3", "smollm2.gguf", b"GGUF weights"), ("license", "LICENSE.txt", b"MIT\n")],
            {"smollm2.gguf": file("GGUF weights", 0o644, MTIME), "LICENSE.txt": file("MIT\n", 0o644, MTIME)},
        ),
        _push(
            "docker-model-safetensors",
            _V01,
            [
                ("safetensors", "model.safetensors", b"tensors"),
                ("vllm.config.tar", "vllm-config.tar", vllm),
                ("dir.tar", "text_encoder.tar", folder),
            ],
            {
                "model.safetensors": file("tensors"),
                "config.json": file("{}\n", 0o644),
                "tokenizer.json": file("{}\n", 0o644),
                "text_encoder/config.json": file("{}\n", 0o644),
            },
            "safetensors",
        ),
        _push(
            "docker-model-v0.2",
            _V02,
            [
                ("safetensors", "unet/model.safetensors", b"tensors"),
                ("model.file", "unet/config.json", b"{}\n"),
                ("model.file", "model_index.json", b"{}\n"),
                ("dduf", "all.dduf", b"dduf"),
            ],
            {
                "unet/model.safetensors": file("tensors", 0o644, MTIME),
                "unet/config.json": file("{}\n"),
                "model_index.json": file("{}\n"),
                "all.dduf": file("dduf"),
            },
            "safetensors",
        ),
    ]
