"""Whether those who ask may have the bytes that a shared tree was made from (V5).

A tree's key follows from digests, and digests are no secret. A registry of the attacker's own could serve a
manifest that names the layers of somebody's private artifact: the key is the same, the tree is there, and
mounting it would hand out what its registry guards. So before a tree is given to a repository that did not
supply it, that repository must supply it. A registry that supplied these bytes before, under another
repository's name, is believed when it serves a part of them to these credentials; from any other registry
all of the bytes are fetched and hashed, and thrown away.

Cost: a request per layer, or the content over the network once per repository; nothing is written.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from unlade.delivery.build import Context
from unlade.delivery.sources import Found
from unlade.model import Descriptor, Reference
from unlade.planning import Plan
from unlade.transfer import Fetcher, Progress, ProgressEvent, Verifier, pump

if TYPE_CHECKING:
    from unlade.store import ImageRecord


def prove(fetcher: Fetcher, plan: Plan, context: Context, *, believed: Container[str]) -> None:
    """Have every layer's repository serve it; raises what fetching raises, IntegrityError for other bytes.

    `believed` are the registries (hosts) that supplied these bytes before. What this delivery fetched by
    itself is proved already.
    """
    for reference, layer in unproved(plan, context):
        if reference.registry in believed:
            if layer.size:
                fetcher.peek(reference, layer, 1, deadline=context.deadline)
            continue
        count = _Counted(context.progress, str(reference), layer)
        with fetcher.open(reference, layer, deadline=context.deadline, progress=context.progress) as source:
            pump(source, Verifier(layer), count, deadline=context.deadline, expected=layer.size)


def believed(
    found: Sequence[Found], records: Sequence[ImageRecord], known: Sequence[Reference]
) -> frozenset[str] | None:
    """Which registries (hosts) supplied these sources before; None when these very repositories did.

    `records` are of this tree or of these manifests, `known` are who else supplied the whole tree. A merged
    tree is on record for each of its sources, and none of them supplied the others.
    """
    supplied = [
        [
            *known,
            *(
                Reference.parse(record.reference)
                for record in records
                if len(found) == 1 or record.manifest.digest == one.descriptor.digest
            ),
        ]
        for one in found
    ]
    pairs = list(zip((one.reference for one in found), supplied, strict=True))
    if all(asked.name in {origin.name for origin in origins} for asked, origins in pairs):
        return None
    doubted = {
        asked.registry
        for asked, origins in pairs
        if asked.registry not in {origin.registry for origin in origins}
    }
    return frozenset(origin.registry for origins in supplied for origin in origins) - doubted


def unproved(plan: Plan, context: Context) -> list[tuple[Reference, Descriptor]]:
    """The layers that this delivery used and did not fetch, each with the repository to ask, once."""
    asked = {}
    for step in plan.active():
        reference = context.references[step.source]
        key = (reference.name, step.layer.digest)
        known = step.content is not None or step.layer.data is not None
        if not known and key not in context.fetched:
            asked[key] = (reference, step.layer)
    return list(asked.values())


class _Counted:
    """Takes bytes, tells how many, and forgets them."""

    def __init__(self, progress: Progress, reference: str, layer: Descriptor) -> None:
        self._progress = progress
        self._reference = reference
        self._layer = layer
        self._done = 0

    def __call__(self, data: memoryview) -> None:
        self._done += len(data)
        layer = self._layer
        self._progress(ProgressEvent("bytes", self._reference, layer.digest, self._done, layer.size))
