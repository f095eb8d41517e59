"""Laws that any three-way merge must obey, on generated packages and arbitrary seeds."""

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.interop.packages.generator import Case, case
from unlade.packages.compare import plain
from unlade.packages.resources import marked_text, merge_file
from unlade.packages.snapshot import Snapshot, file_of
from unlade.packages.strategies import apply, marked
from unlade.packages.yamltext import parse_documents

SEEDS = st.integers(min_value=0, max_value=10**6)
ROOT = {"Kptfile": file_of("apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: root\n")}


def snapshot(files: dict[str, str]) -> Snapshot:
    return ROOT | {f"c/{name}": file_of(text) for name, text in files.items()}


def merge(base: dict[str, str], local: dict[str, str], upstream: dict[str, str]) -> Snapshot:
    return marked(apply("resource-merge", snapshot(local), snapshot(base), snapshot(upstream)).files)


KEYED = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def regular(value: object, key: str = "") -> bool:
    """The laws' exceptions, where kpt's outcomes are kept: nulls, ports' two keys, elements without a key."""
    if isinstance(value, dict):
        return "ports" not in value and all(regular(item, name) for name, item in value.items())
    if isinstance(value, list):
        named = KEYED.get(key)
        if named is not None and not all(isinstance(item, dict) and item.get(named) for item in value):
            return False
        return all(regular(item) for item in value)
    return value is not None


def regular_case(seed: int) -> Case:
    made = case(seed, nested=False)
    for side in (made.base, made.local, made.upstream):
        for name, text in side.items():
            if name.endswith(".yaml"):
                assume(all(regular(plain(document.root)) for document in parse_documents(text)))
    return made


def values(files: Snapshot) -> dict[str, object]:
    return {
        path: [plain(doc.root) for doc in parse_documents(file.text)]
        if path.endswith(("yaml", "Kptfile"))
        else file.text
        for path, file in files.items()
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(SEEDS)
def test_no_change_upstream_keeps_every_local_file(seed: int) -> None:
    """Upstream as the base: resources that local kept and no mapping that local deleted: byte for byte."""
    base = regular_case(seed).base
    result = merge(base, base, base)
    assert {path: file.text for path, file in result.items()} == {
        path: file.text for path, file in marked(snapshot(base)).items()
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(SEEDS)
def test_no_change_locally_gives_upstream(seed: int) -> None:
    """Local as the base: all of upstream's values, and of what upstream deleted only empty shells."""
    made = regular_case(seed)
    base, upstream = made.base, made.upstream
    found, wanted = values(merge(base, base, upstream)), values(marked(snapshot(upstream)))
    for path, value in wanted.items():
        if path.endswith(".yaml"):
            assert covers(found[path], value), path
    extra = {path for path in found if path not in wanted}
    assert not extra


def covers(found: object, wanted: object) -> bool:
    """Whether everything wanted is found; deletions leave empty collections behind, as in kpt."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(covers(found.get(key), item) for key, item in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and all(any(covers(one, item) for one in found) for item in wanted)
    return found == wanted


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(SEEDS)
def test_equal_changes_are_no_conflict(seed: int) -> None:
    made = regular_case(seed)
    upstream = made.upstream
    merged = apply("resource-merge", snapshot(upstream), snapshot(made.base), snapshot(upstream))
    assert [d for d in merged.conflicts if d.where.endswith((".yaml", ".txt", ".md", ".sh"))] == []
    assert [d for d in merged.conflicts if d.path] == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(SEEDS)
def test_update_twice_equals_once(seed: int) -> None:
    """Upstream becomes the base after an update: the same update again changes nothing."""
    made = case(seed)
    once = merge(made.base, made.local, made.upstream)
    files = {path[2:]: file.text for path, file in once.items() if path.startswith("c/")}
    twice = merge(made.upstream, files, made.upstream)
    thrice = merge(
        made.upstream, {p[2:]: f.text for p, f in twice.items() if p.startswith("c/")}, made.upstream
    )
    assert {p: f.text for p, f in thrice.items()} == {p: f.text for p, f in twice.items()}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(SEEDS)
def test_untouched_documents_keep_every_byte(seed: int) -> None:
    """A document that upstream did not change keeps local's bytes, blank lines and comments included."""
    made = case(seed)
    decorated = (
        "# top\n\napiVersion: v1\nkind: ConfigMap\nmetadata: # kpt-merge: /odd\n  name:   odd   # name\n  "
    )
    decorated += "annotations:\n    internal.kpt.dev/upstream-identifier: '|ConfigMap|default|odd'\ndata:\n\n"
    decorated += "    z: |\n      text\n\n\n    a:   'x'   # why\n    # foot\n"
    name = next(name for name in sorted(made.base) if name.endswith(".yaml"))

    def together(text: str | None) -> str:
        return decorated + ("---\n" + text if text else "")

    outcome = merge_file(
        name, together(made.base.get(name)), together(made.local.get(name)), together(made.upstream.get(name))
    )
    assert outcome.text is not None
    assert decorated in outcome.text


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(SEEDS)
def test_marking_is_idempotent(seed: int) -> None:
    for name, text in case(seed).base.items():
        if name.endswith(".yaml"):
            once = marked_text(text)
            assert marked_text(once) == once
