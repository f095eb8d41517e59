"""Source text to the lossless tree.

A recursive reader of block YAML, line by line: the subset is what manifests use (block and flow collections,
every scalar style, anchors, aliases, tags, comments, several documents). Anything else is handed to
ruamel.yaml, which either normalises it to that subset or says what is wrong with it. The reader never
guesses: an input it accepts renders back to the same bytes and has the values ruamel.yaml sees, which the
property tests check. Depth and size are capped because packages come from registries.
"""

import re
from typing import NoReturn

from unlade.packages.yamltext.flow import (
    MAX_DEPTH,
    BracketScan,
    FlowReader,
    Incomplete,
    Unsupported,
    YamlSyntaxError,
    close_quote,
    too_deep,
)
from unlade.packages.yamltext.nodes import Alias, Entry, Item, Map, Node, Scalar, Seq
from unlade.packages.yamltext.scalars import decode_double, decode_with_ruamel, is_null_text

_QUOTED_KEY = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*')( *):(?= |$)""")
# What no plain key may start with: indicators, and what would make it something else.
_NO_KEY = frozenset(" \t#&*!|>'\"%@`[]{},?:-")
# The keys that nearly every line has; the general way takes the rest.
_SIMPLE_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_./-]*):(?= |$)")
_COMMENT = re.compile(r"(?:[ \t]+#.*|[ \t]*)$")
_PROP = re.compile(r"(&[^\s,\[\]{}]+|!<[^>\s]*>|![^\s,\[\]{}]*)(?:[ \t]+|$)")
_ALIAS = re.compile(r"\*[^\s,\[\]{}]+")
_BLOCK_HEADER = re.compile(r"([|>])([-+]?[1-9]?[-+]?)([ \t]+#.*|[ \t]*)$")


def key_at(content: str) -> tuple[str, int] | None:
    """The key that a line starts with, and where its value begins; a colon in a comment makes no key.

    Plain searches, not patterns: what a pattern tries at every blank of a long line is quadratic.
    """
    match = _SIMPLE_KEY.match(content)
    if match is not None:
        return match.group(1), match.end()
    if not content or content[0] in _NO_KEY:
        match = _QUOTED_KEY.match(content)
        return (match.group(1) + match.group(2), match.end()) if match is not None else None
    colon = content.find(": ")
    if colon < 0:
        if not content.endswith(":"):
            return None
        colon = len(content) - 1
    name = content[:colon]
    if " #" in name or "\t#" in name:
        return None
    return name, colon + 1


def _plain_end(text: str) -> int:
    """Where a plain scalar at the start of the text ends: before a comment, without trailing blanks."""
    at = text.find("#")
    while at >= 0:
        if at > 0 and text[at - 1] in " \t":
            return len(text[:at].rstrip(" \t"))
        at = text.find("#", at + 1)
    return len(text.rstrip(" \t"))


class BlockReader:
    """Reads one document's lines; every method takes a line number and returns the next one."""

    __slots__ = ("depth", "lines", "size")

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        if self.lines[-1] == "":
            self.lines.pop()
        self.size = len(self.lines)
        self.depth = 0

    def fail(self, reason: str) -> NoReturn:
        raise Unsupported(reason)

    def skip(self, at: int) -> int:
        """The next line with content, from this one on."""
        lines, size = self.lines, self.size
        while at < size:
            content = lines[at].lstrip(" ")
            if content and content[0] != "#" and not content.isspace():
                return at
            at += 1
        return at

    def block(self, at: int, least: int) -> tuple[Node, int]:
        """A node that starts on its own line at or beyond this column."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise too_deep()
        line = self.lines[at]
        content = line.lstrip(" ")
        indent = len(line) - len(content)
        if indent < least or content[0] == "\t":
            self.fail("bad indentation")
        node: Node
        if content[0] == "-" and (len(content) == 1 or content[1] in " \t"):
            node, at = self.sequence(at, indent)
        elif key_at(content):
            node, at = self.mapping(at, indent)
        else:
            self.fail("a scalar on its own line")
        self.depth -= 1
        return node, at

    def claim(self, start: int, after: int, indent: int) -> int:
        """How many of the comment lines before line `after` belong to the block that ends here."""
        if after >= self.size:
            following = -1
            if indent == 0:
                return start
        else:
            line = self.lines[after]
            following = len(line) - len(line.lstrip(" "))
        last = start
        for number in range(start, after):
            content = self.lines[number].lstrip(" ")
            if content.startswith("#"):
                column = len(self.lines[number]) - len(content)
                if column >= indent and column > following:
                    last = number + 1
                else:
                    break
        return last

    def text(self, start: int, end: int) -> str:
        return "".join([line + "\n" for line in self.lines[start:end]]) if end > start else ""

    def mapping(self, at: int, indent: int, first: str | None = None) -> tuple[Map, int]:
        """A block mapping; first is the text of its first line when that follows a dash."""
        node = Map([], indent)
        entries = node.entries
        seen: set[str] = set()
        lines, size = self.lines, self.size
        lead = ""
        while True:
            if first is not None:
                content, first = first, None
            else:
                line = lines[at]
                content = line.lstrip(" ")
            found = key_at(content)
            if found is None:
                self.fail("not a key")
            key = self.key(found[0])
            if key.value in seen:
                raise YamlSyntaxError(f"line {at + 1}: the key {key.value!r} is given twice in one mapping")
            seen.add(key.value)
            entry = Entry(key, key, lead)
            at = self.value(entry, content[found[1] :], at, indent, True)
            entries.append(entry)
            nxt = at
            if nxt < size:
                content = lines[nxt].lstrip(" ")
                if not content or content[0] == "#" or content.isspace():
                    nxt = self.skip(at)
            if nxt >= size:
                end = self.claim(at, nxt, indent)
                entry.foot = self.text(at, end)
                return node, end
            column = len(lines[nxt]) - len(lines[nxt].lstrip(" "))
            if column == indent:
                content = lines[nxt][indent:]
                if content[0] == "-" and (len(content) == 1 or content[1] in " \t"):
                    end = self.claim(at, nxt, indent)
                    entry.foot = self.text(at, end)
                    return node, end
                lead = self.text(at, nxt)
                at = nxt
                continue
            if column > indent:
                self.fail("bad indentation of a mapping")
            end = self.claim(at, nxt, indent)
            entry.foot = self.text(at, end)
            return node, end

    def sequence(self, at: int, indent: int, first: str | None = None) -> tuple[Seq, int]:
        """A block sequence; first as for mapping."""
        node = Seq([], indent)
        lines, size = self.lines, self.size
        lead = ""
        while True:
            if first is not None:
                content, first = first, None
            else:
                content = lines[at].lstrip(" ")
            item = Item(Scalar("", "", "", True), lead)
            rest = content[1:]
            stripped = rest.lstrip(" ")
            gap = len(rest) - len(stripped)
            if stripped and stripped[0] == "\t":
                self.fail("a tab after a dash")
            inner = indent + 1 + gap
            if stripped and stripped[0] == "-" and (len(stripped) == 1 or stripped[1] in " \t"):
                item.gap = " " * gap
                self.deeper()
                item.value, at = self.sequence(at, inner, stripped)
                self.depth -= 1
            elif stripped and stripped[0] not in "#[{|>&!*" and key_at(stripped):
                item.gap = " " * gap
                self.deeper()
                item.value, at = self.mapping(at, inner, stripped)
                self.depth -= 1
            else:
                at = self.value(item, rest, at, indent, False)
            node.items.append(item)
            nxt = self.skip(at)
            if nxt < size:
                line = lines[nxt]
                content = line.lstrip(" ")
                column = len(line) - len(content)
                if column == indent and content[0] == "-" and (len(content) == 1 or content[1] in " \t"):
                    lead = self.text(at, nxt)
                    at = nxt
                    continue
                if column > indent:
                    self.fail("bad indentation of a sequence")
            end = self.claim(at, nxt, indent)
            item.foot = self.text(at, end)
            return node, end

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise too_deep()

    def key(self, raw: str) -> Scalar:
        """A key as written, blanks before its colon included."""
        text = raw.rstrip(" ")
        if raw[0] == '"':
            return Scalar(raw, self.double(text[1:-1]), '"')
        if raw[0] == "'":
            return Scalar(raw, text[1:-1].replace("''", "'"), "'")
        return Scalar(raw, text, "")

    def double(self, body: str) -> str:
        try:
            return decode_double(body)
        except ValueError as error:
            raise Unsupported(str(error)) from error

    def value(self, part: Entry | Item, rest: str, at: int, indent: int, in_map: bool) -> int:
        """Read what follows `key:` or `-` into the part; returns the next line."""
        stripped = rest.lstrip(" ")
        gap = rest[: len(rest) - len(stripped)]
        if stripped and stripped[0] == "\t":
            self.fail("a tab before a value")
        props = ""
        while stripped and stripped[0] in "&!":
            match = _PROP.match(stripped)
            if match is None:
                self.fail("bad tag or anchor")
            props = (props + " " + match.group(1)) if props else match.group(1)
            if match.group(1) in ("!!binary", "!!set", "!!omap"):
                self.fail("a tag with a meaning of its own")
            stripped = stripped[match.end() :]
        if props and gap != " ":
            self.fail("wide gap before a tag or anchor")
        if not stripped or stripped[0] == "#":
            return self.nested(
                part,
                (rest if not props else "") if not stripped else self.remark(rest),
                props,
                at,
                indent,
                in_map,
            )
        first = stripped[0]
        if props:
            gap = " "
        part.gap = gap
        if first in "\"'":
            return self.quoted(part, stripped, props, at, indent)
        if first in "[{":
            return self.flow(part, stripped, props, at, indent)
        if first in "|>":
            return self.block_scalar(part, stripped, props, at, indent)
        if first == "*":
            match = _ALIAS.match(stripped)
            if match is None or props:
                self.fail("bad alias")
            part.value = Alias(match.group(0))
            part.comment = self.trailing(stripped[match.end() :])
            return at + 1
        if first in "%@`,]}?:-" and not (first in "?:-" and len(stripped) > 1 and stripped[1] not in " \t"):
            self.fail("a plain scalar cannot start so")
        end = _plain_end(stripped)
        raw = stripped[:end]
        if ": " in raw or raw[-1] == ":" or ":\t" in raw:
            self.fail("a mapping inside a plain scalar")
        comment = stripped[end:]
        at += 1
        if at < self.size:
            line = self.lines[at]
            content = line.lstrip(" ")
            if not content or len(line) - len(content) > indent:
                at, raw, comment = self.continued(at, raw, comment, indent)
        part.comment = comment
        value = raw
        if "\n" in raw:
            value = self.fold(raw)
        tagged = "!!str" in props
        part.value = Scalar(raw, value, "", is_null_text(value) and not tagged, props)
        return at

    def continued(self, at: int, raw: str, comment: str, indent: int) -> tuple[int, str, str]:
        """The further lines of a plain scalar, if the lines below are such."""
        if "#" in comment:
            nxt = self.skip(at)
            if nxt < self.size and len(self.lines[nxt]) - len(self.lines[nxt].lstrip(" ")) > indent:
                self.fail("text after a comment inside a scalar")
            return at, raw, comment
        while True:
            nxt = at
            while nxt < self.size and not self.lines[nxt].strip():
                nxt += 1
            if nxt >= self.size:
                return at, raw, comment
            line = self.lines[nxt]
            content = line.lstrip(" ")
            if content[0] == "#" or len(line) - len(content) <= indent:
                if content[0] == "#":
                    after = self.skip(nxt)
                    if (
                        after < self.size
                        and len(self.lines[after]) - len(self.lines[after].lstrip(" ")) > indent
                    ):
                        self.fail("text after a comment inside a scalar")
                return at, raw, comment
            end = _plain_end(line)
            if ": " in content[:end] or content.rstrip().endswith(":"):
                self.fail("a mapping inside a plain scalar")
            raw = raw + comment + "\n" + "".join([blank + "\n" for blank in self.lines[at:nxt]]) + line[:end]
            comment = line[end:]
            at = nxt + 1
            if "#" in comment:
                return at, raw, comment

    def fold(self, raw: str) -> str:
        try:
            return decode_with_ruamel(raw)
        except ValueError as error:
            raise Unsupported(str(error)) from error

    def remark(self, rest: str) -> str:
        """A comment that follows `key:` directly; the spaces before it belong to it."""
        start = rest.index("#")
        before = rest[:start]
        spaces = before[len(before.rstrip(" \t")) :]
        if not spaces:
            self.fail("a comment without a space before it")
        return spaces + rest[start:]

    def trailing(self, rest: str) -> str:
        if not _COMMENT.match(rest):
            self.fail("text after a value")
        return rest

    def nested(self, part: Entry | Item, comment: str, props: str, at: int, indent: int, in_map: bool) -> int:
        """Nothing after the indicator: a block on the following lines, or null."""
        part.comment = comment
        part.gap = ""
        nxt = self.skip(at + 1)
        if nxt < self.size:
            line = self.lines[nxt]
            content = line.lstrip(" ")
            column = len(line) - len(content)
            dash = content[0] == "-" and (len(content) == 1 or content[1] in " \t")
            if column > indent or (in_map and column == indent and dash):
                lead = self.text(at + 1, nxt)
                node, end = self.block(nxt, column)
                if isinstance(node, Map):
                    node.entries[0].lead = lead
                elif isinstance(node, Seq):
                    node.items[0].lead = lead
                if isinstance(node, Map | Seq):
                    node.props = props
                part.value = node
                return end
        part.value = Scalar("", "", "", "!!str" not in props, props)
        return at + 1

    def quoted(self, part: Entry | Item, text: str, props: str, at: int, indent: int) -> int:
        quote = text[0]
        end = close_quote(text, 1, quote)
        number = at
        while end < 0:
            number += 1
            if number >= self.size:
                self.fail("an unclosed quote")
            line = self.lines[number]
            if line.strip() and len(line) - len(line.lstrip(" ")) <= indent:
                self.fail("a quoted scalar's line is not indented")
            start = len(text) + 1
            text = text + "\n" + line
            end = close_quote(text, start, quote)
        raw = text[: end + 1]
        if "\n" in raw:
            value = self.fold(raw)
        elif quote == '"':
            value = self.double(raw[1:-1])
        else:
            value = raw[1:-1].replace("''", "'")
        part.value = Scalar(raw, value, quote, False, props)
        part.comment = self.trailing(text[end + 1 :])
        return number + 1

    def block_scalar(self, part: Entry | Item, text: str, props: str, at: int, indent: int) -> int:
        match = _BLOCK_HEADER.match(text)
        if match is None:
            self.fail("bad block scalar header")
        hint = re.sub(r"[-+]", "", match.group(2))
        chomp = re.sub(r"[0-9]", "", match.group(2))
        number = at + 1
        own = indent + int(hint) if hint else None
        lines: list[str] = []
        while number < self.size:
            line = self.lines[number]
            content = line.lstrip(" ")
            column = len(line) - len(content)
            if content:
                if own is None:
                    if column <= indent:
                        break
                    own = column
                    if any(len(blank) > own for blank in lines):
                        self.fail("a block scalar starts with a longer blank line")
                if column < own:
                    break
            lines.append(line)
            number += 1
        if own is not None and number < self.size:
            content = self.lines[number].lstrip(" ")
            if indent < len(self.lines[number]) - len(content) and not content.startswith("#"):
                self.fail("bad indentation inside a block scalar")
        kept = len(lines)
        while kept and not lines[kept - 1].strip(" "):
            kept -= 1
        if own is not None and any(len(line) > own for line in lines[kept:]):
            self.fail("blank lines with content at the end of a block scalar")
        if chomp != "+":
            # Trailing blank lines are not content: leave them to whoever comes next.
            number -= len(lines) - kept
            del lines[kept:]
        raw = text + "\n" + "".join([line + "\n" for line in lines])
        style = match.group(1)
        if style == ">":
            # The reference scanner folds; it needs the scalar below a key to know its column.
            value = self.fold_below(raw, indent)
        else:
            cut = own or 0
            body = "\n".join([line[cut:] for line in lines])
            value = body + ("" if chomp == "-" or not lines else "\n")
            if chomp == "" and not body.strip("\n") and not body:
                value = ""
        part.value = Scalar(raw, value, style, False, props)
        return number

    def fold_below(self, raw: str, indent: int) -> str:
        """A folded scalar's value: its lines are moved below a parent at column 0, then folded."""
        try:
            if indent < 0:
                return decode_with_ruamel(raw)
            return decode_with_ruamel(_reparent(raw, indent))
        except ValueError as error:
            raise Unsupported(str(error)) from error

    def flow(self, part: Entry | Item, text: str, props: str, at: int, indent: int) -> int:
        number = at
        scan = BracketScan()
        pieces = [text]
        while not scan.closed(pieces[-1]):
            number += 1
            if number >= self.size:
                self.fail("an unclosed bracket")
            line = self.lines[number]
            content = line.strip()
            if content and len(line) - len(line.lstrip(" ")) <= indent and content[0] not in "]}":
                self.fail("a flow line is not indented")
            pieces.append(line)
        text = "\n".join(pieces)
        try:
            node, end = FlowReader(text).node(0, 0)
        except Incomplete:
            self.fail("an unclosed bracket")
        assert isinstance(node, Map | Seq)  # the caller saw a bracket
        node.props = props
        part.value = node
        part.comment = self.trailing(text[end:])
        return number + 1


def _reparent(raw: str, indent: int) -> str:
    """The same block scalar with its parent at column 0: lines lose the parent's column."""
    head, *lines = raw.split("\n")
    return "\n".join(
        [head.split(" #")[0], *[line[indent:] if line[:indent].strip() == "" else line for line in lines]]
    )
