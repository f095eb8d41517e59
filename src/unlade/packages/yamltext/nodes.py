"""The lossless tree: every node remembers its own source text, and rendering concatenates it.

Invariant: for a tree fresh from the parser, Document.render() equals its source, byte for byte. A change
touches one entry or item; its neighbours keep their text. Block collections carry their column (spaces
only, as YAML demands); flow collections keep their raw text until something inside them changes, then they
are written anew on one line. Comment lines above a key belong to the key (lead), a comment after a value
to its line (comment), deeper comment lines below it to the entry (foot).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from unlade.packages.yamltext.scalars import render_scalar


@dataclass(slots=True)
class Scalar:
    """One scalar: source text (tag and anchor apart), decoded value, style ('', ', ", | or >)."""

    raw: str
    value: str
    style: str = ""
    null: bool = False
    props: str = ""

    kind = "scalar"


@dataclass(slots=True)
class Alias:
    """A reference `*name` to an anchored node."""

    raw: str

    kind = "alias"
    null = False
    props = ""

    @property
    def value(self) -> str:
        """The alias as written; two aliases are the same value when their names are."""
        return self.raw


@dataclass(slots=True)
class Entry:
    """One `key: value` of a mapping."""

    key: Scalar
    value: "Node"
    lead: str = ""
    gap: str = " "
    comment: str = ""
    foot: str = ""
    # Replaces the entry when rendering: conflict markers, which no YAML tree can hold.
    override: str | None = None

    @property
    def name(self) -> str:
        """The key's text."""
        return self.key.value


@dataclass(slots=True)
class Item:
    """One element of a sequence."""

    value: "Node"
    lead: str = ""
    gap: str = " "
    comment: str = ""
    foot: str = ""
    override: str | None = None


@dataclass(slots=True)
class Map:
    """A mapping; flow is its source text in flow style, "" once that is stale, None for a block mapping."""

    entries: list[Entry] = field(default_factory=list)
    indent: int = 0
    flow: str | None = None
    props: str = ""

    kind = "map"
    null = False

    def get(self, name: str) -> Entry | None:
        """The entry with this key, or None."""
        for entry in self.entries:
            if entry.key.value == name:
                return entry
        return None

    def names(self) -> list[str]:
        """Keys in order."""
        return [entry.key.value for entry in self.entries]


@dataclass(slots=True)
class Seq:
    """A sequence; flow as for Map."""

    items: list[Item] = field(default_factory=list)
    indent: int = 0
    flow: str | None = None
    props: str = ""

    kind = "seq"
    null = False


Node = Scalar | Alias | Map | Seq


def comments_in(lead: str) -> str:
    """The comment lines of a lead, stripped, blank lines dropped: what kpt compares."""
    if "#" not in lead:
        return ""
    return "\n".join(line.strip() for line in lead.split("\n") if line.strip())


def inline(node: Node) -> str:
    """The node written in flow style on one line."""
    props = node.props + " " if node.props else ""
    if isinstance(node, Map):
        if node.flow and "\n" not in node.flow:
            return props + node.flow
        body = ", ".join(f"{_inline_key(entry.key)}: {inline(entry.value)}" for entry in node.entries)
        return props + "{" + body + "}"
    if isinstance(node, Seq):
        if node.flow and "\n" not in node.flow:
            return props + node.flow
        return props + "[" + ", ".join(inline(item.value) for item in node.items) + "]"
    if isinstance(node, Alias):
        return node.raw
    if node.null and not node.raw:
        return props + "null"
    if node.style in ("|", ">") or "\n" in node.raw or (not node.style and set(node.value) & set(",[]{}")):
        return props + render_scalar(node.value, '"', text=True, parent_indent=0)
    return props + node.raw


def _inline_key(key: Scalar) -> str:
    if not key.style and set(key.value) & set(",[]{}"):
        return render_scalar(key.value, '"', text=True, parent_indent=0)
    return key.raw


def _after(node: Node, gap: str, comment: str) -> str:
    """What follows `key:` or `-` for a value, its line comment and newline included."""
    props = (" " + node.props) if node.props else ""
    if isinstance(node, Map):
        if node.flow is None and node.entries:
            return props + comment + "\n" + render_block(node)
        return props + (gap or " ") + (node.flow or inline_body(node)) + comment + "\n"
    if isinstance(node, Seq):
        if node.flow is None and node.items:
            return props + comment + "\n" + render_block(node)
        return props + (gap or " ") + (node.flow or inline_body(node)) + comment + "\n"
    if isinstance(node, Scalar):
        if node.style in ("|", ">"):
            return props + (gap or " ") + node.raw
        if not node.raw:
            return props + comment + "\n"
    return props + (gap or " ") + node.raw + comment + "\n"


def inline_body(node: Map | Seq) -> str:
    """inline() without the anchor and tag."""
    text = inline(node)
    return text[len(node.props) + 1 :] if node.props else text


def render_entry(entry: Entry, indent: int) -> str:
    """The entry's own lines, its lead and foot included."""
    if entry.override is not None:
        return entry.override
    key = entry.key.raw if not entry.key.props else entry.key.props + " " + entry.key.raw
    return entry.lead + " " * indent + key + ":" + _after(entry.value, entry.gap, entry.comment) + entry.foot


def render_item(item: Item, indent: int) -> str:
    """The item's own lines; a block collection starts on the dash's line when its column says so."""
    if item.override is not None:
        return item.override
    node = item.value
    dash = " " * indent + "-"
    nested = (isinstance(node, Map) and node.flow is None and node.entries) or (
        isinstance(node, Seq) and node.flow is None and node.items
    )
    if nested and item.gap and not node.props and not item.comment:
        assert isinstance(node, Map | Seq)
        first = node.entries[0] if isinstance(node, Map) else node.items[0]
        if first.override is None:
            lead, first.lead = first.lead, ""
            body = render_block(node)
            first.lead = lead
            return (
                item.lead + lead + dash + " " * (node.indent - indent - 1) + body[node.indent :] + item.foot
            )
        # Conflict markers cannot start behind a dash.
        return item.lead + dash + "\n" + render_block(node) + item.foot
    return item.lead + dash + _after(node, item.gap, item.comment) + item.foot


def render_block(node: Map | Seq) -> str:
    """All lines of a block collection."""
    if isinstance(node, Map):
        return "".join([render_entry(entry, node.indent) for entry in node.entries])
    return "".join([render_item(item, node.indent) for item in node.items])


@dataclass(slots=True)
class Document:
    """One document of a file: its separator line, its root, what follows; root None holds only comments."""

    root: Node | None
    separator: str = ""
    lead: str = ""
    tail: str = ""
    source: str = ""
    edited: bool = False

    def text(self) -> str:
        """The source while nothing was edited, else the rendered tree; whoever edits says so."""
        return self.render() if self.edited else self.source

    def render(self) -> str:
        """The document's text, separator included."""
        if self.root is None:
            return self.separator + self.lead + self.tail
        root = self.root
        if (
            isinstance(root, Map | Seq)
            and root.flow is None
            and (root.entries if isinstance(root, Map) else root.items)
        ):
            head = root.props + "\n" if root.props else ""
            return self.separator + self.lead + head + render_block(root) + self.tail
        if isinstance(root, Scalar) and root.style in ("|", ">"):
            return self.separator + self.lead + root.raw + self.tail
        return self.separator + self.lead + inline(root) + "\n" + self.tail


def clone(node: Node) -> Node:
    """A deep copy that shares no mutable part."""
    if isinstance(node, Scalar):
        return Scalar(node.raw, node.value, node.style, node.null, node.props)
    if isinstance(node, Alias):
        return Alias(node.raw)
    if isinstance(node, Map):
        return Map([clone_entry(entry) for entry in node.entries], node.indent, node.flow, node.props)
    return Seq([clone_item(item) for item in node.items], node.indent, node.flow, node.props)


def clone_entry(entry: Entry) -> Entry:
    """A deep copy of an entry."""
    key = Scalar(entry.key.raw, entry.key.value, entry.key.style, entry.key.null, entry.key.props)
    return Entry(key, clone(entry.value), entry.lead, entry.gap, entry.comment, entry.foot)


def clone_item(item: Item) -> Item:
    """A deep copy of an item."""
    return Item(clone(item.value), item.lead, item.gap, item.comment, item.foot)


def _shift_lines(text: str, delta: int) -> str:
    if not text or not delta:
        return text
    out = []
    for line in text.split("\n"):
        if not line.strip():
            out.append(line)
        elif delta > 0:
            out.append(" " * delta + line)
        else:
            have = len(line) - len(line.lstrip(" "))
            out.append(line[min(have, -delta) :])
    return "\n".join(out)


def shift(node: Node, delta: int) -> None:
    """Move a subtree's columns by delta, in place: what an insertion at another depth needs."""
    if not delta:
        return
    if isinstance(node, Scalar):
        if "\n" in node.raw:
            first, rest = node.raw.split("\n", 1)
            node.raw = first + "\n" + _shift_lines(rest, delta)
        return
    if isinstance(node, Alias):
        return
    if node.flow is not None:
        if "\n" in node.flow:
            first, rest = node.flow.split("\n", 1)
            node.flow = first + "\n" + _shift_lines(rest, delta)
        return
    node.indent += delta
    parts: list[Entry | Item] = [*(node.entries if isinstance(node, Map) else node.items)]
    for part in parts:
        part.lead = _shift_lines(part.lead, delta)
        part.foot = _shift_lines(part.foot, delta)
        shift(part.value, delta)


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it, top down."""
    yield node
    if isinstance(node, Map):
        for entry in node.entries:
            yield from walk(entry.value)
    elif isinstance(node, Seq):
        for item in node.items:
            yield from walk(item.value)
