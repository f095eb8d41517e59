"""A registry's document becomes a plan or a typed error; what the plan names stays beneath the directory."""

from __future__ import annotations

import posixpath
from typing import Final

from tests.corpus import corpus
from unlade.errors import UnladeError
from unlade.model import Descriptor, Digest, Index, Platform, decode_manifest
from unlade.planning import PlanOptions, make_plan, select
from unlade.planning.sniff import look

_MODES: Final = ("auto", "always", "never")
_BLOBS: Final = {digest: data for artifact in corpus() for digest, data in artifact.blobs.items()}
_HOST: Final = Platform("linux", "amd64")
# The first byte chooses the option and the kind of input; the rest is a document, or the head of a blob.
CORPUS: Final = [b"\0" + document.raw for artifact in corpus() for document in artifact.documents] + [
    b"\x80" + data[:2048] for data in _BLOBS.values()
]


def one_input(data: bytes) -> None:
    """Sniff it, or decode, choose and plan it."""
    if not data:
        return
    choice, rest = data[0], data[1:]
    if choice & 0x80:
        archive = look(rest)
        assert archive is None or all(isinstance(name, str) for name in archive.names)
        return
    try:
        document = decode_manifest(rest)
        if isinstance(document, Index):
            chosen = select(document, _HOST)
            assert chosen in document.manifests
            return
        plan = make_plan(
            document,
            Descriptor(media_type=document.media_type, digest=Digest.of(rest), size=len(rest)),
            options=PlanOptions(unpack=_MODES[choice % 3]),
            read_config=lambda: _BLOBS.get(document.config.digest, rest),
            peek=lambda layer, count: _BLOBS.get(layer.digest, rest)[:count],
        )
    except UnladeError as error:
        assert str(error).isprintable(), "what a publisher wrote reaches a terminal escaped"
        return
    assert plan.kind == "image" or plan.active()
    for step in plan.active():
        joined = posixpath.normpath(posixpath.join("/root", step.path))
        assert joined == posixpath.join("/root", step.path).rstrip("/")
    assert plan.canonical() == plan.canonical()
