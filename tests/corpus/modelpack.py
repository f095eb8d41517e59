"""What `modctl build` writes (raw, tar, compressed, the older prefix), and Docker's `--format cncf`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.corpus.archives import f, gzip, tar, zstd
from tests.corpus.artifact import CREATED, Artifact, Kit, Tree, compact, file
from tests.corpus.images import plain
from unlade.model.paths import UnsafeTitle

MODE, MTIME, MTIME_TEXT = 0o640, 1772359200, "2026-03-01T11:00:00.123456789+01:00"
_FILES: dict[str, tuple[str, bytes]] = {
    "config.json": ("weight.config", b'{"model_type":"qwen2"}'),
    "model-00001-of-00002.safetensors": ("weight", b"weights one" * 50),
    "nested/model-00002-of-00002.safetensors": ("weight", b"weights two" * 50),
    "README.md": ("doc", b"# Model\n"),
    "scripts/run.py": ("code", b"print()\n"),
    "data/train.jsonl": ("dataset", b"{}\n"),
}


def metadata(path: str, size: int, mode: int = MODE) -> str:
    """The file metadata annotation, as Go encodes it."""
    value = {
        "name": path.rpartition("/")[2],
        "mode": mode,
        "uid": 1000,
        "gid": 1000,
        "size": size,
        "mtime": MTIME_TEXT,
        "typeflag": 0,
    }
    return compact(value).decode()


def _config(layers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "descriptor": {"createdAt": CREATED, "family": "qwen2", "name": "Qwen2.5-0.5B"},
        "modelfs": {"type": "layers", "diffIds": [layer["digest"] for layer in layers]},
        "config": {
            "architecture": "transformer",
            "format": "safetensors",
            "paramSize": "0.5b",
            "precision": "float16",
        },
    }


def _push(
    name: str,
    suffix: str,
    pack: Callable[[bytes], bytes] = plain,
    *,
    vendor: str = "cncf",
    rename: Callable[[str], str] = str,
    **fields: Any,
) -> Artifact:
    kit = Kit()
    layers = []
    for path, (kind, content) in _FILES.items():
        data = content if suffix == "raw" else pack(tar([f(path, content, MODE, mtime=MTIME)]))
        annotations = {
            f"org.{vendor}.model.filepath": rename(path),
            f"org.{vendor}.model.file.metadata+json": metadata(path, len(content)),
        }
        layers.append(kit.blob(f"application/vnd.{vendor}.model.{kind}.v1.{suffix}", data, annotations))
    kit.manifest(
        kit.json(f"application/vnd.{vendor}.model.config.v1+json", _config(layers)),
        layers,
        artifact_type=f"application/vnd.{vendor}.model.manifest.v1+json",
    )
    tree: Tree = {path: file(content, MODE, MTIME) for path, (_, content) in _FILES.items()}
    return kit.done(name, "modelpack", None if fields else tree, **fields)


def _spec_example() -> Artifact:
    """The specification's own example: tars without annotations."""
    kit = Kit()
    layers = [
        kit.blob("application/vnd.cncf.model.weight.v1.tar", tar([f("w1.bin", "one"), f("w2.bin", "two")])),
        kit.blob("application/vnd.cncf.model.doc.v1.tar+gzip", gzip(tar([f("README.md", "doc\n")]))),
    ]
    kit.manifest(
        kit.json("application/vnd.cncf.model.config.v1+json", _config(layers)),
        layers,
        artifact_type="application/vnd.cncf.model.manifest.v1+json",
    )
    return kit.done(
        "modelpack-spec-example",
        "modelpack",
        {"w1.bin": file("one"), "w2.bin": file("two"), "README.md": file("doc\n")},
    )


def _docker() -> Artifact:
    """Docker Model Runner's `package --format cncf`, of today (raw) and before (gguf)."""
    kit = Kit()
    layers = []
    for media_type, path, content in (
        ("application/vnd.cncf.model.weight.v1.gguf", "model.gguf", b"GGUF weights"),
        ("application/vnd.cncf.model.weight.config.v1.raw", "chat.jinja", b"{{ messages }}"),
    ):
        annotations = {
            "org.cncf.model.filepath": path,
            "org.cncf.model.file.metadata+json": metadata(path, len(content), 0o644),
            "org.cncf.model.file.mediatype.untested": "false",
        }
        layers.append(kit.blob(media_type, content, annotations))
    kit.manifest(
        kit.json("application/vnd.cncf.model.config.v1+json", _config(layers)),
        layers,
        artifact_type="application/vnd.cncf.model.manifest.v1+json",
    )
    return kit.done(
        "modelpack-docker",
        "modelpack",
        {"model.gguf": file("GGUF weights", 0o644, MTIME), "chat.jinja": file("{{ messages }}", 0o644)},
    )


def artifacts() -> list[Artifact]:
    """Every packing, both prefixes, and a filepath that leaves."""
    return [
        _push("modelpack-raw", "raw"),
        _push("modelpack-tar", "tar"),
        _push("modelpack-tar-gzip", "tar+gzip", gzip),
        _push("modelpack-tar-zstd", "tar+zstd", zstd),
        _push("modelpack-cnai-raw", "raw", vendor="cnai"),
        _push("modelpack-cnai-tar", "tar", vendor="cnai"),
        _spec_example(),
        _docker(),
        _push("modelpack-escaping-filepath", "raw", rename=lambda path: f"../{path}", error=UnsafeTitle),
    ]
