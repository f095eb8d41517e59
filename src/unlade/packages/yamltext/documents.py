"""Files to documents: separators, and the way through ruamel.yaml for what the block reader does not take.

A document that the reader refuses is loaded and dumped once by ruamel.yaml, comments and quotes kept, and
read again; its original text is kept as the source, so it is written back unchanged unless it is edited.
"""

import re
from io import StringIO

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from unlade.packages.yamltext.flow import Unsupported, YamlSyntaxError
from unlade.packages.yamltext.nodes import Document, Item, Node, Scalar
from unlade.packages.yamltext.parse import BlockReader, key_at

# One file of a package; the API server takes objects of at most 1.5 MiB.
MAX_FILE = 16 * 1024 * 1024
# What is handed to the general loader, which is a hundred times slower.
MAX_NORMALISED = 256 * 1024

_SEPARATOR = re.compile(r"^---(?:[ \t].*)?\n|^---$", re.MULTILINE)


def _document(separator: str, text: str) -> Document:
    reader = BlockReader(text)
    start = reader.skip(0)
    if start >= reader.size:
        return Document(None, separator, text, "", separator + text)
    line = reader.lines[start]
    if line.startswith(("%", "...")) or any(
        other.startswith("...") and not other[3:].strip() for other in reader.lines
    ):
        raise Unsupported("directives and document end marks")
    content = line.lstrip(" ")
    root: Node
    lead = reader.text(0, start)
    if (content[0] == "-" and (len(content) == 1 or content[1] in " \t")) or (
        content[0] not in "[{&!|>*#" and key_at(content)
    ):
        root, end = reader.block(start, 0)
    else:
        holder = Item(Scalar("", ""))
        end = reader.value(holder, " " + content, start, -1, False)
        root = holder.value
        if holder.comment or holder.gap != " " or line != content:
            raise Unsupported("a root with a comment on its line")
    if reader.skip(end) < reader.size:
        raise Unsupported("content after the root")
    tail = reader.text(end, reader.size)
    return Document(root, separator, lead, tail, separator + text)


def _normalised(text: str) -> str:
    """The document rewritten by ruamel.yaml in block style without what this reader does not take."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 30
    out = StringIO()
    data = yaml.load(text)
    _block_style(data, set())
    yaml.dump(data, out)
    return out.getvalue()


def _block_style(data: object, seen: set[int]) -> None:
    """Block style throughout; aliased parts once, because aliases multiply what is walked."""
    if id(data) in seen:
        return
    seen.add(id(data))
    setter = getattr(data, "fa", None)
    if setter is not None:
        setter.set_block_style()
    if isinstance(data, dict):
        for value in data.values():
            _block_style(value, seen)
    elif isinstance(data, list):
        for value in data:
            _block_style(value, seen)


def parse_documents(text: str, *, name: str = "document") -> list[Document]:
    """Every document of a file, in order; YamlSyntaxError names the file and the place."""
    if len(text) > MAX_FILE:
        raise YamlSyntaxError(f"{name}: larger than {MAX_FILE >> 20} MiB", next_step="split the file")
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    if text.startswith("\ufeff"):
        text = text[1:]
    if not text.endswith("\n") and text:
        text += "\n"
    documents = []
    marks = list(_SEPARATOR.finditer(text))
    head = text[: marks[0].start()] if marks else text
    pieces = [("", head)] if head or not marks else []
    for number, mark in enumerate(marks):
        end = marks[number + 1].start() if number + 1 < len(marks) else len(text)
        after = mark.group(0)[3:].strip()
        if after and not after.startswith("#"):
            raise YamlSyntaxError(f"{name}: content on the line of a document separator: {after[:40]!r}")
        pieces.append((mark.group(0), text[mark.end() : end]))
    for separator, piece in pieces:
        try:
            documents.append(_document(separator, piece))
        except YamlSyntaxError as error:
            raise YamlSyntaxError(f"{name}: {error}") from error
        except Unsupported as reason:
            documents.append(_by_ruamel(separator, piece, name, str(reason)))
    return documents


def _by_ruamel(separator: str, piece: str, name: str, reason: str) -> Document:
    if len(piece) > MAX_NORMALISED:
        raise YamlSyntaxError(
            f"{name}: this YAML cannot be read ({reason})", next_step="write it in plain block style"
        )
    try:
        rewritten = _normalised(piece)
    except (YAMLError, RecursionError, ValueError, NotImplementedError, AssertionError) as error:
        raise YamlSyntaxError(f"{name}: not valid YAML: {_short(error)}") from error
    try:
        document = _document(separator, rewritten)
    except Unsupported as second:
        raise YamlSyntaxError(
            f"{name}: this YAML cannot be merged ({reason}; {second})",
            next_step="write it in plain block style",
        ) from second
    document.source = separator + piece
    return document


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
