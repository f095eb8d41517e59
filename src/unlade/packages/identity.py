"""Who a resource is across versions of a package, and the marks that say so.

A resource's identity is its group, kind, namespace and name as upstream knew them, and its file; the
version is not part of it. Upstream's namespace and name ride in a comment on the metadata line
(`metadata: # kpt-merge: NS/NAME`), so a local rename does not cut the resource off from updates, and in
the annotation internal.kpt.dev/upstream-identifier, which newer tools read. `mark` adds both to a document
as kpt does on get and update; it is called on all three sides of a merge so that they compare equal.
"""

import re
from dataclasses import dataclass

from unlade.errors import InvalidInput
from unlade.packages.yamltext import Document, Entry, Map, Node, Scalar, render_scalar

UPSTREAM_IDENTIFIER = "internal.kpt.dev/upstream-identifier"
_MERGE_MARK = "kpt-merge:"
# Resources of Google's config connector are counted by this annotation; the value is kpt's own.
_CNRM_KEY = "cnrm.cloud.google.com/blueprint"
_CNRM_GROUP = re.compile(r"(?:^|\.)cnrm\.")


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes two documents the same resource."""

    group: str
    kind: str
    namespace: str
    name: str
    path: str

    def __str__(self) -> str:
        kind = f"{self.kind}.{self.group}" if self.group else self.kind or "document"
        name = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.path}: {kind} {name}".rstrip()


class BadMergeComment(InvalidInput):
    """A kpt-merge comment that does not say NAMESPACE/NAME; kpt itself crashes on it."""

    code = "bad-merge-comment"


def field_text(node: Node | None, *path: str) -> str:
    """The scalar at a path of keys, or an empty text."""
    for name in path:
        if not isinstance(node, Map):
            return ""
        entry = node.get(name)
        if entry is None:
            return ""
        node = entry.value
    return node.value if isinstance(node, Scalar) and not node.null else ""


def merge_mark(root: Map) -> tuple[str, str] | None:
    """Namespace and name from the kpt-merge comment, or None without one."""
    metadata = root.get("metadata")
    if metadata is None or _MERGE_MARK not in metadata.comment:
        return None
    comment = metadata.comment.strip().lstrip("#").strip()
    if not comment.startswith(_MERGE_MARK):
        raise BadMergeComment(
            f"the comment {metadata.comment.strip()!r} on metadata does not start with {_MERGE_MARK}",
            next_step="write it as '# kpt-merge: NAMESPACE/NAME'",
        )
    namespace, slash, name = comment[len(_MERGE_MARK) :].strip().partition("/")
    if not slash:
        raise BadMergeComment(
            f"the comment {metadata.comment.strip()!r} on metadata has no NAMESPACE/NAME",
            next_step="write it as '# kpt-merge: NAMESPACE/NAME', with nothing before the slash for none",
        )
    return namespace, name


def identify(root: Node, path: str) -> Identity:
    """The identity of a document's root, by its kpt-merge comment first."""
    if not isinstance(root, Map):
        return Identity("", "", "", "", path)
    group, slash, _version = field_text(root, "apiVersion").partition("/")
    marked = merge_mark(root)
    namespace, name = marked or (
        field_text(root, "metadata", "namespace"),
        field_text(root, "metadata", "name"),
    )
    return Identity(group if slash else "", field_text(root, "kind"), namespace, name, path)


def _labels(metadata: Map) -> bool:
    labels = metadata.get("labels")
    return labels is not None and isinstance(labels.value, Map) and bool(labels.value.entries)


def mark(document: Document, *, attribute: bool = False) -> bool:
    """Add the kpt-merge comment and the annotation where a named resource lacks them; True when changed.

    attribute: also the config connector's blueprint annotation, which `get` sets and `update` does not.
    """
    root = document.root
    if not isinstance(root, Map):
        return False
    metadata = root.get("metadata")
    if metadata is None or not isinstance(metadata.value, Map):
        return False
    fields = metadata.value
    name, namespace = field_text(fields, "name"), field_text(fields, "namespace")
    if not name and not namespace and not _labels(fields):
        return False
    changed = False
    if fields.flow is not None and _MERGE_MARK not in metadata.comment:
        # A comment behind a flow mapping belongs to the value, not the key: make room for it.
        _unfold(metadata, root.indent + 2)
        changed = True
    marked = merge_mark(root)
    if marked is None:
        if metadata.comment.strip():
            # The line is needed for the mark; kpt drops what stood there.
            metadata.lead += " " * root.indent + metadata.comment.strip() + "\n"
        metadata.comment = f" # {_MERGE_MARK} {namespace}/{name}"
        marked = (namespace, name)
        changed = True
    group, slash, _version = field_text(root, "apiVersion").partition("/")
    value = "|".join((group if slash else "", field_text(root, "kind"), marked[0] or "default", marked[1]))
    changed |= set_annotation(fields, UPSTREAM_IDENTIFIER, value)
    if attribute and slash and _CNRM_GROUP.search(group):
        changed |= set_annotation(fields, _CNRM_KEY, "kpt-pkg")
    return changed


def _unfold(entry: Entry, indent: int) -> None:
    """Turn a flow mapping into a block one below its key."""
    node = entry.value
    assert isinstance(node, Map)  # callers checked
    node.flow = None
    node.indent = indent
    entry.gap = ""


def set_annotation(metadata: Map, key: str, value: str) -> bool:
    """Set one annotation, keeping the others' text; True when something changed."""
    annotations = metadata.get("annotations")
    if annotations is None or not isinstance(annotations.value, Map):
        if annotations is not None:
            metadata.entries.remove(annotations)
        holder = Map([], metadata.indent + 2)
        annotations = Entry(Scalar("annotations", "annotations"), holder, gap="")
        metadata.entries.append(annotations)
    fields = annotations.value
    assert isinstance(fields, Map)  # made so above
    entry = fields.get(key)
    if entry is not None and isinstance(entry.value, Scalar):
        if entry.value.value == value:
            return False
        style = entry.value.style
        entry.value = Scalar(render_scalar(value, style, text=True, parent_indent=0), value, style)
    else:
        if fields.flow is not None:
            _unfold(annotations, metadata.indent + 2)
        raw = render_scalar(value, "'", text=True, parent_indent=0)
        fields.entries.append(Entry(Scalar(key, key), Scalar(raw, value, "'")))
    fields.flow = None
    metadata.flow = None
    return True
