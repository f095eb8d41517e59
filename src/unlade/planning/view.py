"""What a family's module sees of an artifact, and what it answers.

A family does not make steps: it says of one layer what it is (`Placement`), and `make` turns that into a
step under the caller's options. So each family's module stays a table with a few lines around it, and the
rules that hold for all of them (bytes before types, the caller's word, checked paths) stand in one place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from unlade.errors import InvalidInput
from unlade.model import Descriptor, DiffID, Digest, Manifest
from unlade.planning.plan import PlannedFile
from unlade.planning.sniff import Archive, sniff

# The manifest limit serves for configs too: no known family comes near it.
MAX_CONFIG_BYTES: Final = 4 << 20
# Enough to hide round trips, few enough not to look like an attack on the registry.
_PEEKS_AT_ONCE: Final = 8
# Which layers are counted together; None is a group like any other.
Group = Callable[[Descriptor], str | None]


class InvalidConfig(InvalidInput):
    """A config blob that its family's rules need but cannot read."""

    code = "invalid-config"


class Placement(msgspec.Struct, frozen=True):
    """What a layer is, by one rule.

    An `archive` is unpacked at `prefix` when its bytes agree, and otherwise becomes the file `name`; a
    `certain` one must agree. Anything else is the file `name`. With `skip`, the tool that made the artifact
    does not deliver this layer. `packed` is the title of a packed directory: where it is unpacked depends on
    the names inside. Paths are unchecked.
    """

    rule: str
    name: str | None = None
    archive: bool = False
    certain: bool = False
    prefix: str = ""
    packed: str = ""
    skip: bool = False
    # The caller's own word, against which nothing is asked.
    named: bool = False
    diff_id: DiffID | None = None
    mode: int | None = None
    mtime_ns: int | None = None
    files: tuple[PlannedFile, ...] | None = None


class Family(Protocol):
    """One module per format family; all of these are module-level names."""

    NAME: str

    def recognise(self, manifest: Manifest) -> bool:
        """Whether the manifest is of this family, by its types alone."""

    def place(self, view: View, index: int) -> Placement | None:
        """What layer `index` is; None where the family has nothing to say of its type."""


@dataclass(slots=True)
class View:
    """One manifest with lazy access to its config and to the first bytes of its layers."""

    manifest: Manifest
    read_config: Callable[[], bytes]
    peek: Callable[[Descriptor, int], bytes]
    # The caller wants nothing unpacked: names of whole archives matter then, and their bytes do not.
    keep: bool = False
    _config: Mapping[str, Any] | None = None
    _heads: dict[Digest, Archive | None] = field(default_factory=dict)
    _groups: dict[Group, dict[int, tuple[int, int]]] = field(default_factory=dict)

    def layer(self, index: int) -> Descriptor:
        """Layer number `index`."""
        return self.manifest.layers[index]

    def archive(self, layer: Descriptor) -> Archive | None:
        """The layer as an archive, by its first bytes; fetched once per digest."""
        if layer.digest not in self._heads:
            self._heads[layer.digest] = sniff(layer, self.peek)
        return self._heads[layer.digest]

    def look_at(self, layers: Iterable[Descriptor]) -> None:
        """Fetch the first bytes of several layers at once: one after the other, each costs a round trip."""
        unseen = list({layer.digest: layer for layer in layers if layer.digest not in self._heads}.values())
        if len(unseen) > 1:
            with ThreadPoolExecutor(max_workers=min(_PEEKS_AT_ONCE, len(unseen))) as pool:
                found = list(pool.map(lambda layer: sniff(layer, self.peek), unseen))
            self._heads |= {layer.digest: archive for layer, archive in zip(unseen, found, strict=True)}

    def config(self) -> Mapping[str, Any]:
        """The config blob as a JSON object; raises InvalidConfig."""
        if self._config is None:
            self._config = self._decode_config()
        return self._config

    def _decode_config(self) -> Mapping[str, Any]:
        descriptor = self.manifest.config
        if descriptor.size > MAX_CONFIG_BYTES:
            raise InvalidConfig(f"config {descriptor.digest} of {descriptor.size} bytes is too large")
        raw = descriptor.data if descriptor.data is not None else self.read_config()
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise InvalidConfig(f"config {descriptor.digest} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise InvalidConfig(f"config {descriptor.digest} is not a JSON object")
        return value

    def position(self, index: int, group: Group) -> tuple[int, int]:
        """Position (from 1) and count of layer `index` among the layers of its group.

        `group` is a function of the family's module: it is asked once per layer, and its answers are kept.
        """
        if group not in self._groups:
            members: dict[str | None, list[int]] = {}
            for number, layer in enumerate(self.manifest.layers):
                members.setdefault(group(layer), []).append(number)
            self._groups[group] = {
                number: (place, len(numbers))
                for numbers in members.values()
                for place, number in enumerate(numbers, 1)
            }
        return self._groups[group][index]


def numbered(stem: str, extension: str, position: int, count: int) -> str:
    """A stable name: `stem.ext` for the only one, `stem-00001-of-00003.ext` for one of several.

    The split form is what llama.cpp and transformers look for beside the first shard.
    """
    return f"{stem}{extension}" if count == 1 else f"{stem}-{position:05d}-of-{count:05d}{extension}"
