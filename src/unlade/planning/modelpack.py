"""ModelPack (CNCF model-spec; `modctl`, and Docker Model Runner's `--format cncf`): files at their filepath.

A `raw` layer is one file at `org.cncf.model.filepath`, with mode and time from the metadata annotation. A
`tar` layer holds names relative to the model's root, and modctl unpacks it there; its filepath and metadata
then describe what is inside, so the plan can list it. Owners in the metadata are not applied: they are the
packager's, and modctl ignores them as well. The older prefix `cnai` means the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from unlade.errors import InvalidInput
from unlade.model import Descriptor, Manifest
from unlade.planning.plan import PlannedFile
from unlade.planning.view import Placement, View

NAME = "modelpack"
# The first name wins where both are present: it is today's.
FILEPATHS: Final = ("org.cncf.model.filepath", "org.cnai.model.filepath")
METADATA: Final = ("org.cncf.model.file.metadata+json", "org.cnai.model.file.metadata+json")
_MANIFEST: Final = re.compile(r"application/vnd\.(?:cncf|cnai)\.model\.manifest\.v1\+json", re.ASCII)
_CONFIG: Final = re.compile(r"application/vnd\.(?:cncf|cnai)\.model\.config\.v1\+json", re.ASCII)
# gguf and safetensors are older Docker Model Runner's spelling of raw.
_LAYER: Final = re.compile(
    r"application/vnd\.(?:cncf|cnai)\.model\.(weight|weight\.config|doc|code|dataset)\.v1\."
    r"(?:(raw|gguf|safetensors)|tar(?:\+(?:gzip|zstd))?)",
    re.ASCII,
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Go writes nanoseconds; Python reads microseconds.
_FRACTION: Final = re.compile(r"\.(\d{1,9})")


class InvalidMetadata(InvalidInput):
    """A file metadata annotation that is not what model-spec says."""

    code = "invalid-metadata"


class FileMetadata(msgspec.Struct, frozen=True):
    """What the metadata annotation says, as far as it is applied."""

    mode: int | None
    size: int | None
    mtime_ns: int | None


def recognise(manifest: Manifest) -> bool:
    """The model manifest's artifact type, or its config type."""
    return bool(_MANIFEST.fullmatch(manifest.artifact_type) or _CONFIG.fullmatch(manifest.config.media_type))


def place(view: View, index: int) -> Placement | None:
    """Raw layers are files at their filepath; tar layers are unpacked at the root."""
    layer = view.layer(index)
    kind = _LAYER.fullmatch(layer.media_type)
    if not kind:
        return None
    name = filepath(layer) or layer.title or None
    metadata = file_metadata(layer)
    if kind[2]:
        return Placement(
            rule=f"modelpack: a raw {kind[1]} layer, a file at its filepath",
            name=name,
            mode=metadata.mode,
            mtime_ns=metadata.mtime_ns,
        )
    known = filepath(layer)
    files = (
        (PlannedFile(known, metadata.size, metadata.mode),) if known and metadata.size is not None else None
    )
    return Placement(
        rule=f"modelpack: a {kind[1]} archive, unpacked",
        name=name,
        archive=True,
        mode=metadata.mode,
        mtime_ns=metadata.mtime_ns,
        files=files,
    )


def filepath(layer: Descriptor) -> str | None:
    """The filepath annotation, unchecked; None when absent or empty."""
    return next((layer.annotations[key] for key in FILEPATHS if layer.annotations.get(key)), None)


def file_metadata(layer: Descriptor) -> FileMetadata:
    """The metadata annotation; all None where there is none. Raises InvalidMetadata."""
    text = next((layer.annotations[key] for key in METADATA if layer.annotations.get(key)), None)
    if text is None:
        return FileMetadata(None, None, None)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMetadata(f"file metadata of layer {layer.digest} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidMetadata(f"file metadata of layer {layer.digest} is not a JSON object")
    mode, size = _natural(value, "mode", layer), _natural(value, "size", layer)
    # Set-id and sticky bits never come from an artifact; a mode of 0 is Go's "not set".
    return FileMetadata((mode or 0) & 0o777 or None, size, _mtime(value.get("mtime"), layer))


def _natural(value: Mapping[str, Any], key: str, layer: Descriptor) -> int | None:
    number = value.get(key)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 63:
        raise InvalidMetadata(f"file metadata of layer {layer.digest} has {key} {number!r}")
    return number


def _mtime(text: object, layer: Descriptor) -> int | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidMetadata(f"file metadata of layer {layer.digest} has mtime {text!r}")
    fraction = _FRACTION.search(text)
    nanoseconds = int(fraction[1].ljust(9, "0")) if fraction else 0
    try:
        moment = datetime.fromisoformat(_FRACTION.sub("", text, count=1))
        since = moment.astimezone(UTC) - _EPOCH
    except (ValueError, OverflowError) as error:
        raise InvalidMetadata(f"file metadata of layer {layer.digest} has mtime {text[:64]!r}") from error
    # Go's zero time is the year 1: "not set". Nothing was packed before the epoch.
    return since // timedelta(seconds=1) * 1_000_000_000 + nanoseconds if since >= timedelta() else None
