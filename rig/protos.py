"""Compare our .proto files, field by field, with the official ones in Go's module cache.

We write the protocols down ourselves, with only the calls and fields we use; numbers, names and types are
facts and a wrong one corrupts silently. So each message, enum and call of ours must exist in the official
files under the same full name, and each field and value of ours must agree with the official one in number,
name, type and label. What we leave out is fine: unknown fields pass through.

The parser reads the part of the proto2/proto3 language that such files use; options and comments are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rig import engines

# Package prefix → the module with its official files, and the engines whose go.mod pin that module's version.
OFFICIAL: dict[str, tuple[str, ...]] = {
    "runtime.v1": ("k8s.io/cri-api", "kubernetes"),
    "pluginregistration": ("k8s.io/kubelet", "kubernetes"),
    # csi-sanity's is newer than the one inside Kubernetes, and it is what checks our driver; the kubelet
    # still reads a volume's condition, whose number the newer one has reserved: a fact of either is a fact.
    "csi.v1": ("github.com/container-storage-interface/spec", "csi-sanity", "kubernetes"),
    "containerd": ("github.com/containerd/containerd/api", "containerd"),
}

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)|(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
    r"""|(?P<word>\.?[A-Za-z_][\w.]*|-?\d[\w.]*)|(?P<sign>.)""",
    re.DOTALL,
)


class ProtoError(ValueError):
    """A .proto file that this parser cannot read."""


@dataclass
class Schema:
    """Facts of some .proto files, by full name."""

    # "pkg.Message" → {number: (name, type, label)}; a oneof's members carry the label "oneof <name>".
    messages: dict[str, dict[int, tuple[str, str, str]]] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    # "pkg.Service/Call" → (request, response), each with "stream " in front where it streams.
    calls: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, text: str) -> str:
        """Read one file into the schema; its package."""
        return _Reader(text, self).read()

    def resolve(self) -> None:
        """Turn type names as written into full names, by proto's scoping (innermost scope first)."""
        known = self.messages.keys() | self.enums.keys()
        for scope, fields in self.messages.items():
            for number, (name, kind, label) in fields.items():
                parts = [_full(part, scope, known) for part in kind.split(",")]
                fields[number] = (name, ",".join(parts), label)
        for call, (request, response) in self.calls.items():
            scope = call.partition("/")[0]
            self.calls[call] = (_streamed(request, scope, known), _streamed(response, scope, known))


def _streamed(kind: str, scope: str, known: Iterable[str]) -> str:
    stream, _, name = kind.rpartition(" ")
    return f"{stream} {_full(name, scope, known)}".strip()


def _full(name: str, scope: str, known: Iterable[str]) -> str:
    if name.startswith("."):
        return name[1:]
    parts = scope.split(".")
    while parts:
        candidate = ".".join([*parts, name])
        if candidate in known:
            return candidate
        parts.pop()
    return name  # a scalar, or a type of a file that was not read


class _Reader:
    """One pass over the tokens of one file."""

    def __init__(self, text: str, schema: Schema) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._schema = schema
        self._package = ""

    def read(self) -> str:
        while self._at < len(self._tokens):
            word = self._next()
            if word == "package":
                self._package = self._next()
                self._expect(";")
            elif word == "message":
                self._message(self._package)
            elif word == "enum":
                self._enum(self._package)
            elif word == "service":
                self._service()
            elif word == "extend":
                self._next()
                self._skip_block()
            elif word in ("syntax", "import", "option", "edition"):
                self._skip_statement()
            elif word != ";":
                raise ProtoError(f"unexpected {word!r} at the top level")
        return self._package

    def _message(self, scope: str) -> None:
        name = f"{scope}.{self._next()}".lstrip(".")
        fields = self._schema.messages.setdefault(name, {})
        self._expect("{")
        self._members(name, fields, "")

    def _members(self, scope: str, fields: dict[int, tuple[str, str, str]], oneof: str) -> None:
        while (word := self._next()) != "}":
            if word == "message":
                self._message(scope)
            elif word == "enum":
                self._enum(scope)
            elif word == "oneof":
                group = self._next()
                self._expect("{")
                self._members(scope, fields, f"oneof {group}")
            elif word in ("option", "reserved", "extensions"):
                self._skip_statement()
            elif word == "extend":
                self._next()
                self._skip_block()
            elif word != ";":
                self._field(word, fields, oneof)

    def _field(self, word: str, fields: dict[int, tuple[str, str, str]], oneof: str) -> None:
        label = oneof
        if word in ("repeated", "optional", "required"):
            label, word = word, self._next()
        if word == "map" and self._peek() == "<":
            self._expect("<")
            key = self._next()
            self._expect(",")
            word, label = f"{key},{self._next()}", "map"
            self._expect(">")
        name = self._next()
        self._expect("=")
        fields[int(self._next(), 0)] = (name, word, label)
        self._skip_statement()

    def _enum(self, scope: str) -> None:
        values = self._schema.enums.setdefault(f"{scope}.{self._next()}".lstrip("."), {})
        self._expect("{")
        while (word := self._next()) != "}":
            if word in ("option", "reserved"):
                self._skip_statement()
            elif word != ";":
                self._expect("=")
                values[word] = int(self._next(), 0)
                self._skip_statement()

    def _service(self) -> None:
        service = f"{self._package}.{self._next()}".lstrip(".")
        self._expect("{")
        while (word := self._next()) != "}":
            if word == "rpc":
                call = self._next()
                request = self._operand()
                self._expect("returns")
                self._schema.calls[f"{service}/{call}"] = (request, self._operand())
                if self._peek() == "{":
                    self._skip_block()
            elif word == "option":
                self._skip_statement()
            elif word != ";":
                raise ProtoError(f"unexpected {word!r} in service {service}")

    def _operand(self) -> str:
        self._expect("(")
        words = []
        while (word := self._next()) != ")":
            words.append(word)
        return " ".join(words)

    def _skip_statement(self) -> None:
        """To the semicolon that ends this statement, over any options in brackets or braces."""
        depth = 0
        while True:
            word = self._next()
            depth += (word in "{[(") - (word in "}])")
            if word == ";" and depth == 0:
                return

    def _skip_block(self) -> None:
        self._expect("{")
        depth = 1
        while depth:
            word = self._next()
            depth += (word == "{") - (word == "}")

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        if self._at >= len(self._tokens):
            raise ProtoError("the file ends in the middle of a declaration")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, wanted: str) -> None:
        if (found := self._next()) != wanted:
            raise ProtoError(f"expected {wanted!r}, found {found!r}")


def _tokens(text: str) -> Iterator[str]:
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "skip":
            yield match.group()


def read(paths: Iterable[Path]) -> tuple[Schema, set[str]]:
    """The schema of some files, resolved, and the packages in them."""
    schema, packages = Schema(), set()
    for path in paths:
        try:
            packages.add(schema.add(path.read_text()))
        except ProtoError as error:
            raise ProtoError(f"{path}: {error}") from error
    schema.resolve()
    return schema, packages


def differences(ours: Schema, official: Schema) -> list[str]:
    """Where our facts disagree with the official ones, one sentence each; empty when they do not."""
    found = []
    for message, fields in ours.messages.items():
        if message not in official.messages:
            found.append(f"message {message} does not exist officially")
            continue
        for number, fact in fields.items():
            theirs = official.messages[message].get(number)
            if theirs != fact:
                found.append(f"{message} field {number}: ours {_said(fact)}, officially {_said(theirs)}")
    for enum, values in ours.enums.items():
        for name, value in values.items():
            known = official.enums.get(enum, {}).get(name)
            if known != value:
                found.append(f"{enum}.{name}: ours {value}, officially {known}")
    for call, types in ours.calls.items():
        if official.calls.get(call) != types:
            found.append(f"call {call}: ours {types}, officially {official.calls.get(call)}")
    return found


def _said(fact: tuple[str, str, str] | None) -> str:
    return "nothing" if fact is None else " ".join(part for part in (fact[2], fact[1], fact[0]) if part)


def official_files(package: str) -> list[Path]:
    """The official files for a package of ours, at the versions the rig's engines are built with."""
    for prefix, (module, *pinned) in OFFICIAL.items():
        if package == prefix or package.startswith(f"{prefix}."):
            sources = [engines.module_source(module, engine) for engine in pinned]
            files = [path for source in sources for path in sorted(source.rglob("*.proto"))]
            # One package name has several versions side by side in some modules; the stable one counts.
            return [path for path in files if not re.search(r"/v\d+(alpha|beta)\d*/", str(path))]
    raise ProtoError(f"no official source is known for package {package!r}; add it to OFFICIAL in {__file__}")


def check(directory: Path) -> list[str]:
    """Every disagreement of the .proto files below a directory with the official ones."""
    ours, packages = read(sorted(directory.rglob("*.proto")))
    official, _ = read(sorted({path for package in packages for path in official_files(package)}))
    return differences(ours, official)
