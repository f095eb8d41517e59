"""The Kptfile: where a package came from, what it is locked to, and its text kept as it was.

Upstream and lock exist for git (kpt's own fields) and for oci. kpt decodes Kptfiles strictly and refuses
fields it does not know, so the oci facts have two forms: the fields `upstream.oci` and `upstreamLock.oci`,
or annotations under unlade.dev with the same content (--kpt-compat, P11), which leave the file readable for
kpt. Both are always read. Where a package was last pulled from or pushed to (origin) is an annotation in
either form and never travels with the package. Editing changes only the entries concerned.
"""

import re
from dataclasses import dataclass
from typing import Literal

from unlade.errors import InvalidInput
from unlade.model import Digest, Reference
from unlade.packages.compare import plain
from unlade.packages.identity import field_text
from unlade.packages.yamltext import (
    Document,
    Entry,
    Item,
    Map,
    Node,
    Scalar,
    Seq,
    parse_documents,
    render_scalar,
)

Strategy = Literal["resource-merge", "fast-forward", "force-delete-replace", "copy-merge"]
STRATEGIES: tuple[Strategy, ...] = ("resource-merge", "fast-forward", "force-delete-replace", "copy-merge")
API_VERSION = "kpt.dev/v1"

_PREFIX = "unlade.dev/"
_IMAGE = _PREFIX + "upstream-image"
_DIRECTORY = _PREFIX + "upstream-directory"
_STRATEGY = _PREFIX + "update-strategy"
_LOCK_IMAGE = _PREFIX + "upstream-lock-image"
_LOCK_DIRECTORY = _PREFIX + "upstream-lock-directory"
_ORIGIN = _PREFIX + "origin"
OWN_ANNOTATIONS = frozenset({_IMAGE, _DIRECTORY, _STRATEGY, _LOCK_IMAGE, _LOCK_DIRECTORY, _ORIGIN})
# The order in which kpt writes top-level fields; new ones are put where kpt would.
_ORDER = (
    "apiVersion",
    "kind",
    "metadata",
    "upstream",
    "upstreamLock",
    "info",
    "pipeline",
    "inventory",
    "status",
)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class BadKptfile(InvalidInput):
    """The Kptfile cannot be read, or says what cannot be true."""

    code = "bad-kptfile"


@dataclass(frozen=True, slots=True)
class GitUpstream:
    """A directory of a git repository at a ref; commit is set in a lock."""

    repo: str
    directory: str
    ref: str
    commit: str = ""

    kind = "git"

    def __str__(self) -> str:
        return f"{self.repo}{self.directory if self.directory != '/' else ''}@{self.ref}"


@dataclass(frozen=True, slots=True)
class OciUpstream:
    """An image reference and a directory inside it ("/" for the whole); a lock has a digest."""

    image: str
    directory: str = "/"

    kind = "oci"

    @property
    def reference(self) -> Reference:
        """The image as a reference."""
        return Reference.parse(self.image)

    def __str__(self) -> str:
        if self.directory == "/":
            return f"oci://{self.image}"
        ref = self.reference
        tail = str(ref)[len(ref.name) :]
        return f"oci://{ref.name}/{self.directory}{tail}"


Upstream = GitUpstream | OciUpstream


def _clean_directory(value: str) -> str:
    """A directory inside an upstream, as "/sub/dir"; what leaves the upstream is refused."""
    parts = [part for part in value.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in value:
        raise BadKptfile(f"the upstream directory {value!r} leaves its package")
    return "/" + "/".join(parts)


class Kptfile:
    """One Kptfile: typed reading, editing that keeps the rest of the text."""

    def __init__(self, text: str, *, name: str = "Kptfile") -> None:
        documents = [doc for doc in parse_documents(text, name=name) if doc.root is not None]
        if len(documents) != 1 or not isinstance(documents[0].root, Map):
            raise BadKptfile(f"{name}: expected one mapping", next_step="see `unlade pkg init`")
        self.document: Document = documents[0]
        self.root: Map = documents[0].root
        self.label = name
        if self.root.flow is not None:
            raise BadKptfile(f"{name}: written in flow style", next_step="write it in block style")
        kind, version = field_text(self.root, "kind"), field_text(self.root, "apiVersion")
        if kind != "Kptfile" or not version.startswith("kpt.dev/"):
            raise BadKptfile(f"{name}: apiVersion {version!r} and kind {kind!r} are not a Kptfile's")

    @classmethod
    def fresh(cls, name: str) -> "Kptfile":
        """A minimal Kptfile."""
        raw = render_scalar(name, "", text=True, parent_indent=0)
        return cls(f"apiVersion: {API_VERSION}\nkind: Kptfile\nmetadata:\n  name: {raw}\n")

    def render(self) -> str:
        """The text, edits included."""
        return self.document.render()

    # -- reading ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """metadata.name."""
        return field_text(self.root, "metadata", "name")

    def annotation(self, key: str) -> str:
        """One annotation, or an empty text."""
        return field_text(self.root, "metadata", "annotations", key)

    def _section(self, key: str) -> dict[str, object] | None:
        entry = self.root.get(key)
        if entry is None or entry.value.null:
            return None
        value = plain(entry.value)
        if not isinstance(value, dict):
            raise BadKptfile(f"{self.label}: {key} is not a mapping")
        return value

    def _read(self, key: str, image_note: str, directory_note: str, *, lock: bool) -> Upstream | None:
        section = self._section(key)
        if section is None:
            image = self.annotation(image_note)
            if not image:
                return None
            return self._oci(image, self.annotation(directory_note) or "/", lock=lock)
        kind = section.get("type")
        body = section.get(str(kind)) if kind in ("git", "oci") else None
        if not isinstance(body, dict):
            raise BadKptfile(
                f"{self.label}: {key}.type {kind!r} needs a section of that name",
                next_step="type is git or oci",
            )
        fields = {str(name): str(value or "") for name, value in body.items()}
        if kind == "oci":
            if not fields.get("image"):
                raise BadKptfile(f"{self.label}: {key}.oci.image is missing")
            return self._oci(fields["image"], fields.get("directory") or "/", lock=lock)
        return self._git(key, fields, lock=lock)

    def _git(self, key: str, fields: dict[str, str], *, lock: bool) -> GitUpstream:
        repo, ref, commit = fields.get("repo", ""), fields.get("ref", ""), fields.get("commit", "")
        if not repo or not ref:
            raise BadKptfile(f"{self.label}: {key}.git needs repo and ref")
        # A value that starts with a dash would be an option to the git command.
        if repo.startswith("-") or ref.startswith("-"):
            raise BadKptfile(f"{self.label}: {key}.git has a repo or ref that starts with a dash")
        if lock and not _COMMIT.fullmatch(commit):
            raise BadKptfile(f"{self.label}: {key}.git.commit {commit!r} is not a commit")
        return GitUpstream(repo, _clean_directory(fields.get("directory") or "/"), ref, commit)

    def _oci(self, image: str, directory: str, *, lock: bool) -> OciUpstream:
        text = image.removeprefix("oci://")
        try:
            reference = Reference.parse(text)
        except InvalidInput as error:
            raise BadKptfile(f"{self.label}: {error}") from error
        if lock and reference.digest is None:
            raise BadKptfile(
                f"{self.label}: the lock {image!r} has no digest", next_step="a lock is REPOSITORY@sha256:…"
            )
        return OciUpstream(text, _clean_directory(directory))

    @property
    def upstream(self) -> Upstream | None:
        """Where updates come from."""
        return self._read("upstream", _IMAGE, _DIRECTORY, lock=False)

    @property
    def lock(self) -> Upstream | None:
        """What the package is at: the base of the next merge."""
        return self._read("upstreamLock", _LOCK_IMAGE, _LOCK_DIRECTORY, lock=True)

    @property
    def strategy(self) -> Strategy | None:
        """The stored update strategy; BadKptfile for one that does not exist."""
        section = self._section("upstream")
        value = str(section.get("updateStrategy") or "") if section else self.annotation(_STRATEGY)
        for known in STRATEGIES:
            if value == known:
                return known
        if value:
            raise BadKptfile(
                f"{self.label}: unknown update strategy {value!r}",
                next_step=f"one of {', '.join(STRATEGIES)}",
            )
        return None

    @property
    def compatible(self) -> bool:
        """Whether the oci facts are in annotations."""
        return self.root.get("upstream") is None and bool(self.annotation(_IMAGE))

    @property
    def origin(self) -> str:
        """The image last pulled from or pushed to, or an empty text."""
        return self.annotation(_ORIGIN)

    # -- editing ------------------------------------------------------------------------------

    def set_name(self, name: str) -> None:
        """Set metadata.name, keeping its quoting."""
        metadata = self._mapping("metadata")
        _set_scalar(metadata, "name", name, first=True)

    def set_upstream(self, upstream: Upstream, strategy: Strategy, *, compat: bool = False) -> None:
        """Write upstream and strategy, in fields or (oci with compat) in annotations."""
        if isinstance(upstream, OciUpstream) and compat:
            self._drop("upstream")
            self._note(_IMAGE, upstream.image)
            self._note(_DIRECTORY, "" if upstream.directory == "/" else upstream.directory)
            self._note(_STRATEGY, strategy)
            return
        for key in (_IMAGE, _DIRECTORY, _STRATEGY):
            self._note(key, "")
        body = _body(upstream)
        body["updateStrategy"] = strategy
        self._put("upstream", body)

    def set_lock(self, lock: Upstream, *, compat: bool = False) -> None:
        """Write the lock, in the form that set_upstream uses."""
        if isinstance(lock, OciUpstream) and compat:
            self._drop("upstreamLock")
            self._note(_LOCK_IMAGE, lock.image)
            self._note(_LOCK_DIRECTORY, "" if lock.directory == "/" else lock.directory)
            return
        for key in (_LOCK_IMAGE, _LOCK_DIRECTORY):
            self._note(key, "")
        self._put("upstreamLock", _body(lock))

    def set_origin(self, image: str) -> None:
        """Remember an origin; an empty text forgets it."""
        self._note(_ORIGIN, image)

    def copy_section(self, key: str, other: "Kptfile") -> None:
        """Take a top-level section from another Kptfile as it is written there."""
        entry = other.root.get(key)
        if entry is not None:
            self._drop(key)
            self._insert(key, entry)

    def _mapping(self, key: str) -> Map:
        entry = self.root.get(key)
        if entry is None or not isinstance(entry.value, Map):
            self._drop(key)
            entry = Entry(Scalar(key, key), Map([], 2), gap="")
            self._insert(key, entry)
        value = entry.value
        assert isinstance(value, Map)  # made so above
        if value.flow is not None:
            value.flow, value.indent, entry.gap = None, 2, ""
        return value

    def _note(self, key: str, value: str) -> None:
        """Set an annotation, or remove it with an empty value; an emptied mapping goes too."""
        metadata = self._mapping("metadata")
        holder = metadata.get("annotations")
        if not value:
            if holder is not None and isinstance(holder.value, Map):
                found = holder.value.get(key)
                if found is not None:
                    holder.value.entries.remove(found)
                    if holder.value.flow is not None:
                        holder.value.flow = ""
                    if not holder.value.entries:
                        metadata.entries.remove(holder)
            return
        if holder is None or not isinstance(holder.value, Map):
            if holder is not None:
                metadata.entries.remove(holder)
            holder = Entry(Scalar("annotations", "annotations"), Map([], metadata.indent + 2), gap="")
            metadata.entries.append(holder)
        annotations = holder.value
        assert isinstance(annotations, Map)  # made so above
        if annotations.flow is not None:
            annotations.flow, annotations.indent, holder.gap = None, metadata.indent + 2, ""
        _set_scalar(annotations, key, value)

    def _drop(self, key: str) -> None:
        entry = self.root.get(key)
        if entry is not None:
            self.root.entries.remove(entry)

    def _put(self, key: str, body: dict[str, object]) -> None:
        old = self.root.get(key)
        node = build(body, 2)
        if old is not None:
            old.value, old.gap = node, ""
            return
        self._insert(key, Entry(Scalar(key, key), node, gap=""))

    def _insert(self, key: str, entry: Entry) -> None:
        """Put a top-level entry where kpt's order has it."""
        rank = _ORDER.index(key)
        position = len(self.root.entries)
        for number, other in enumerate(self.root.entries):
            if other.name in _ORDER and _ORDER.index(other.name) > rank:
                position = number
                break
        self.root.entries.insert(position, entry)


def _body(upstream: Upstream) -> dict[str, object]:
    if isinstance(upstream, GitUpstream):
        git: dict[str, object] = {"repo": upstream.repo, "directory": upstream.directory, "ref": upstream.ref}
        if upstream.commit:
            git["commit"] = upstream.commit
        return {"type": "git", "git": git}
    oci: dict[str, object] = {"image": upstream.image}
    if upstream.directory != "/":
        oci["directory"] = upstream.directory
    return {"type": "oci", "oci": oci}


def _set_scalar(node: Map, key: str, value: str, *, first: bool = False) -> None:
    entry = node.get(key)
    if entry is not None and isinstance(entry.value, Scalar):
        if entry.value.value != value or entry.value.null:
            style = entry.value.style if entry.value.style in ("'", '"') else ""
            raw = render_scalar(value, style, text=True, parent_indent=0)
            entry.value = Scalar(raw, value, style)
            entry.gap = entry.gap or " "
        return
    if entry is not None:
        node.entries.remove(entry)
    fresh = Entry(Scalar(key, key), Scalar(render_scalar(value, "", text=True, parent_indent=0), value))
    node.entries.insert(0 if first else len(node.entries), fresh)


def build(value: object, indent: int) -> Node:
    """A block tree from plain values; texts are quoted where they must be."""
    if isinstance(value, dict):
        entries = []
        for key, item in value.items():
            node = build(item, indent + 2)
            entries.append(
                Entry(Scalar(str(key), str(key)), node, gap=" " if isinstance(node, Scalar) else "")
            )
        return Map(entries, indent)
    if isinstance(value, list):
        return Seq([Item(build(item, indent + 2)) for item in value], indent)
    text = str(value)
    return Scalar(render_scalar(text, "", text=True, parent_indent=0), text)


def locked(reference: Reference, digest: Digest) -> str:
    """The lock text for an image: REPOSITORY@DIGEST, without a tag."""
    return f"{reference.name}@{digest}"
