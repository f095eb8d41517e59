"""Three-way merge of a package's resource files: whole documents first, then their fields.

Identity contains the file path, so each file merges alone, and a file that neither side changed is not even
parsed. Within a file: a resource added upstream is added; deleted upstream, it goes unless local differs
from the base; deleted locally, it stays deleted; otherwise its fields merge. Documents are ordered by
upstream's position where upstream moved them, else by local's. Documents that hold only comments stay with
the document below them. The text of untouched documents is copied byte for byte.
"""

import re
from dataclasses import dataclass, field

from unlade.errors import UnladeError
from unlade.packages.compare import plain, same_text
from unlade.packages.decisions import Decision, OnConflict, Taken
from unlade.packages.identity import Identity, identify, mark
from unlade.packages.merge import FieldMerge
from unlade.packages.yamltext import (
    Alias,
    Document,
    Entry,
    Item,
    Map,
    Node,
    Scalar,
    Seq,
    YamlSyntaxError,
    parse_documents,
)
from unlade.packages.yamltext.nodes import clone, inline, walk

# kpt puts a list document below this key so that it can be merged like a mapping.
_BARE_LIST = "items"
# Lines that may hold a null: kpt removes nulls even when no side changed, so such files are always merged. A
# null is spelled out, or is a key with nothing behind it and nothing deeper below it. A key behind a dash
# and a bracket are always suspected: what belongs to them cannot be told by a pattern.
_MAYBE_NULL = re.compile(
    r"[:,{-][ \t]*(?:~|null|Null|NULL)[ \t]*(?:[,}#][^\n]*)?$"
    r"|^ *-[^\n]*:[ \t]*(?:#[^\n]*)?$"
    r"|^ *-[ \t]*(?:#[^\n]*)?$"
    r"|:[ \t]*[,}]"
    r"|^( *)[^ #\n-][^\n]*:[ \t]*(?:#[^\n]*)?$(?!(?:\n[ \t]*(?:#[^\n]*)?$)*\n(?:\1 +[^ #\n]|\1-[ \n]))",
    re.MULTILINE,
)


class DuplicateResource(YamlSyntaxError):
    """The same resource twice in one file on one side: no merge can tell them apart."""

    code = "duplicate-resource"


@dataclass(slots=True)
class Placed:
    """A document with its identity and its position among the resources of its file."""

    document: Document
    identity: Identity
    index: int
    # Comment-only documents right before this one travel with it.
    before: list[Document] = field(default_factory=list)


@dataclass(slots=True)
class FileMerge:
    """The outcome for one file: its new text, None when it goes away, and what was decided."""

    text: str | None
    decisions: list[Decision]


def read_file(text: str, path: str, side: str) -> tuple[list[Placed], list[Document]]:
    """The resources of one file, marked with their identity, and trailing comment-only documents."""
    placed: list[Placed] = []
    waiting: list[Document] = []
    seen: set[Identity] = set()
    for document in parse_documents(text, name=f"{path} ({side})"):
        if document.root is None or document.root.null:
            waiting.append(document)
            continue
        if not isinstance(document.root, Map | Seq):
            raise YamlSyntaxError(f"{path} ({side}): a document is neither a mapping nor a list")
        document.edited = mark(document)
        identity = identify(document.root, path)
        if identity in seen:
            raise DuplicateResource(
                f"{identity} is in the file twice ({side})", next_step="remove or rename one of them"
            )
        seen.add(identity)
        placed.append(Placed(document, identity, len(placed), waiting))
        waiting = []
    return placed, waiting


# Texts known to carry every mark already: what this module wrote is not parsed again. Bounded, because a
# process may update many packages; a miss costs only time.
_KNOWN_MARKED: dict[str, None] = {}
_KNOWN_LIMIT = 4096


def _know(text: str) -> str:
    if len(_KNOWN_MARKED) >= _KNOWN_LIMIT:
        _KNOWN_MARKED.clear()
    _KNOWN_MARKED[text] = None
    return text


def marked_text(text: str, *, path: str = "file", attribute: bool = False) -> str:
    """The file with identity marks on every named resource; text that is not YAML comes back as it is."""
    if text in _KNOWN_MARKED and not attribute:
        return text
    try:
        documents = parse_documents(text, name=path)
        changed = [mark(document, attribute=attribute) for document in documents]
    except UnladeError:
        return text
    if not any(changed):
        return _know(text)
    parts = [
        document.render() if flag else document.source
        for document, flag in zip(documents, changed, strict=True)
    ]
    return _know(_line_ends("".join(parts), text))


def _line_ends(rendered: str, source: str) -> str:
    """Give a rendered file the line ends, byte order mark and last newline of its source."""
    if source and not source.endswith("\n") and rendered.endswith("\n"):
        rendered = rendered[:-1]
    if "\r\n" in source:
        rendered = rendered.replace("\n", "\r\n")
    return "\ufeff" + rendered if source.startswith("\ufeff") else rendered


def _wrapped(document: Document) -> Map:
    """The root as a mapping; a list document hangs below one key."""
    root = document.root
    if isinstance(root, Map):
        return root
    assert isinstance(root, Seq)  # read_file lets nothing else through
    return Map([Entry(Scalar(_BARE_LIST, _BARE_LIST), root, gap="")], 0)


def merge_file(
    path: str, base: str | None, local: str | None, upstream: str | None, *, policy: OnConflict = "kpt"
) -> FileMerge:
    """Merge one file; None for a side means that it has no such file."""
    if local is not None and base is not None and base == upstream and not _MAYBE_NULL.search(local):
        marked = marked_text(base, path=path)
        if local in (base, marked):
            return FileMerge(marked, [])
    if base == upstream and local is None:
        return FileMerge(None, [])
    merger = _FileMerger(path, policy)
    return merger.run(base, local, upstream)


class _FileMerger:
    """Merges the documents of one file."""

    def __init__(self, path: str, policy: OnConflict) -> None:
        self.path = path
        self.policy = policy
        self.decisions: list[Decision] = []

    def run(self, base: str | None, local: str | None, upstream: str | None) -> FileMerge:
        mine, rest = read_file(local, self.path, "local") if local is not None else ([], [])
        old = {p.identity: p for p in read_file(base, self.path, "base")[0]} if base is not None else {}
        if upstream == base:
            # Neither side of the merge is edited, so both may be the same objects.
            new = old
        else:
            theirs = read_file(upstream, self.path, "upstream")[0] if upstream is not None else []
            new = {placed.identity: placed for placed in theirs}
        known = {placed.identity for placed in mine}
        kept: list[tuple[int, Placed]] = []
        for placed in mine:
            place = self._resource(placed, old.get(placed.identity), new.get(placed.identity))
            if place is not None:
                kept.append((place, placed))
        for identity, placed in old.items():
            if identity not in known:
                self._deleted_locally(placed, new.get(identity), kept)
        for identity, placed in new.items():
            if identity not in known and identity not in old:
                self._note(placed, "upstream", "added upstream")
                kept.append((placed.index, placed))
        kept.sort(key=lambda pair: pair[0])
        if not kept:
            if mine or not rest or local is None:
                return FileMerge(None, self.decisions)
            return FileMerge(local, self.decisions)
        source = next(text for text in (local, upstream, "") if text is not None)
        text = self._assemble([placed for _, placed in kept], mine, rest, source)
        return FileMerge(text if self.policy == "markers" else _know(text), self.decisions)

    def _note(self, placed: Placed, taken: Taken, reason: str, *, conflict: bool = False) -> None:
        self.decisions.append(Decision(str(placed.identity), "", taken, conflict, reason))

    def _resource(self, mine: Placed, old: Placed | None, new: Placed | None) -> int | None:
        """Merge one local resource; its position, or None when it goes."""
        if new is None:
            if old is None:
                self._note(mine, "local", "added locally")
                return mine.index
            assert old.document.root is not None and mine.document.root is not None  # read_file's promise
            if same_text(old.document.root, mine.document.root):
                self._note(mine, "upstream", "deleted upstream")
                return None
            if self.policy == "upstream":
                self._note(
                    mine, "upstream", "deleted upstream, changed locally, upstream taken", conflict=True
                )
                return None
            self._note(mine, "local", "deleted upstream, but changed locally: kept", conflict=True)
            return mine.index
        self._fields(mine, old, new)
        if old is None:
            return new.index
        return new.index if new.index != old.index else mine.index

    def _deleted_locally(self, old: Placed, new: Placed | None, kept: list[tuple[int, Placed]]) -> None:
        if new is None:
            return
        assert old.document.root is not None and new.document.root is not None  # read_file's promise
        if same_text(old.document.root, new.document.root):
            self._note(new, "local", "deleted locally")
        elif self.policy == "upstream":
            self._note(new, "upstream", "deleted locally, changed upstream, upstream taken", conflict=True)
            kept.append((new.index, new))
        else:
            self._note(new, "local", "deleted locally, though upstream changed it", conflict=True)

    def _fields(self, mine: Placed, old: Placed | None, new: Placed) -> None:
        merge = FieldMerge(str(mine.identity), self.policy)
        local, upstream = _wrapped(mine.document), _wrapped(new.document)
        merge.root(local, _wrapped(old.document) if old is not None else None, upstream)
        if isinstance(mine.document.root, Seq):
            entry = local.get(_BARE_LIST)
            mine.document.root = entry.value if entry is not None else Seq([], 0, "[]")
        self.decisions += merge.decisions
        if merge.edits:
            mine.document.edited = True
            _settle(mine.document, new.document)

    def _assemble(self, kept: list[Placed], mine: list[Placed], rest: list[Document], source: str) -> str:
        """The file's new text, with the line ends of the file it continues."""
        parts: list[str] = []
        first = mine[0] if mine else None
        for placed in kept:
            for document in [*placed.before, placed.document]:
                text = document.text()
                own = document.separator
                if not parts:
                    # A file keeps the opening of its first document; whoever comes first now takes it over.
                    opening = first.document.separator if first is not None and not first.before else own
                    if first is not None and document is not first.document and not placed.before:
                        text = opening + text[len(own) :]
                elif not own:
                    text = "---\n" + text
                parts.append(text)
        parts += [document.text() for document in rest]
        return _line_ends("".join(parts), source)


def _settle(document: Document, upstream: Document) -> None:
    """Make sure that the edited text reads back as the edited tree; repair aliases whose anchor went."""
    root = document.root
    assert root is not None  # merged documents have one
    marked = [
        entry for node in walk(root) if isinstance(node, Map) for entry in node.entries if entry.override
    ]
    overrides = [(entry, entry.override) for entry in marked]
    for entry in marked:
        entry.override = None
    _anchor_aliases(root, upstream)
    if not _reads_back(document) and isinstance(root, Map):
        # The careful edit failed: write every field of the root on its own line, in flow style.
        root.flow, root.indent = None, 0
        for entry in root.entries:
            raw = inline(entry.value)
            entry.value = Scalar(raw, raw)
            entry.lead, entry.foot, entry.gap = "", "", " "
    for entry, override in overrides:
        entry.override = override


def _reads_back(document: Document) -> bool:
    try:
        again = parse_documents(document.render())
    except YamlSyntaxError:
        return False
    found = [other.root for other in again if other.root is not None]
    return len(found) == 1 and plain(found[0]) == plain(document.root)


def _anchor_aliases(root: Node, upstream: Document) -> None:
    """Replace an alias whose anchor is no longer above it by what it stood for."""
    anchors: dict[str, Node] = {}
    for tree in (upstream.root, root):
        for node in walk(tree) if tree is not None else ():
            for prop in node.props.split():
                if prop.startswith("&"):
                    anchors[prop[1:]] = node
    if anchors:
        _replace_aliases(root, set(), anchors)


def _replace_aliases(node: Node, defined: set[str], anchors: dict[str, Node]) -> None:
    """In document order, because an anchor serves only what comes after it."""
    defined.update(prop[1:] for prop in node.props.split() if prop.startswith("&"))
    parts: list[Entry] | list[Item] = []
    if isinstance(node, Map):
        parts = node.entries
    elif isinstance(node, Seq):
        parts = node.items
    for part in parts:
        name = part.value.raw[1:] if isinstance(part.value, Alias) else ""
        if name and name not in defined and name in anchors:
            copy = clone(anchors[name])
            if not isinstance(copy, Alias):
                copy.props = ""
            raw = inline(copy)
            part.value = Scalar(raw, copy.value if isinstance(copy, Scalar) else raw)
        else:
            _replace_aliases(part.value, defined, anchors)
