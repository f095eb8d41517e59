"""What `kit pack` writes: a tar per entry of the Kitfile, and the Kitfile as config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.corpus.archives import Entry, d, f, gzip, tar, zstd
from tests.corpus.artifact import Artifact, Kit, file
from tests.corpus.images import plain
from unlade.model import Digest

CONFIG = "application/vnd.kitops.modelkit.config.v1+json"
MANIFEST = "application/vnd.kitops.modelkit.manifest.v1+json"
_LAYERS: list[tuple[str, str, list[Entry]]] = [
    ("model", "models/net.onnx", [d("models", uid=1000), f("models/net.onnx", "net", uid=1000)]),
    ("modelpart", "models/vocab.txt", [d("models"), f("models/vocab.txt", "vocab")]),
    (
        "code",
        "src",
        [d("src"), f("src/train.py", "train\n"), d("src/lib"), f("src/lib/io.py", "io\n", 0o600)],
    ),
    ("dataset", "data/train.csv", [d("data"), f("data/train.csv", "1,2\n")]),
    ("docs", "README.md", [f("README.md", "# Kit\n")]),
]
_TREE = {
    "models/net.onnx": file("net", 0o644),
    "models/vocab.txt": file("vocab", 0o644),
    "src/train.py": file("train\n", 0o644),
    "src/lib/io.py": file("io\n", 0o600),
    "data/train.csv": file("1,2\n", 0o644),
    "README.md": file("# Kit\n", 0o644),
}
# As `kit unpack` writes it, but for the quotes: no digests, and "1.0" stays a string.
_KITFILE = """\
manifestVersion: "1.0.0"
package:
  name: net
  version: "1.0"
  authors:
    - Ada
    - "Grace H"
model:
  name: net
  path: "models/net.onnx"
  parts:
    - path: "models/vocab.txt"
      type: vocabulary
  parameters:
    depth: 3
    bias: true
code:
  - path: src
    description: "how: it's trained"
datasets:
  - name: train
    path: "data/train.csv"
docs:
  - path: "README.md"
"""


def _kitfile(info: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The config; `info` is what kit adds per layer, empty for kits of the first releases."""
    return {
        "manifestVersion": "1.0.0",
        "package": {"name": "net", "version": "1.0", "authors": ["Ada", "Grace H"]},
        "model": {
            "name": "net",
            "path": "models/net.onnx",
            "parts": [{"path": "models/vocab.txt", "type": "vocabulary", **info.get("modelpart", {})}],
            "parameters": {"depth": 3, "bias": True},
            **info.get("model", {}),
        },
        "code": [{"path": "src", "description": "how: it's trained", **info.get("code", {})}],
        "datasets": [{"name": "train", "path": "data/train.csv", **info.get("dataset", {})}],
        "docs": [{"path": "README.md", **info.get("docs", {})}],
    }


def _pack(
    name: str,
    suffix: str,
    compress: Callable[[bytes], bytes],
    *,
    artifact_type: str | None = None,
    legacy: bool = False,
) -> Artifact:
    kit = Kit()
    layers = []
    info: dict[str, dict[str, str]] = {}
    for kind, path, entries in _LAYERS:
        data = tar(_relative_to_parent(path, entries) if legacy else entries)
        layer = kit.blob(f"application/vnd.kitops.modelkit.{kind}.v1.tar{suffix}", compress(data))
        layers.append(layer)
        if not legacy:
            info[kind] = {"digest": layer["digest"], "diffId": str(Digest.of(data))}
    kit.manifest(
        kit.json(CONFIG, _kitfile(info)),
        layers,
        media_type=None,
        artifact_type=artifact_type,
        annotations={"ml.kitops.modelkit.cli-version": "1.6.0"},
    )
    return kit.done(name, "kitops", _TREE | {"Kitfile": file(_KITFILE)})


def _relative_to_parent(path: str, entries: list[Entry]) -> list[Entry]:
    """How the first releases named entries: from the parent of the path in the Kitfile."""
    parent = path.rpartition("/")[0]
    return [
        Entry(e.name.removeprefix(f"{parent}/"), e.content, e.mode, e.kind)
        for e in entries
        if e.name != parent
    ]


def _child() -> Artifact:
    """A kit whose model is another kit: only its Kitfile and code are its own."""
    kit = Kit()
    data = tar([d("src"), f("src/app.py", "app\n")])
    layer = kit.blob("application/vnd.kitops.modelkit.code.v1.tar", data)
    config = {
        "manifestVersion": "1.0.0",
        "model": {"path": "registry.example/base:v1"},
        "code": [{"path": "src", "digest": layer["digest"], "diffId": layer["digest"]}],
    }
    kit.manifest(kit.json(CONFIG, config), [layer], media_type=None)
    kitfile = 'manifestVersion: "1.0.0"\nmodel:\n  path: "registry.example/base:v1"\ncode:\n  - path: src\n'
    return kit.done("kitops-child", "kitops", {"Kitfile": file(kitfile), "src/app.py": file("app\n")})


def artifacts() -> list[Artifact]:
    """Every compression, with and without the artifact type, and kits from before layer digests."""
    return [
        _pack("kitops-plain", "", plain),
        _pack("kitops-gzip", "+gzip", gzip),
        _pack("kitops-zstd", "+zstd", zstd),
        _pack("kitops-artifact-type", "", plain, artifact_type=MANIFEST),
        _pack("kitops-legacy", "+gzip", gzip, legacy=True),
        _child(),
    ]
