"""What one entry of the corpus is, how it is put together, and how trees are compared."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unlade.errors import UnladeError
from unlade.model import Descriptor, Digest, Index, Manifest, decode_manifest
from unlade.model.mediatypes import OCI_EMPTY, OCI_INDEX, OCI_MANIFEST
from unlade.planning import PlanOptions

CREATED = "2026-03-01T10:00:00Z"


@dataclass(frozen=True)
class Node:
    """A file, directory or link of an expected tree; what is None is not compared."""

    content: bytes | None = None
    target: str | None = None
    mode: int | None = None
    mtime: int | None = None

    @property
    def kind(self) -> str:
        """`file`, `link` or `directory`."""
        return "file" if self.content is not None else "link" if self.target is not None else "directory"


Tree = Mapping[str, Node]


@dataclass(frozen=True)
class Document:
    """A manifest or index, as it is pushed."""

    raw: bytes
    media_type: str

    @property
    def digest(self) -> Digest:
        """The digest that names it."""
        return Digest.of(self.raw)

    def descriptor(self, **extra: Any) -> dict[str, Any]:
        """Its descriptor, as an index holds it."""
        return {"mediaType": self.media_type, "digest": str(self.digest), "size": len(self.raw), **extra}


@dataclass(frozen=True)
class Artifact:
    """Everything to push, and what must come of it: a tree, or an error."""

    name: str
    family: str
    blobs: Mapping[Digest, bytes]
    documents: tuple[Document, ...]
    tree: Tree | None = None
    error: type[UnladeError] | None = None
    options: PlanOptions = field(default_factory=PlanOptions)
    platform: str = "linux/amd64"
    artifact_type: str | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def top(self) -> Document:
        """What the tag names."""
        return self.documents[-1]

    def document(self, digest: Digest) -> Manifest | Index:
        """A decoded document of this artifact."""
        found = next(document for document in self.documents if document.digest == digest)
        return decode_manifest(found.raw, content_type=found.media_type)

    def peek(self, layer: Descriptor, count: int) -> bytes:
        """The first bytes of a layer, as a registry would give them."""
        return self.blobs[layer.digest][:count]


class Kit:
    """Gathers the blobs of one artifact and writes its manifests as Go's encoder would: compact, in order."""

    def __init__(self) -> None:
        self.blobs: dict[Digest, bytes] = {}
        self.documents: list[Document] = []

    def blob(
        self, media_type: str, data: bytes, annotations: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Keep bytes and describe them."""
        digest = Digest.of(data)
        self.blobs[digest] = data
        out: dict[str, Any] = {"mediaType": media_type, "digest": str(digest), "size": len(data)}
        if annotations:
            # Go sorts the keys of a map.
            out["annotations"] = dict(sorted(annotations.items()))
        return out

    def json(self, media_type: str, value: object) -> dict[str, Any]:
        """A JSON blob."""
        return self.blob(media_type, compact(value))

    def empty(self, *, data: bool = True) -> dict[str, Any]:
        """The empty config, with its two bytes embedded as ORAS does it."""
        described = self.blob(OCI_EMPTY, b"{}")
        return {**described, "data": "e30="} if data else described

    def manifest(
        self,
        config: Mapping[str, Any],
        layers: Sequence[Mapping[str, Any]],
        *,
        media_type: str | None = OCI_MANIFEST,
        artifact_type: str | None = None,
        subject: Mapping[str, Any] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> Document:
        """A manifest; without `media_type` the field is left out, as Helm leaves it out."""
        value: dict[str, Any] = {"schemaVersion": 2}
        if media_type:
            value["mediaType"] = media_type
        if artifact_type:
            value["artifactType"] = artifact_type
        value |= {"config": dict(config), "layers": [dict(layer) for layer in layers]}
        if subject:
            value["subject"] = dict(subject)
        if annotations:
            value["annotations"] = dict(sorted(annotations.items()))
        return self._document(value, media_type or OCI_MANIFEST)

    def index(
        self,
        entries: Sequence[Mapping[str, Any]],
        *,
        media_type: str = OCI_INDEX,
        artifact_type: str | None = None,
    ) -> Document:
        """An index over documents made before."""
        value: dict[str, Any] = {"schemaVersion": 2, "mediaType": media_type}
        if artifact_type:
            value["artifactType"] = artifact_type
        value["manifests"] = [dict(entry) for entry in entries]
        return self._document(value, media_type)

    def done(self, name: str, family: str, tree: Tree | None = None, **fields: Any) -> Artifact:
        """The finished entry; its last document is the one that is tagged."""
        return Artifact(name, family, dict(self.blobs), tuple(self.documents), tree, **fields)

    def _document(self, value: object, media_type: str) -> Document:
        document = Document(compact(value), media_type)
        self.documents.append(document)
        return document


def compact(value: object) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def file(content: bytes | str, mode: int | None = None, mtime: int | None = None) -> Node:
    """An expected file."""
    return Node(content=content.encode() if isinstance(content, str) else content, mode=mode, mtime=mtime)


def link(target: str) -> Node:
    """An expected symbolic link."""
    return Node(target=target)


def directory(mode: int | None = None) -> Node:
    """An expected directory; parents of other entries need not be listed."""
    return Node(mode=mode)


def snapshot(root: str) -> dict[str, Node]:
    """What is on disk below `root`."""
    found: dict[str, Node] = {}
    for parent, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(parent, name)
            status = os.lstat(path)
            content = target = None
            if stat.S_ISLNK(status.st_mode):
                target = os.readlink(path)
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as opened:
                    content = opened.read()
            elif not stat.S_ISDIR(status.st_mode):
                raise AssertionError(f"{path} is neither file, directory nor link")
            found[os.path.relpath(path, root)] = Node(
                content, target, stat.S_IMODE(status.st_mode), int(status.st_mtime)
            )
    return found


def differences(expected: Tree, actual: Tree) -> list[str]:
    """Every difference in words; empty when the trees agree."""
    whole = dict(expected)
    for path in expected:
        parent = os.path.dirname(path)
        while parent:
            whole.setdefault(parent, Node())
            parent = os.path.dirname(parent)
    out = [f"{path}: missing" for path in sorted(whole.keys() - actual.keys())]
    out += [f"{path}: not expected" for path in sorted(actual.keys() - whole.keys())]
    for path in sorted(whole.keys() & actual.keys()):
        out += _node_differences(path, whole[path], actual[path])
    return out


def _node_differences(path: str, want: Node, have: Node) -> list[str]:
    if want.kind != have.kind:
        return [f"{path}: a {have.kind}, not a {want.kind}"]
    out = []
    if want.content != have.content:
        out.append(f"{path}: content {have.content!r:.80}, not {want.content!r:.80}")
    if want.target != have.target:
        out.append(f"{path}: points to {have.target!r}, not {want.target!r}")
    if want.mode is not None and want.mode != have.mode:
        out.append(f"{path}: mode {have.mode or 0:o}, not {want.mode:o}")
    if want.mtime is not None and want.mtime != have.mtime:
        out.append(f"{path}: mtime {have.mtime}, not {want.mtime}")
    return out
