"""The lossless reader: renders what it read byte for byte, and sees what ruamel.yaml sees."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from unlade.packages.compare import plain
from unlade.packages.yamltext import YamlSyntaxError, parse_documents
from unlade.packages.yamltext.scalars import can_be_plain, decode_with_ruamel, render_scalar

WORDS = st.sampled_from(
    ["a", "b-c", "x.y/z", "name", "k8s", "with space", "ümlaut", "null", "1", "yes", "a'b"]
)
COMMENTS = st.sampled_from(["", "", "", " # note", "  # two: words"])
KEYS = st.sampled_from(["a", "b", "c", "name", "x.y/z", "d-e", '"q k"', "'s'"])


@st.composite
def scalars(draw: st.DrawFn) -> str:
    value = draw(WORDS)
    style = draw(st.sampled_from(["", "'", '"']))
    return render_scalar(value, style, text=style != "", parent_indent=0)


@st.composite
def blocks(draw: st.DrawFn, indent: int, depth: int) -> str:
    """Lines of a block mapping or sequence at a column."""
    pad = " " * indent
    out = ""
    if draw(st.booleans()) or depth == 0:
        for key in draw(st.lists(KEYS, min_size=1, max_size=4, unique=True)):
            if draw(st.integers(0, 5)) == 0:
                out += draw(st.sampled_from(["", "\n"])) + pad + "# head\n"
            out += pad + key + ":" + draw(after(indent, depth))
    else:
        for _ in range(draw(st.integers(1, 3))):
            if draw(st.booleans()):
                out += pad + "-" + draw(after(indent, depth, dash=True))
            else:
                inner = draw(blocks(indent + 2, depth - 1))
                lines = inner.split("\n")
                if inner.startswith(pad + "  ") and not lines[0].lstrip().startswith("#"):
                    out += pad + "- " + inner[indent + 2 :]
                else:
                    out += pad + "-\n" + inner
    return out


@st.composite
def after(draw: st.DrawFn, indent: int, depth: int, dash: bool = False) -> str:
    """What follows `key:` or `-`."""
    kind = draw(st.integers(0, 6))
    remark = draw(COMMENTS)
    if kind <= 2 or depth == 0:
        return " " + draw(scalars()) + remark + "\n"
    if kind == 3:
        flow = draw(st.sampled_from(["{}", "[]", "[a, 'b']", "{k: v, l: [1, 2]}", '{"q": {}}']))
        return " " + flow + remark + "\n"
    if kind == 4:
        head = draw(st.sampled_from(["|", "|-", "|+", ">", ">-", ">+"]))
        body = draw(
            st.lists(
                st.sampled_from(["text", "  more", "", "# no comment", "- no: list"]), min_size=1, max_size=4
            )
        )
        lines = [(" " * (indent + 2) + line if line else "") + "\n" for line in ["first", *body]]
        return " " + head + "\n" + "".join(lines)
    if kind == 5:
        return remark + "\n"
    return remark + "\n" + draw(blocks(indent + (2 if dash else draw(st.sampled_from([2, 4]))), depth - 1))


def _key_text(key: object) -> str:
    return "null" if key is None else str(key)


def by_ruamel(text: str) -> list[object]:
    """Every document as ruamel.yaml composes it: scalars as their text, nulls as None."""
    yaml = YAML(typ="safe", pure=True)

    def build(node: Any) -> object:
        kind = type(node).__name__
        if kind == "MappingNode":
            # A null key is written out when a document is normalised.
            return {_key_text(build(key)): build(value) for key, value in node.value}
        if kind == "SequenceNode":
            return [build(item) for item in node.value]
        return None if str(node.tag) == "tag:yaml.org,2002:null" else node.value

    return [build(node) for node in yaml.compose_all(text) if node is not None]


@settings(max_examples=300, deadline=None)
@given(blocks(0, 3))
def test_reads_as_ruamel_and_renders_as_written(text: str) -> None:
    try:
        expected = by_ruamel(text)
    except YAMLError:
        return
    documents = parse_documents(text)
    assert "".join(document.render() for document in documents) == text
    assert [plain(document.root) for document in documents] == expected


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="ab: -#'\"\n[]{},&*!|>?%@", max_size=40))
def test_accepts_only_what_ruamel_accepts(text: str) -> None:
    """Any text: an error, or the values that ruamel.yaml sees."""
    text += "\n"
    try:
        documents = parse_documents(text)
    except YamlSyntaxError:
        return
    roots = [plain(document.root) for document in documents if document.root is not None]
    if "---" in text or "*" in text or "!" in text or len(roots) != 1:
        return
    assert roots == by_ruamel(text), documents


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=30), st.sampled_from(["", "'", '"', "|"]))
def test_a_written_scalar_reads_back(value: str, style: str) -> None:
    value = value.replace("\r", "").replace("\x85", "").replace("\u2028", "").replace("\u2029", "")
    if any(ord(char) < 32 and char not in "\n\t" for char in value) or any(
        0xD800 <= ord(c) < 0xE000 for c in value
    ):
        return
    raw = render_scalar(value, style, text=True, parent_indent=0)
    document = parse_documents("k: " + raw + ("" if raw.endswith("\n") else "\n"))[0]
    assert plain(document.root) == {"k": value}


@pytest.mark.parametrize("value", ["a", "a: b", "#x", "x #y", "", " a", "-", "- a", "?", "a:", "@x", "é"])
def test_plain_only_where_it_reads_back(value: str) -> None:
    if can_be_plain(value):
        assert decode_with_ruamel(value) == value
