"""Flow collections ({...}, [...]): the part of the reader that is not line by line.

The block reader finds the closing bracket's line with BracketScan and hands over the whole text. What
manifests do not contain inside brackets (comments, anchors, complex keys) is Unsupported, which sends the
whole document through ruamel.yaml once.
"""

from unlade.errors import InvalidInput
from unlade.packages.yamltext.nodes import Entry, Item, Map, Node, Scalar, Seq
from unlade.packages.yamltext.scalars import decode_double, is_null_text

# No manifest nests deeper; the readers recurse, so the cap also protects the stack.
MAX_DEPTH = 100


class YamlSyntaxError(InvalidInput):
    """The text is not YAML, or is YAML that packages may not contain."""

    code = "invalid-yaml"


class Unsupported(Exception):
    """Valid or not, this reader does not take it: ask ruamel.yaml."""


def too_deep() -> YamlSyntaxError:
    """The error for nesting beyond MAX_DEPTH; the general loader is not asked, it recurses as well."""
    return YamlSyntaxError(f"nested more than {MAX_DEPTH} deep")


def close_quote(text: str, start: int, quote: str) -> int:
    """Where a quoted scalar that was opened before start ends, or -1 when it goes on."""
    at = start
    while at < len(text):
        char = text[at]
        if char == "\\" and quote == '"':
            at += 2
            continue
        if char == quote:
            if quote == "'" and text[at + 1 : at + 2] == "'":
                at += 2
                continue
            return at
        at += 1
    return -1


class BracketScan:
    """Finds the line on which a flow collection closes, so that it is parsed once, however long it is."""

    def __init__(self) -> None:
        self.depth = 0
        self.quote = ""
        self.before = " "

    def closed(self, line: str) -> bool:
        """Take in one line; whether the outermost bracket is closed."""
        at = 0
        while at < len(line):
            char = line[at]
            if self.quote:
                end = close_quote(line, at, self.quote)
                if end < 0:
                    break
                self.quote = ""
                at = end
            elif char in "\"'" and self.before in " \t[{,:":
                self.quote = char
            elif char in "[{":
                self.depth += 1
                if self.depth > MAX_DEPTH:
                    raise too_deep()
            elif char in "]}":
                self.depth -= 1
                if self.depth == 0:
                    return True
            self.before = char
            at += 1
        self.before = " "
        return False


class Incomplete(Exception):
    """The flow collection goes on behind the text at hand."""


class FlowReader:
    """Reads a flow collection from a text that may span lines."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def blank(self, at: int) -> int:
        text = self.text
        while at < len(text) and text[at] in " \t\n":
            at += 1
        if at >= len(text):
            raise Incomplete
        if text[at] == "#" and text[at - 1] in " \t\n":
            raise Unsupported("a comment inside a flow collection")
        return at

    def node(self, at: int, depth: int) -> tuple[Node, int]:
        if depth > MAX_DEPTH:
            raise too_deep()
        text = self.text
        first = text[at]
        if first == "{":
            return self.mapping(at, depth)
        if first == "[":
            return self.sequence(at, depth)
        if first in "\"'":
            end = close_quote(text, at + 1, first)
            if end < 0:
                raise Incomplete
            raw = text[at : end + 1]
            if "\n" in raw:
                raise Unsupported("a quoted scalar over lines inside a flow collection")
            try:
                value = decode_double(raw[1:-1]) if first == '"' else raw[1:-1].replace("''", "'")
            except ValueError as error:
                raise Unsupported(str(error)) from error
            return Scalar(raw, value, first), end + 1
        if first in "&!*%@`|>#":
            raise Unsupported("tags, anchors and aliases inside a flow collection")
        end = at
        while end < len(text):
            char = text[end]
            if char in ",[]{}\n":
                break
            if char == ":" and (end + 1 >= len(text) or text[end + 1] in " \t\n,[]{}"):
                break
            if char == "#" and text[end - 1] in " \t":
                raise Unsupported("a comment inside a flow collection")
            end += 1
        if end >= len(text):
            raise Incomplete
        raw = text[at:end].rstrip(" \t")
        if text[end] == "\n":
            after = self.blank(end)
            if text[after] not in ",]}":
                raise Unsupported("a plain scalar over lines inside a flow collection")
        if raw in ("-", "?") or raw[:2] in ("- ", "? "):
            raise Unsupported("a block indicator inside a flow collection")
        return Scalar(raw, raw, "", is_null_text(raw)), end

    def mapping(self, at: int, depth: int) -> tuple[Map, int]:
        start = at
        text = self.text
        node = Map([], 0, "")
        seen: set[str] = set()
        at = self.blank(at + 1)
        while text[at] != "}":
            if text[at] in "[{,:?":
                raise Unsupported("a complex key")
            key, at = self.node(at, depth + 1)
            assert isinstance(key, Scalar)  # brackets were refused above
            if key.value in seen:
                raise YamlSyntaxError(f"the key {key.value!r} is given twice in one mapping")
            seen.add(key.value)
            at = self.blank(at)
            value: Node = Scalar("", "", "", True)
            if text[at] == ":":
                at = self.blank(at + 1)
                if text[at] not in ",}":
                    value, at = self.node(at, depth + 1)
                    at = self.blank(at)
            node.entries.append(Entry(key, value))
            if text[at] == ",":
                at = self.blank(at + 1)
            elif text[at] != "}":
                raise Unsupported("a comma is missing")
        node.flow = text[start : at + 1]
        return node, at + 1

    def sequence(self, at: int, depth: int) -> tuple[Seq, int]:
        start = at
        text = self.text
        node = Seq([], 0, "")
        at = self.blank(at + 1)
        while text[at] != "]":
            if text[at] in ",:?":
                raise Unsupported("an empty element")
            value, at = self.node(at, depth + 1)
            at = self.blank(at)
            if text[at] == ":":
                raise Unsupported("a single pair inside a flow sequence")
            node.items.append(Item(value))
            if text[at] == ",":
                at = self.blank(at + 1)
            elif text[at] != "]":
                raise Unsupported("a comma is missing")
        node.flow = text[start : at + 1]
        return node, at + 1
