"""KitOps ModelKits: the tree, with its Kitfile, as `kit unpack` gives it.

Each layer is a tar. Kits made since the config carries a digest per entry hold names relative to the kit's
root; older ones hold names relative to the parent of the entry's path, which is then the place to unpack.
The config is the Kitfile as JSON; it is written as YAML without the digests, which `kit` refuses to read
in a Kitfile. A kit whose model is another kit (`model.path` is a reference) is not followed: the plan says
which reference to put before this one, and merging does what `kit` does.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from unlade.model import Descriptor, Digest, Manifest
from unlade.planning.plan import Step
from unlade.planning.view import InvalidConfig, Placement, View

NAME = "kitops"
MANIFEST: Final = "application/vnd.kitops.modelkit.manifest.v1+json"
CONFIG: Final = "application/vnd.kitops.modelkit.config.v1+json"
KITFILE: Final = "Kitfile"
_LAYER: Final = re.compile(
    r"application/vnd\.kitops\.modelkit\.([a-z]{1,32})\.v1\.tar(?:\+(?:gzip|zstd))?", re.ASCII
)
# Which list of the Kitfile describes layers of a type, in the order of the layers.
_ENTRIES: Final = {"code": "code", "dataset": "datasets", "docs": "docs", "prompt": "prompts"}
_LAYER_INFO: Final = frozenset({"digest", "diffId"})
# Deeper than any Kitfile; bounds the recursion over a config the publisher wrote.
_MAX_DEPTH: Final = 32


def recognise(manifest: Manifest) -> bool:
    """KitOps's artifact type or config type."""
    return manifest.artifact_type == MANIFEST or manifest.config.media_type == CONFIG


def place(view: View, index: int) -> Placement | None:
    """Every kit layer is unpacked: at the root, or where an old Kitfile says."""
    layer = view.layer(index)
    kind = _LAYER.fullmatch(layer.media_type)
    if not kind:
        return None
    position, _ = view.position(index, _kind)
    described = view.config() if view.manifest.config.media_type == CONFIG else {}
    entry = _entry(described, kind[1], position - 1)
    prefix = ""
    if not entry.get("digest") and isinstance(entry.get("path"), str):
        prefix = posixpath.dirname(posixpath.normpath(entry["path"].strip()))
    return Placement(
        rule=f"kitops: {kind[1]}, unpacked",
        name=layer.title or None,
        archive=True,
        certain=True,
        prefix=prefix,
    )


def kitfile(view: View) -> Step | None:
    """The step that writes the Kitfile; it precedes every layer."""
    config = view.manifest.config
    if config.media_type != CONFIG:
        return None
    content = render(view.config())
    described = Descriptor(media_type="application/yaml", digest=Digest.of(content), size=len(content))
    return Step(-1, described, "file", KITFILE, "kitops: the Kitfile, from the config", content=content)


def parent(view: View) -> str | None:
    """The reference of the kit that holds the model, when this one does not."""
    if view.manifest.config.media_type != CONFIG:
        return None
    model = view.config().get("model")
    path = model.get("path") if isinstance(model, dict) else None
    return path if isinstance(path, str) and (":" in path or "@" in path) else None


def render(config: Mapping[str, Any]) -> bytes:
    """The Kitfile as YAML: blocks, every scalar as JSON, which YAML reads alike. Deterministic."""
    return ("\n".join(_block(_plain(config), 0)) + "\n").encode()


def _kind(layer: Descriptor) -> str | None:
    kind = _LAYER.fullmatch(layer.media_type)
    return kind[1] if kind else None


def _entry(config: Mapping[str, Any], kind: str, position: int) -> Mapping[str, Any]:
    model = config.get("model")
    entries: object
    if kind == "model":
        entries = [model]
    elif kind == "modelpart":
        entries = model.get("parts") if isinstance(model, dict) else None
    else:
        entries = config.get(_ENTRIES.get(kind, kind))
    entry = entries[position] if isinstance(entries, list) and position < len(entries) else None
    return entry if isinstance(entry, dict) else {}


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The Kitfile without what only the config carries: digests of the layers of each entry."""

    def without(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {key: value for key, value in entry.items() if key not in _LAYER_INFO}
        return entry

    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list):
            out[key] = [without(entry) for entry in value]
        elif key == "model" and isinstance(value, dict):
            out[key] = without(value)
            if isinstance(value.get("parts"), list):
                out[key]["parts"] = [without(entry) for entry in value["parts"]]
        else:
            out[key] = value
    return out


def _block(value: Any, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise InvalidConfig(f"the Kitfile is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, dict) and value:
        for key, item in value.items():
            lines = list(_block(item, depth + 1))
            if isinstance(item, dict | list) and item:
                yield f"{_scalar(key)}:"
                yield from (f"  {line}" for line in lines)
            else:
                yield f"{_scalar(key)}: {lines[0]}"
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _block(item, depth + 1)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _scalar(value: Any) -> str:
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z][A-Za-z]*", value)
        and value.lower() not in _RESERVED
    ):
        return value
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


# What JSON may hold as it is and YAML may not.
_UNPRINTABLE: Final = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
# Words that YAML 1.1 reads as booleans or null.
_RESERVED: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "inf", "nan"})
