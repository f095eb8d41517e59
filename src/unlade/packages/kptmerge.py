"""The Kptfile's own merge rules.

Labels, annotations, info, pipeline, inventory and status merge like a resource's fields; name, upstream and
lock never do. Pipeline functions are matched by name when every one has a name, by image (without its tag)
or command when none has and none repeats; otherwise the list is one value. Our own annotations (upstream
in compatible form, origin) belong to the local copy and are not merged either.
"""

from dataclasses import replace

from unlade.packages.decisions import Decision, OnConflict
from unlade.packages.identity import field_text
from unlade.packages.kptfile import OWN_ANNOTATIONS, Kptfile
from unlade.packages.merge import FieldMerge
from unlade.packages.yamltext import Entry, Map, Scalar, Seq, clone
from unlade.packages.yamltext.nodes import clone_entry

_LOCAL_ONLY = ("apiVersion", "kind", "upstream", "upstreamLock")
# The prefix of the names that stand in for images while functions are matched.
_STAND_IN = "_kpt-merge_"


def merge_kptfile(
    local: Kptfile, base: Kptfile | None, upstream: Kptfile, *, where: str, policy: OnConflict
) -> list[Decision]:
    """Merge upstream's Kptfile into local's, in place; what was decided."""
    mine = local.root
    sides = [
        _foreign(mine, other.root) if other is not None else _foreign(mine, Map([], 0))
        for other in (base, upstream)
    ]
    by_image = all(_matchable(side) for side in (mine, *sides))
    if by_image:
        for side in (mine, *sides):
            _name_functions(side)
    had = dict.fromkeys(_paths(mine), True)
    merge = FieldMerge(where, policy, infer=True)
    merge.root(mine, sides[0], sides[1])
    if by_image:
        _unname_functions(mine)
    _drop_empty(mine, had)
    return [
        replace(decision, path=decision.path.replace("[name=" + _STAND_IN, "[image="))
        for decision in merge.decisions
        if not (_STAND_IN in decision.path and decision.path.endswith("].name"))
    ]


def _foreign(mine: Map, other: Map) -> Map:
    """A copy of another side in which everything that is local's own equals local's."""
    copy = clone(other)
    assert isinstance(copy, Map)  # cloned from one
    copy.entries = [entry for entry in copy.entries if entry.name not in _LOCAL_ONLY]
    copy.entries += [clone_entry(entry) for entry in mine.entries if entry.name in _LOCAL_ONLY]
    metadata, own = copy.get("metadata"), mine.get("metadata")
    if own is not None and isinstance(own.value, Map):
        if metadata is None or not isinstance(metadata.value, Map):
            if metadata is not None:
                copy.entries.remove(metadata)
            metadata = Entry(Scalar("metadata", "metadata"), Map([], 2), gap="")
            copy.entries.append(metadata)
        fields = metadata.value
        assert isinstance(fields, Map)  # made so above
        merged = ("labels", "annotations")
        fields.entries = [entry for entry in fields.entries if entry.name in merged]
        fields.entries += [clone_entry(entry) for entry in own.value.entries if entry.name not in merged]
        _own_annotations(fields, own.value)
    _prune(copy)
    return copy


def _own_annotations(fields: Map, own: Map) -> None:
    theirs, ours = fields.get("annotations"), own.get("annotations")
    kept = []
    if ours is not None and isinstance(ours.value, Map):
        kept = [clone_entry(entry) for entry in ours.value.entries if entry.name in OWN_ANNOTATIONS]
    if theirs is not None and isinstance(theirs.value, Map):
        theirs.value.entries = [entry for entry in theirs.value.entries if entry.name not in OWN_ANNOTATIONS]
        theirs.value.entries += kept
    elif kept:
        fields.entries.append(Entry(Scalar("annotations", "annotations"), Map(kept, 4), gap=""))


def _prune(node: Map) -> None:
    """Drop nulls and empty mappings, which kpt's own reader does not see."""
    for entry in list(node.entries):
        if isinstance(entry.value, Map):
            _prune(entry.value)
            if entry.value.entries:
                continue
        elif not entry.value.null:
            continue
        node.entries.remove(entry)


def _functions(root: Map) -> list[Seq]:
    pipeline = root.get("pipeline")
    found = []
    if pipeline is not None and isinstance(pipeline.value, Map):
        for key in ("mutators", "validators"):
            entry = pipeline.value.get(key)
            if entry is not None and isinstance(entry.value, Seq):
                found.append(entry.value)
    return found


def _function_key(node: Map) -> str:
    return field_text(node, "exec") or field_text(node, "image").split(":")[0]


def _matchable(root: Map) -> bool:
    """Whether functions can be matched by image: none is named and none repeats."""
    for functions in _functions(root):
        seen: set[str] = set()
        for item in functions.items:
            if not isinstance(item.value, Map) or field_text(item.value, "name"):
                return False
            key = _function_key(item.value)
            if key in seen:
                return False
            seen.add(key)
    return True


def _name_functions(root: Map) -> None:
    for functions in _functions(root):
        for item in functions.items:
            assert isinstance(item.value, Map)  # _matchable looked
            name = _STAND_IN + _function_key(item.value)
            item.value.entries.append(Entry(Scalar("name", "name"), Scalar(name, name)))
            if item.value.flow is not None:
                item.value.flow = ""


def _unname_functions(root: Map) -> None:
    for functions in _functions(root):
        for item in functions.items:
            if isinstance(item.value, Map):
                entry = item.value.get("name")
                if entry is not None and field_text(item.value, "name").startswith(_STAND_IN):
                    item.value.entries.remove(entry)


def _paths(node: Map, path: str = "") -> list[str]:
    found = []
    for entry in node.entries:
        here = f"{path}/{entry.name}"
        found.append(here)
        if isinstance(entry.value, Map):
            found += _paths(entry.value, here)
    return found


def _drop_empty(node: Map, had: dict[str, bool], path: str = "") -> None:
    """Remove the empty mappings and lists that the merge left where local had none."""
    for entry in list(node.entries):
        here = f"{path}/{entry.name}"
        if isinstance(entry.value, Map):
            _drop_empty(entry.value, had, here)
        empty = (isinstance(entry.value, Map) and not entry.value.entries) or (
            isinstance(entry.value, Seq) and not entry.value.items
        )
        if (empty and path != "") or (empty and here not in had):
            node.entries.remove(entry)
