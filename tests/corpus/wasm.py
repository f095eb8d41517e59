"""What `wkg oci push` writes (CNCF Wasm format), with and without a title, and the older wasm-to-oci."""

from __future__ import annotations

from tests.corpus.artifact import CREATED, Artifact, Kit, file
from unlade.model.mediatypes import ANNOTATION_TITLE

_MODULE = b"\0asm\x01\0\0\0"
_COMPONENT = b"\0asm\x0d\0\x01\0"


def _push(name: str, os: str, content: bytes, title: str | None) -> Artifact:
    kit = Kit()
    layer = kit.blob("application/wasm", content, {ANNOTATION_TITLE: title} if title else None)
    config = {
        "created": CREATED,
        "author": None,
        "architecture": "wasm",
        "os": os,
        "layerDigests": [layer["digest"]],
        "component": {"exports": ["wasi:http/incoming-handler@0.2.0"], "imports": [], "target": None}
        if os == "wasip2"
        else None,
    }
    kit.manifest(
        kit.json("application/vnd.wasm.config.v0+json", config),
        [layer],
        annotations={"org.opencontainers.image.version": "0.1.0"},
    )
    return kit.done(name, "wasm", {title or "module.wasm": file(content)})


def artifacts() -> list[Artifact]:
    """Modules, components, and the old content type."""
    kit = Kit()
    kit.manifest(
        kit.blob("application/vnd.wasm.config.v1+json", b"{}"),
        [kit.blob("application/vnd.wasm.content.layer.v1+wasm", _MODULE, {ANNOTATION_TITLE: "hello.wasm"})],
    )
    untitled = Kit()
    untitled.manifest(
        untitled.blob("application/vnd.wasm.config.v1+json", b"{}"),
        [
            untitled.blob("application/vnd.wasm.content.layer.v1+wasm", content)
            for content in (_MODULE, _COMPONENT)
        ],
    )
    return [
        _push("wasm-module", "wasip1", _MODULE, None),
        _push("wasm-component", "wasip2", _COMPONENT, "greeter.wasm"),
        kit.done("wasm-old", "wasm", {"hello.wasm": file(_MODULE)}),
        untitled.done(
            "wasm-several",
            "wasm",
            {"module-00001-of-00002.wasm": file(_MODULE), "module-00002-of-00002.wasm": file(_COMPONENT)},
        ),
    ]
