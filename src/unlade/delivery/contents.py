"""The names inside a plan's archives: what `plan` cannot know from manifests alone (V16).

Archives are streamed, verified and read header by header; nothing is written. Layers of an image are laid
over each other with their whiteouts, sources over each other without, exactly as a delivery does it, so
that each path of the result stands once, with the layer and the rule that put it there. Names are shown
as the archive has them: whether they are safe is decided when they are written, not here.

Cost: the archives' bytes over the network, one inflate; memory grows with the number of names, which is
capped. Called by the command line and by programs that want to show a plan in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from unlade.model import Deadline, Reference
from unlade.planning import FileRow, Plan, Step, subset
from unlade.registry import Registry
from unlade.transfer import Fetcher
from unlade.transfer.push import VerifiedReader
from unlade.unpack import LimitExceeded, Limits, stream, tar

# A listing is for people and small programs: a tenth of what may be unpacked.
_MAX_NAMES: Final = 100_000
_WHITEOUT: Final = b".wh."
_OPAQUE: Final = b".wh..wh..opq"


@dataclass(slots=True)
class _File:
    size: int | None
    step: Step


@dataclass(slots=True)
class _Directory:
    children: dict[bytes, _Directory | _File] = field(default_factory=dict)
    hidden: set[bytes] = field(default_factory=set)
    opaque: bool = False


def expand(
    plan: Plan,
    references: Sequence[Reference],
    registry: Registry,
    *,
    budget: int | None = None,
    deadline: Deadline,
) -> tuple[list[FileRow], int]:
    """Every file of the plan, archives opened; and how many bytes of archives were left unopened.

    With a `budget`, archives are opened in order while their blobs' sizes fit in it; one that does not
    stands as a path that ends in `/`, as in `Plan.files`. Raises what a delivery would for archives that
    cannot be read.
    """
    reader = _Reader(Fetcher(registry), deadline)
    root = _Directory()
    left_out: list[FileRow] = []
    unopened = 0
    for number, source in enumerate(plan.sources):
        own = _Directory()
        for step in plan.active():
            if step.source != number:
                continue
            layer = _Directory()
            if step.action == "file":
                _put(layer, step.path.encode("utf-8", "surrogateescape"), _File(step.layer.size, step))
            elif step.files is not None:
                for known in step.files:
                    _put(layer, known.path.encode("utf-8", "surrogateescape"), _File(known.size, step))
            elif budget is not None and step.layer.size > budget:
                unopened += step.layer.size
                left_out.append(
                    FileRow(f"{step.path or '.'}/", None, step.layer.digest, step.rule, source.reference)
                )
            else:
                budget = None if budget is None else budget - step.layer.size
                layer = reader.archive(references[number], step)
            _lay(own, layer, whiteouts=step.action == "layer")
        if source.only:
            own = _only(own, source.only)
        _lay(root, own, whiteouts=False)
    rows = [
        FileRow(
            _text(path),
            file.size,
            file.step.layer.digest,
            file.step.rule,
            plan.sources[file.step.source].reference,
        )
        for path, file in _walk(root)
    ]
    return rows + left_out, unopened


class _Reader:
    def __init__(self, fetcher: Fetcher, deadline: Deadline) -> None:
        self._fetcher = fetcher
        self._deadline = deadline
        self._limits = Limits(max_entries=_MAX_NAMES)
        self._names = 0

    def archive(self, reference: Reference, step: Step) -> _Directory:
        """One archive as a tree of names."""
        layer = _Directory()
        prefix = step.path.encode("utf-8", "surrogateescape")

        def consume(next_block: stream.NextBlock) -> None:
            reader = tar.TarReader(next_block, self._limits)
            while reader.advance():
                self._deadline.check()
                self._take(layer, prefix, reader, step)

        with ExitStack() as stack:
            source = stack.enter_context(self._fetcher.open(reference, step.layer, deadline=self._deadline))
            verified = VerifiedReader(source, step.layer, stack, offset=0)
            stream.run(verified, consume, self._limits, deadline=self._deadline)
        return layer

    def _take(self, layer: _Directory, prefix: bytes, entry: tar.TarReader, step: Step) -> None:
        self._names += 1
        if self._names > _MAX_NAMES:
            raise LimitExceeded(
                f"more than {_MAX_NAMES} names to list", next_step="pull it into a directory and look there"
            )
        path = prefix + b"/" + entry.name if prefix else entry.name
        if entry.kind == tar.DIRECTORY:
            _directory(layer, _parts(path))
        elif entry.kind in (tar.FILE, tar.SYMLINK, tar.HARD_LINK):
            # A link has no content of its own.
            _put(layer, path, _File(entry.size if entry.kind == tar.FILE else 0, step))


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def _directory(root: _Directory, parts: Sequence[bytes]) -> _Directory:
    for part in parts:
        found = root.children.get(part)
        if not isinstance(found, _Directory):
            found = root.children[part] = _Directory()
        root = found
    return root


def _put(layer: _Directory, path: bytes, file: _File) -> None:
    *parents, name = _parts(path) or [b"."]
    directory = _directory(layer, parents)
    if file.step.action == "layer" and name.startswith(_WHITEOUT):
        if name == _OPAQUE:
            directory.opaque = True
        else:
            directory.hidden.add(name[len(_WHITEOUT) :])
        return
    directory.children[name] = file


def _lay(below: _Directory, above: _Directory, *, whiteouts: bool) -> None:
    """Put one tree of names over another, which changes."""
    pending = [(below, above)]
    while pending:
        lower, upper = pending.pop()
        if whiteouts:
            if upper.opaque:
                lower.children.clear()
            for name in upper.hidden:
                lower.children.pop(name, None)
        for name, node in upper.children.items():
            present = lower.children.get(name)
            if isinstance(node, _Directory):
                if not isinstance(present, _Directory):
                    present = lower.children[name] = _Directory()
                pending.append((present, node))
            else:
                lower.children[name] = node


def _walk(root: _Directory) -> Iterator[tuple[bytes, _File]]:
    """Files in the order of their paths; a directory without any is a path that ends in `/`, not a file."""
    pending: list[tuple[bytes, _Directory | _File]] = [(b"", root)]
    while pending:
        path, node = pending.pop()
        if isinstance(node, _File):
            yield path, node
        else:
            prefix = path + b"/" if path else b""
            pending += [(prefix + name, node.children[name]) for name in sorted(node.children, reverse=True)]


def _only(own: _Directory, patterns: tuple[str, ...]) -> _Directory:
    kept = _Directory()
    for path, file in _walk(own):
        if subset.matches(patterns, _text(path)):
            _put(kept, path, file)
    return kept


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
