"""Carries a plan out in memory: small, slow, independent of the real unpacker, so a plan is judged alone."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable

from tests.corpus.archives import unzstd
from tests.corpus.artifact import Artifact, Node
from unlade.model import Descriptor, Digest, Manifest, Platform
from unlade.planning import Plan, PlanOptions, descend, make_plan
from unlade.planning.subset import matches


def plan_of(artifact: Artifact, options: PlanOptions | None = None) -> Plan:
    """The plan for an artifact of the corpus, indexes followed."""
    chosen = descend(
        artifact.document(artifact.top.digest),
        Platform.parse(artifact.platform),
        lambda entry: artifact.document(entry.digest),
        artifact_type=artifact.artifact_type,
        annotations=artifact.annotations,
    )
    manifest: Manifest = chosen.manifest
    digest = chosen.through[-1].digest if chosen.through else artifact.top.digest
    document = next(document for document in artifact.documents if document.digest == digest)
    return make_plan(
        manifest,
        Descriptor(media_type=document.media_type, digest=digest, size=len(document.raw)),
        reference=f"registry.example/{artifact.name}:v1",
        options=options or artifact.options,
        read_config=lambda: artifact.blobs[manifest.config.digest],
        peek=artifact.peek,
    )


def carry_out(plan: Plan, blob: Callable[[Digest], bytes]) -> dict[str, Node]:
    """The tree a plan gives; sources are laid over one another."""
    tree: dict[str, Node] = {}
    for number, source in enumerate(plan.sources):
        own: dict[str, Node] = {}
        for step in plan.active():
            if step.source != number:
                continue
            data = step.content if step.content is not None else blob(step.layer.digest)
            if step.action == "file":
                mtime = step.mtime_ns // 10**9 if step.mtime_ns is not None else None
                own[step.path] = Node(content=data, mode=step.mode or 0o644, mtime=mtime)
            else:
                _unpack(own, _inflated(data), step.path, whiteouts=step.action == "layer")
        tree |= {path: node for path, node in own.items() if matches(source.only, path)}
    return tree


def _inflated(data: bytes) -> bytes:
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        return unzstd(data)
    return data


def _unpack(tree: dict[str, Node], data: bytes, prefix: str, *, whiteouts: bool) -> None:
    made: dict[str, Node] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            path = "/".join(
                part for part in (*prefix.split("/"), *member.name.split("/")) if part not in ("", ".")
            )
            parent, _, name = path.rpartition("/")
            if whiteouts and name == ".wh..wh..opq":
                _remove(tree, parent, keep_itself=True)
            elif whiteouts and name.startswith(".wh."):
                _remove(tree, f"{parent}/{name[4:]}".lstrip("/"))
            elif path:
                made[path] = _node(archive, member)
    tree |= made


def _remove(tree: dict[str, Node], path: str, *, keep_itself: bool = False) -> None:
    for other in list(tree):
        if other.startswith(f"{path}/") or (other == path and not keep_itself):
            del tree[other]


def _node(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Node:
    if member.issym():
        return Node(target=member.linkname)
    if member.isdir():
        return Node(mode=member.mode)
    opened = archive.extractfile(member)
    assert opened is not None
    return Node(content=opened.read(), mode=member.mode, mtime=int(member.mtime))
