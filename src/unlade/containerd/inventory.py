"""What the images of a containerd consist of: components by digest, so that shared bytes are counted once.

An ordinary image is its index (where its record leads to one), its manifest, config and layers, as large as
their descriptors say: what the CRI plugin adds up too. An artifact is its synthetic config and manifest, and
its tree. A `Holding` is one image for one handler and one set of options; `unique` bytes would be freed with
it, `shared` ones others need too (R4). Reads containerd only: two lists, and the documents of each image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unlade.containerd import labels, records
from unlade.containerd.connection import Containerd
from unlade.containerd.content import ContainerdStore
from unlade.containerd.images import ImageRecords, Row
from unlade.containerd.records import ImageTuple
from unlade.errors import InvalidInput
from unlade.model import Digest, Index, Manifest, decode_manifest
from unlade.store import NotInStore


@dataclass(frozen=True, slots=True)
class Component:
    """One thing that an image needs: `index`, `manifest`, `config`, `layer` or `tree`."""

    kind: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Holding:
    """One image for one handler and one set of options; no handler where it came without us."""

    id: str
    handler: str
    options: str
    family: str
    tuples: tuple[ImageTuple, ...]
    components: tuple[Component, ...]
    created: float
    tree: str = ""
    unique: int = 0
    shared: int = 0

    @property
    def references(self) -> tuple[str, ...]:
        """The names that lead to it, tags first."""
        return tuple(sorted({one.reference for one in self.tuples}, key=lambda name: ("@" in name, name)))

    @property
    def snapshotters(self) -> tuple[str, ...]:
        """Where it is unpacked for this handler."""
        return tuple(sorted({name for one in self.tuples for name in one.snapshotters}))


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that the images of a containerd hold; `total` counts every byte once."""

    holdings: Sequence[Holding] = ()
    total: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)


def take(containerd: Containerd, default: str) -> Inventory:
    """What is there now, by ID, handler and options; `default` is the handler that names belong to."""
    content = ContainerdStore(containerd)
    every = {row.name: row for row in ImageRecords(containerd).all()}
    rows = [row for row in every.values() if records.is_id(row.name)]
    parts = {}
    for row in rows:
        # Tuples with options have no name: what goes by that name is another image.
        tuples = records.tuples_of(row)
        names = [one.reference for one in tuples if one.handler == default and not one.options]
        named = {every[name].target for name in names if name in every}
        parts[row.name] = _components(content, row, {row.target, *named})
    found = [one for row in sorted(rows, key=lambda row: row.name) for one in _holdings(row, parts[row.name])]
    users = Counter(part.digest for one in found for part in one.components)
    weighed = [_weighed(one, users) for one in found]
    once = {part.digest: part.size for one in found for part in one.components}
    sizes = {name: sum(part.size for part in set(some)) for name, some in parts.items()}
    return Inventory(weighed, sum(once.values()), sizes)


def _holdings(row: Row, components: tuple[Component, ...]) -> list[Holding]:
    groups: dict[tuple[str, str], list[ImageTuple]] = {}
    for one in records.tuples_of(row):
        groups.setdefault((one.handler, one.options), []).append(one)
    family = row.labels.get(labels.FAMILY, "") if labels.TREE in row.labels else "image"
    tree = row.labels.get(labels.TREE, "")
    return [
        Holding(row.name, handler, options, family, tuple(tuples), components, row.created, tree)
        for (handler, options), tuples in sorted(groups.items()) or [(("", ""), [])]
    ]


def _weighed(one: Holding, users: Counter[str]) -> Holding:
    parts = {part.digest: part.size for part in one.components}
    unique = sum(size for digest, size in parts.items() if users[digest] == 1)
    return Holding(
        one.id, one.handler, one.options, one.family, one.tuples, one.components, one.created, one.tree,
        unique, sum(parts.values()) - unique,
    )  # fmt: skip


def _components(content: ContainerdStore, row: Row, targets: set[str]) -> tuple[Component, ...]:
    """What a record and its names lead to; as far as containerd has it."""
    # The longest way first: a name may lead through the index, the record by ID to the manifest.
    ways = [_lead(content, Digest.parse(target), row.name) for target in targets]
    found = [part for way in sorted(ways, key=len, reverse=True) for part in way]
    if labels.TREE not in row.labels:
        return tuple(dict.fromkeys(found))
    tree = Component("tree", row.labels[labels.TREE], int(row.labels.get(labels.SIZE, "0")))
    # The synthetic layer stands for the tree; there is no such blob.
    return (*dict.fromkeys(part for part in found if part.kind != "layer"), tree)


def _lead(content: ContainerdStore, target: Digest, image: str) -> list[Component]:
    """From a target down to the manifest with this config."""
    try:
        raw = content.read(target)
        document = decode_manifest(raw, content_type=None)
    except (NotInStore, InvalidInput):
        return []
    if isinstance(document, Manifest):
        if str(document.config.digest) != image:
            return []
        own = Component("manifest", str(target), len(raw))
        config = Component("config", image, document.config.size)
        return [own, config, *(Component("layer", str(one.digest), one.size) for one in document.layers)]
    assert isinstance(document, Index)
    for entry in document.manifests:
        below = _lead(content, entry.digest, image)
        if below:
            return [Component("index", str(target), len(raw)), *below]
    return []
