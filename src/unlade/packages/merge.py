"""Three-way merge of one resource, field by field, with kpt's outcomes and a reason for each.

The rules, with base/local/upstream: a change on one side is taken; where both changed, upstream's value
wins; a field that upstream deleted goes; null on either side removes a field; a map that local deleted comes
back with what upstream changed in it; lists merge by key where the API names one (listkeys) and are one
value elsewhere; text is compared, so `1` and `"1"` are equal, and a new value is written in local's
quoting. Local's tree is edited in place, so every byte that no rule touches stays. Every place where a side
differs from the base becomes a Decision. Callers: resources (KRM files) and kptmerge (the Kptfile).
"""

from dataclasses import dataclass, field, replace

from unlade.errors import InvalidInput
from unlade.packages.compare import plain, same_text, same_values, shown
from unlade.packages.decisions import Decision, OnConflict, Taken
from unlade.packages.keyed import KeyedMerge, key_value
from unlade.packages.listkeys import SHAPES, Shape, shape_of
from unlade.packages.yamltext import Alias, Entry, Item, Map, Node, Scalar, Seq, clone, render_scalar, shift
from unlade.packages.yamltext.nodes import clone_entry, comments_in, render_entry

Part = Entry | Item
_EMPTY = ("{}", "[]")
# Matching is quadratic, as kpt's is; no pod has this many containers, ports or variables.
MAX_KEYED = 1000
# Always in this order: local, base, upstream.
Parts = tuple[Part | None, Part | None, Part | None]
Nodes = tuple[Node | None, Node | None, Node | None]
Entries = tuple[Entry | None, Entry | None, Entry | None]
Outcome = tuple[Node | None, bool]


class KindClash(InvalidInput):
    """A field is a mapping on one side and a list or a scalar on another: nobody can merge that."""

    code = "kind-clash"


class TooManyElements(InvalidInput):
    """A list with keys that is too long to be matched element by element."""

    code = "too-many-elements"


def _gone(node: Node | None) -> bool:
    return node is None or node.null


@dataclass(slots=True)
class FieldMerge:
    """One resource's merge; `infer` merges lists of named mappings without a schema (the Kptfile's way)."""

    where: str
    policy: OnConflict = "kpt"
    infer: bool = False
    decisions: list[Decision] = field(default_factory=list)
    # Grows with every edit; a flow collection whose count moved is written anew.
    edits: int = 0

    def root(self, local: Map, base: Map | None, upstream: Map) -> None:
        """Merge into local, in place."""
        self._map(local, base, upstream, self._shape(None, local, base, upstream), "", 0)

    # -- choosing -----------------------------------------------------------------------------

    def _note(self, path: str, taken: Taken, reason: str, nodes: Nodes, *, conflict: bool) -> None:
        local, base, upstream = (shown(node) for node in nodes)
        self.decisions.append(Decision(self.where, path, taken, conflict, reason, base, local, upstream))

    def _record(self, path: str, nodes: Nodes, takes_upstream: bool) -> bool:
        """Record one leaf's decision; returns whether upstream is taken once the policy has spoken."""
        local, base, upstream = nodes
        values = (plain(local), plain(base), plain(upstream))
        mine = values[0] != values[1] or (local is None) != (base is None)
        theirs = values[2] != values[1] or (upstream is None) != (base is None)
        if not mine and not theirs:
            return takes_upstream
        if mine and theirs:
            if values[0] == values[2] and (local is None) == (upstream is None):
                self._note(path, "both", "the same change on both sides", nodes, conflict=False)
                return takes_upstream
            if self.policy == "local":
                takes_upstream = False
            elif self.policy == "upstream":
                takes_upstream = True
            taken: Taken = "upstream" if takes_upstream else "local"
            if self.policy == "markers":
                taken = "markers"
            self._note(path, taken, f"changed on both sides, {taken} taken", nodes, conflict=True)
        elif mine:
            reason = "changed locally only" if not takes_upstream else "removed locally, null or emptied here"
            self._note(path, "upstream" if takes_upstream else "local", reason, nodes, conflict=False)
        else:
            taken = "upstream" if takes_upstream else "local"
            self._note(path, taken, "changed upstream only", nodes, conflict=False)
        return takes_upstream

    @staticmethod
    def _check(kind: str, path: str, nodes: Nodes) -> None:
        names = {"map": "a mapping", "seq": "a list", "scalar": "a scalar"}
        for node in nodes:
            if node is not None and not node.null and node.kind != kind:
                raise KindClash(
                    f"{path or 'the document'}: {names[kind]} on one side, {names[node.kind]} on another",
                    next_step="make the two sides agree, or update with --strategy force-delete-replace",
                )

    def _shape(self, known: Shape | None, *nodes: Node | None) -> Shape | None:
        """The shape handed down, else the one of an object that carries its own type."""
        if known:
            return known
        for node in nodes:
            if isinstance(node, Map):
                version, kind = node.get("apiVersion"), node.get("kind")
                if version is not None and kind is not None:
                    found = shape_of(str(plain(version.value)), str(plain(kind.value)))
                    if found is not None:
                        return found
        return known

    # -- the three kinds: each returns the value to keep and whether it is upstream's --------

    def _value(
        self, parts: Parts, keys: tuple[str, ...] | None, shape: Shape | None, path: str, indent: int
    ) -> Outcome:
        """The merged value of one field or element; None removes it."""
        local, _base, upstream = nodes = _nodes(parts)
        kinds = [node.kind for node in nodes if node is not None and not node.null]
        if not kinds:
            if local is not None:
                self._note(path, "merged", "null fields are dropped", nodes, conflict=False)
            return None, False
        if "alias" in kinds:
            return self._opaque(nodes, path)
        self._check(kinds[0], path, nodes)
        if kinds[0] == "scalar":
            return self._scalar(parts, path)
        if kinds[0] == "map":
            null = (local is not None and local.null) or (upstream is not None and upstream.null)
            maps = [node if isinstance(node, Map) else None for node in nodes]
            shape = self._shape(shape, *nodes)
            return self._map(maps[0], maps[1], maps[2], shape, path, indent, null=null), False
        if keys is None and self.infer and shape is None:
            keys = self._inferred(nodes, path)
        if keys is not None:
            return self._keyed(nodes, keys, shape, path, indent), False
        return self._list(nodes, path, indent)

    def _opaque(self, nodes: Nodes, path: str) -> Outcome:
        """A field with an alias on some side: one value, never looked into."""
        local, base, upstream = nodes
        if not self._record(path, nodes, not same_values(base, upstream)):
            return local, False
        if local is not None and upstream is not None and same_values(local, upstream):
            return local, False
        return (clone(upstream) if upstream is not None else None), True

    def _scalar(self, parts: Parts, path: str) -> Outcome:
        local, base, upstream = nodes = _nodes(parts)
        if (upstream is not None and upstream.null) or (local is not None and local.null):
            self._record(path, nodes, upstream is not None and upstream.null)
            return None, False
        if _gone(upstream) or _gone(base):
            takes = _gone(upstream) != _gone(base)
        else:
            marks = [None if part is None else (part.value.value, _remarks(part)) for part in parts]  # type: ignore[union-attr]
            takes = ((local is None or marks[0] == marks[1]) and marks[1] != marks[2]) or (
                plain(upstream) != plain(base)
            )
        if not self._record(path, nodes, takes):
            return local, False
        if not isinstance(upstream, Scalar):
            return None, True
        return self._restyled(local, upstream), True

    def _restyled(self, local: Node | None, upstream: Scalar) -> Scalar:
        """Upstream's scalar in local's quoting, as kpt writes it."""
        if not isinstance(local, Scalar):
            return Scalar(upstream.raw, upstream.value, upstream.style, upstream.null, upstream.props)
        if local.value == upstream.value:
            return local
        fresh = Scalar(upstream.raw, upstream.value, upstream.style, upstream.null, upstream.props)
        blocks = {local.style, fresh.style} & {"|", ">"} or "\n" in fresh.raw
        if local.style != fresh.style and not blocks:
            text = fresh.style != "" or "!!str" in fresh.props
            fresh.raw = render_scalar(fresh.value, local.style, text=text, parent_indent=0)
            fresh.style = fresh.raw[0] if fresh.raw[:1] in ("'", '"') else ""
        return fresh

    def _list(self, nodes: Nodes, path: str, indent: int) -> Outcome:
        """A list without merge keys: one value, upstream's where upstream changed it."""
        local, base, upstream = nodes
        if (upstream is not None and upstream.null) or (local is not None and local.null):
            self._record(path, nodes, upstream is not None and upstream.null)
            return None, False
        takes = _gone(upstream) != _gone(base)
        if not _gone(upstream) and not _gone(base):
            takes = not same_values(upstream, base)
        if not self._record(path, nodes, takes):
            return local, False
        if upstream is None or (local is not None and same_text(local, upstream)):
            return (local if upstream is not None else None), True
        fresh = clone(upstream)
        assert isinstance(fresh, Seq)  # kinds were checked
        if fresh.flow is None:
            column = local.indent if isinstance(local, Seq) and local.flow is None else indent
            shift(fresh, column - fresh.indent)
        return fresh, True

    def _kept_whole(self, local: Node | None, base: Node | None, upstream: Node | None, path: str) -> bool:
        """Under --on-conflict local: a whole collection deleted on one side and changed on the other."""
        if self.policy != "local" or base is None:
            return False
        edited = local if upstream is None else upstream
        if (local is None) == (upstream is None) or edited is None or plain(edited) == plain(base):
            return False
        reason = "deleted on one side, changed on the other, local kept"
        self._note(path, "local", reason, (local, base, upstream), conflict=True)
        return True

    def _map(
        self,
        local: Map | None,
        base: Map | None,
        upstream: Map | None,
        shape: Shape | None,
        path: str,
        indent: int,
        *,
        null: bool = False,
    ) -> Map | None:
        nodes = (local, base, upstream)
        if null:
            self._note(path, "merged", "null removes the mapping", nodes, conflict=False)
            return None
        if local is None and upstream is None:
            return None
        if self._kept_whole(local, base, upstream, path):
            return local
        node = local if local is not None else Map([], indent)
        if upstream is None and base is not None and path:
            self._note(path, "upstream", "removed upstream; local additions stay", nodes, conflict=False)
        before = self.edits
        if not node.entries:
            # An empty `{}` that gains fields is written as a block.
            node.indent = indent
        gone: set[int] = set()
        # Looked up by name once, not entry by entry: a mapping may have tens of thousands.
        tables = [
            {entry.name: entry for entry in side.entries} if side is not None else {}
            for side in (node, base, upstream)
        ]
        for name in sorted(tables[0].keys() | tables[1].keys() | tables[2].keys()):
            entries = (tables[0].get(name), tables[1].get(name), tables[2].get(name))
            if self._field(node, entries, upstream, shape, f"{path}.{name}" if path else name):
                gone.add(id(entries[0]))
        if gone:
            _remove(node, gone)
        if node.flow is not None and self.edits != before:
            node.flow = None if node.flow in _EMPTY and node.entries else ""
        if local is None:
            self.edits += 1
            if not node.entries and self.policy == "local" and base is not None:
                return None
        return node

    def _field(
        self, node: Map, entries: Entries, upstream: Map | None, shape: Shape | None, where: str
    ) -> bool:
        """Merge one field of a mapping and put the outcome into it; True when local's entry must go."""
        mine, old, new = entries
        name = next(entry.name for entry in entries if entry is not None)
        keys, below = shape.get(name, (None, "")) if shape else (None, "")
        before = render_entry(mine, node.indent) if mine is not None and self.policy == "markers" else ""
        count = len(self.decisions)
        step = 2
        if upstream is not None and new is not None and isinstance(new.value, Map | Seq):
            blocks = new.value.flow is None and upstream.flow is None
            step = new.value.indent - upstream.indent if blocks else step
        value, theirs = self._value((mine, old, new), keys, SHAPES[below] or None, where, node.indent + step)
        remark = _key_comments(mine, old, new)
        removed = value is None and mine is not None
        if value is None:
            self.edits += removed
        elif mine is None:
            assert new is not None  # a value without a local field comes from upstream
            mine = Entry(clone_entry(new).key, value)
            mine.lead = _lead_at(remark.lead, node.indent) if remark is not None else ""
            mine.comment = new.comment if theirs or remark is not None else ""
            if isinstance(value, Scalar) and upstream is not None:
                shift(value, node.indent - upstream.indent)
            node.entries.append(mine)
            self.edits += 1
            if old is not None and not _gone(old.value) and _hollow(value):
                reason = "removed locally, comes back empty because upstream still has it"
                self._note(where, "upstream", reason, (None, old.value, new.value), conflict=True)
        else:
            self._set(node, mine, value, (old, new), upstream, where, theirs=theirs)
            if remark is new and new is not None and new is not mine:
                self._take_remark(mine, new, node.indent)
        if self.policy == "markers":
            fresh = self.decisions[count:]
            if fresh and fresh[0].conflict and fresh[0].path == where:
                if node.flow is None:
                    self._mark(node, mine, before, new, upstream)
                    return False
                # No line of its own, no room for markers: kpt's outcome, and the report says so.
                self.decisions[count] = replace(fresh[0], taken="upstream" if theirs else "local")
        return removed

    def _set(
        self,
        node: Map,
        mine: Entry,
        value: Node,
        others: tuple[Entry | None, Entry | None],
        upstream: Map | None,
        path: str,
        *,
        theirs: bool,
    ) -> None:
        """Set an existing field; the line's comment goes with the value, as in kpt."""
        old, new = others
        leaf = isinstance(value, Scalar | Alias)
        if value is not mine.value:
            if isinstance(value, Scalar) and upstream is not None:
                shift(value, node.indent - upstream.indent)
            mine.value = value
            self.edits += 1
        if leaf and theirs and new is not None and mine.comment.strip() != new.comment.strip():
            if old is not None and old.comment.strip() != mine.comment.strip() and mine.comment.strip():
                keep = self.policy == "local"
                taken: Taken = "local" if keep else "upstream"
                texts = (old.comment.strip(), mine.comment.strip(), new.comment.strip())
                reason = "the comment changed locally too"
                self.decisions.append(Decision(self.where, path, taken, True, reason, *texts))
                if keep:
                    return
            mine.comment = new.comment
            self.edits += 1

    def _take_remark(self, mine: Entry, new: Entry, indent: int) -> None:
        """Upstream's comments above a key, and behind a key whose value is below it."""
        if comments_in(new.lead) != comments_in(mine.lead):
            mine.lead = _lead_at(new.lead, indent)
            self.edits += 1
        if not isinstance(mine.value, Scalar | Alias) and new.comment.strip() != mine.comment.strip():
            mine.comment = new.comment
            self.edits += 1

    def _mark(
        self, node: Map, mine: Entry | None, before: str, new: Entry | None, upstream: Map | None
    ) -> None:
        """Replace a field by conflict markers with both sides' lines."""
        after = ""
        if new is not None and upstream is not None:
            copy = clone_entry(new)
            delta = node.indent - upstream.indent
            copy.lead = _lead_at(copy.lead, node.indent)
            shift(copy.value, delta)
            after = render_entry(copy, node.indent)
        text = f"<<<<<<< local\n{before}=======\n{after}>>>>>>> upstream\n"
        if mine is None:
            mine = Entry(Scalar("conflict", "conflict"), Scalar("", "", "", True))
            node.entries.append(mine)
        mine.override = text
        self.edits += 1

    # -- lists with keys ----------------------------------------------------------------------

    def _inferred(self, nodes: Nodes, path: str) -> tuple[str, ...] | None:
        """The Kptfile's lists: by name where elements have one; sides that disagree on that cannot merge."""
        lists = [node for node in nodes if isinstance(node, Seq)]
        named = [
            all(isinstance(item.value, Map) and item.value.get("name") is not None for item in node.items)
            for node in lists
        ]
        if not any(named):
            return None
        by_name = False
        for flag, node in zip(named, lists, strict=True):
            if by_name and not flag:
                raise KindClash(
                    f"{path}: elements had names on one side and have none on a later one",
                    next_step="name every element, or none",
                )
            by_name = by_name or (flag and bool(node.items))
        return ("name",)

    def _keyed(
        self, nodes: Nodes, keys: tuple[str, ...], shape: Shape | None, path: str, indent: int
    ) -> Seq | None:
        """A list whose elements have keys, or a set of scalars (no keys): merged element by element."""
        local, base, upstream = (node if isinstance(node, Seq) else None for node in nodes)
        if upstream is None and base is not None:
            if local is None:
                return None
            if self._kept_whole(local, base, upstream, path):
                return local
            self._record(path, (local, base, None), True)
            return local if self.policy == "local" and plain(local) != plain(base) else None
        if self._kept_whole(local, base, upstream, path):
            return local
        node = local if local is not None else Seq([], indent)
        if local is None and base is not None:
            self.edits += 1
        before = self.edits
        if not node.items:
            node.indent = indent
        longest = max(len(side.items) for side in (node, base, upstream) if side is not None)
        if longest > MAX_KEYED:
            raise TooManyElements(
                f"{path} has {longest} elements; at most {MAX_KEYED} are matched by key",
                next_step="split the resource, or update with --strategy force-delete-replace",
            )
        merge = KeyedMerge(keys or ("",), [node, base, upstream])
        order = [item.value for item in node.items]
        for values in merge.wanted():
            used, chosen = merge.usable(values)
            parts = merge.find(used, chosen)
            label = ",".join(
                f"{key}={value}" if key else value for key, value in zip(used, chosen, strict=True)
            )
            value, _theirs = self._value(parts, None, shape, f"{path}[{label}]", node.indent + 2)
            if value is None or (isinstance(value, Map) and not value.entries):
                merge.drop(node, used, chosen)
                continue
            if isinstance(value, Map):
                for key, text in zip(used, chosen, strict=True):
                    if value.get(key) is None and text:
                        raw = render_scalar(text, "", text=False, parent_indent=0)
                        value.entries.append(Entry(Scalar(key, key), Scalar(raw, text)))
                        self.edits += 1
                        if value.flow is not None:
                            value.flow = ""
            merge.add(value, parts, used, chosen)
        merge.put(node)
        self._lost_elements(node, base, upstream, (keys or ("",))[0], path)
        if [item.value for item in node.items] != order or len(order) != len(node.items):
            self.edits += 1
        if node.flow is not None and self.edits != before:
            node.flow = None if node.flow in _EMPTY and node.items else ""
        if local is None and not node.items and self.policy == "local":
            return None
        return node

    def _lost_elements(self, node: Seq, base: Seq | None, upstream: Seq | None, key: str, path: str) -> None:
        """Report upstream's new elements that kpt's matching by several keys swallowed."""
        known = [plain(item.value) for item in base.items] if base is not None else []
        have = {key_value(item.value, key) for item in node.items}
        for item in upstream.items if upstream is not None else ():
            if plain(item.value) not in known and key_value(item.value, key) not in have:
                where = f"{path}[{key}={key_value(item.value, key)}]" if key else path
                reason = "upstream's element was dropped: its keys match another element's in part"
                self._note(where, "local", reason, (None, None, item.value), conflict=True)


def _hollow(node: Node) -> bool:
    """An empty collection, or a mapping of nothing else."""
    if isinstance(node, Map):
        return all(_hollow(entry.value) for entry in node.entries)
    return isinstance(node, Seq) and not node.items


def _nodes(parts: Parts) -> Nodes:
    local, base, upstream = parts
    return (
        None if local is None else local.value,
        None if base is None else base.value,
        None if upstream is None else upstream.value,
    )


def _remarks(part: Part) -> tuple[str, str]:
    """The comments that kpt counts as part of a scalar."""
    return (comments_in(part.lead) if isinstance(part, Item) else "", part.comment.strip())


def _key_comments(mine: Entry | None, old: Entry | None, new: Entry | None) -> Entry | None:
    """The side whose comments on the key are kept: they merge like a value of their own."""
    if (new is None) != (old is None):
        return new
    if new is None or old is None:
        return mine

    def mark(entry: Entry) -> tuple[str, str]:
        below = not isinstance(entry.value, Scalar | Alias)
        return comments_in(entry.lead), entry.comment.strip() if below else ""

    if (mine is None or mark(mine) == mark(old)) and mark(old) != mark(new):
        return new
    return mine


def _lead_at(lead: str, indent: int) -> str:
    """Comment lines at another column; blank lines stay behind."""
    return "".join(" " * indent + line.strip() + "\n" for line in lead.split("\n") if line.strip())


def _remove(node: Map, gone: set[int]) -> None:
    """Remove entries with their comments; a file's header above the first key passes to the next one."""
    header = ""
    if id(node.entries[0]) in gone:
        head, blank, _own = node.entries[0].lead.rpartition("\n\n")
        header = head + blank
    node.entries = [entry for entry in node.entries if id(entry) not in gone]
    if node.entries and header:
        node.entries[0].lead = header + node.entries[0].lead
