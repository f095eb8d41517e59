"""Lists merged by key, with the exact matching that kpt uses, its oddities included.

Elements are found by the text of their key fields. With several keys (a port's number and protocol) an
absent second key is a wildcard only in part, which is why a protocol added upstream duplicates a port: the
outcome is kept because the differential tests hold us to kpt's tree, and reported because it surprises.
A set of scalars (finalizers) is the case of one empty key. Order: local's elements stay where they are,
new ones follow; lists with several keys are rewritten in the order local, base, upstream.
"""

from unlade.packages.yamltext import Item, Map, Node, Scalar, Seq

Values = tuple[str, ...]


def _text(node: Node | None) -> str:
    return node.value if isinstance(node, Scalar) else ""


def key_value(node: Node, key: str) -> str:
    """The text of an element's key field; empty when it has none."""
    if not key:
        return _text(node)
    entry = node.get(key) if isinstance(node, Map) else None
    if entry is None or entry.value.null:
        return ""
    return _text(entry.value)


def _has(node: Node, keys: Values, values: Values) -> bool:
    """Whether an element carries these keys; an empty value matches any."""
    for key, value in zip(keys, values, strict=False):
        if not key:
            if not isinstance(node, Scalar) or node.value != value:
                return False
            continue
        entry = node.get(key) if isinstance(node, Map) else None
        if entry is None:
            return False
        if value and _text(entry.value) != value:
            return False
    return True


def _texts(node: Node, keys: Values) -> Values | None:
    """The texts of an element's keys; None when it lacks one of them."""
    if not keys[0]:
        return (node.value,) if isinstance(node, Scalar) else None
    if not isinstance(node, Map):
        return None
    entries = [node.get(key) for key in keys]
    if any(entry is None for entry in entries):
        return None
    return tuple(_text(entry.value) for entry in entries if entry is not None)


def _by_values(side: Seq | None, keys: Values) -> dict[Values, Item]:
    """The first element for each combination of key texts."""
    found: dict[Values, Item] = {}
    for item in side.items if side is not None else ():
        texts = _texts(item.value, keys)
        if texts is not None:
            found.setdefault(texts, item)
    return found


def _agree(left: Values, right: Values) -> Values | None:
    """Two key tuples are one when they share a value and differ only where one is empty."""
    merged = []
    common = False
    for one, other in zip(left, right, strict=True):
        if one == other:
            common = True
        elif one and other:
            return None
        merged.append(one or other)
    return tuple(merged) if common else None


class KeyedMerge:
    """The bookkeeping of one list's merge; the caller merges each element's three sides."""

    def __init__(self, keys: Values, sides: list[Seq | None]) -> None:
        self.keys = keys
        self.sides = sides
        self.all = self._collect()
        self.added: list[Item] = []
        self.last: Values = keys
        self._filled: set[str] | None = None
        # For each set of keys asked for, the first element by its values, of base and upstream.
        self._index: dict[Values, list[dict[Values, Item]]] = {}

    def _collect(self) -> list[Values]:
        seen: dict[Values, None] = {}
        for side in self.sides:
            for item in side.items if side is not None else ():
                seen[tuple(key_value(item.value, key) for key in self.keys)] = None
        found = list(seen)
        if len(self.keys) > 1:
            for i in range(len(found)):
                for j in range(len(found)):
                    merged = _agree(found[i], found[j])
                    if merged is not None:
                        found[i] = found[j] = merged
        return found

    def wanted(self) -> list[Values]:
        """The key values of every element on any side, local's first."""
        return list(self.all)

    def usable(self, values: Values) -> tuple[Values, Values]:
        """The keys that any element of this list fills, and this element's values for them."""
        if self._filled is None:
            self._filled = {
                key for each in self.all for key, value in zip(self.keys, each, strict=True) if value
            }
        filled = self._filled
        if not filled:
            self.last = self.keys
            return self.keys, values
        pairs = [(key, value) for key, value in zip(self.keys, values, strict=True) if key in filled]
        self.last = tuple(key for key, _ in pairs)
        return self.last, tuple(value for _, value in pairs)

    def find(self, keys: Values, values: Values) -> tuple[Item | None, Item | None, Item | None]:
        """The element with these keys on each side; empty values are left out of the search."""
        pairs = [(key, value) for key, value in zip(keys, values, strict=True) if value]
        if pairs:
            keys, values = tuple(key for key, _ in pairs), tuple(value for _, value in pairs)
        if keys not in self._index:
            self._index[keys] = [_by_values(side, keys) for side in self.sides[1:]]
        base, upstream = (side.get(values) for side in self._index[keys])
        # Local changes while its elements are merged, and kpt looks at what it has become.
        mine = self.sides[0].items if self.sides[0] is not None else []
        local = next((item for item in mine if _texts(item.value, keys) == values), None)
        return local, base, upstream

    def drop(self, node: Seq, keys: Values, values: Values) -> None:
        """Remove from local what has these keys."""
        node.items = self._set(node.items, None, keys, values)

    def add(
        self, value: Node, parts: tuple[Item | None, Item | None, Item | None], keys: Values, values: Values
    ) -> None:
        """Keep a merged element for the result."""
        local, _base, upstream = parts
        if local is not None:
            local.value = value
            item = local
        else:
            item = Item(value)
            if upstream is not None and isinstance(value, Scalar):
                item.comment = upstream.comment
        self.added = self._set(self.added, item, keys, values)

    def put(self, node: Seq) -> None:
        """Write the kept elements back: in place where their keys match one, at the end otherwise."""
        items = node.items
        for item in self.added:
            if self.last == ("",):
                items = self._set(items, item, ("",), (_text(item.value),))
                continue
            values = []
            for key in self.last:
                entry = item.value.get(key) if isinstance(item.value, Map) else None
                if entry is None:
                    items = [*items, item]
                else:
                    values.append(_text(entry.value))
            found = tuple(values)
            if len(self.last) > 1:
                items = self._set(items, None, self.last, found)
            items = self._set(items, item, self.last, found)
        node.items = items

    @staticmethod
    def _set(items: list[Item], element: Item | None, keys: Values, values: Values) -> list[Item]:
        """Replace, append or (without element) remove the elements with these keys."""
        out: list[Item] = []
        placed = False
        for item in items:
            node = item.value
            if node.null or (isinstance(node, Map) and not node.entries):
                continue
            if not isinstance(node, Map) and keys[0]:
                out.append(item)
                continue
            if not _has(node, keys, values):
                if values:
                    out.append(item)
                continue
            placed = True
            if element is not None:
                out.append(element)
        if element is not None and not placed:
            out.append(element)
        return out
