"""Plans of arbitrary manifests: deterministic, keyed by what decides, never escaping (V7, V13)."""

from __future__ import annotations

import json
import os
import posixpath
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.corpus.archives import d, f, gzip, tar, zstd
from unlade.errors import InvalidInput, UnladeError
from unlade.model import Descriptor, Digest, Manifest
from unlade.model.mediatypes import ANNOTATION_TITLE, IMAGE_LAYERS, OCI_CONFIG, OCI_EMPTY, OCI_MANIFEST
from unlade.model.paths import UnsafeTitle, check_relative
from unlade.planning import Plan, PlanOptions, make_plan, merge_plans
from unlade.planning.families import FAMILIES
from unlade.planning.sniff import look
from unlade.planning.subset import InvalidPattern, beneath, check, matches

_TAR = tar([d("dir/"), f("dir/x", "x"), f("Kptfile", "kind: Kptfile\n")])
_CONTENTS = (b"", b"text", b"{}", _TAR, gzip(_TAR), zstd(_TAR), bytes(2048), b"\x1f\x8bbroken", b"other")
_TYPES = (
    *sorted(IMAGE_LAYERS)[:4],
    "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
    "application/vnd.cncf.helm.chart.provenance.v1.prov",
    "application/vnd.cncf.flux.content.v1.tar+gzip",
    "application/vnd.cncf.flux.content.v1.yaml",
    "application/vnd.cncf.model.weight.v1.raw",
    "application/vnd.cncf.model.doc.v1.tar",
    "application/vnd.kitops.modelkit.model.v1.tar",
    "application/vnd.kitops.modelkit.code.v1.tar+gzip",
    "application/vnd.docker.ai.gguf.v3",
    "application/vnd.docker.ai.dir.tar",
    "application/vnd.ollama.image.model",
    "application/vnd.ollama.image.license",
    "application/wasm",
    "text/plain",
    "",
)
_CONFIGS = (
    OCI_EMPTY,
    OCI_CONFIG,
    "application/vnd.unknown.config.v1+json",
    "application/vnd.cncf.helm.config.v1+json",
    "application/vnd.cncf.flux.config.v1+json",
    "application/vnd.cncf.model.config.v1+json",
    "application/vnd.kitops.modelkit.config.v1+json",
    "application/vnd.docker.ai.model.config.v0.1+json",
    "application/vnd.wasm.config.v0+json",
)
_KEYS = (
    ANNOTATION_TITLE,
    "io.deis.oras.content.unpack",
    "org.cncf.model.filepath",
    "org.cnai.model.filepath",
    "org.cncf.model.file.metadata+json",
    "some.other/note",
)
_words = st.sampled_from(
    ["a", "b", "a/b", "dir", ".wh.a", "..", ".", "/", "a//b", "../x", "true", "x\0", '{"mode":511}']
)
_values = _words | st.text(max_size=12) | st.lists(_words, min_size=1, max_size=3).map("/".join)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_kitfiles = st.fixed_dictionaries(
    {},
    optional={
        "name": _json,
        "version": _json,
        "model": _json | st.fixed_dictionaries({"path": _values}),
        "code": _json,
    },
)


@st.composite
def layers(draw: st.DrawFn) -> Descriptor:
    content = draw(st.sampled_from(_CONTENTS))
    return Descriptor(
        media_type=draw(st.sampled_from(_TYPES)),
        digest=Digest.of(content),
        size=len(content),
        annotations=draw(st.dictionaries(st.sampled_from(_KEYS), _values, max_size=3)),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    return Manifest(
        media_type=OCI_MANIFEST,
        config=Descriptor(media_type=draw(st.sampled_from(_CONFIGS)), digest=Digest.of(b"{}"), size=2),
        layers=tuple(draw(st.lists(layers(), max_size=5))),
        artifact_type=draw(st.sampled_from(["", "application/vnd.unknown.artifact.v1"])),
    )


options = st.builds(
    PlanOptions,
    unpack=st.sampled_from(["auto", "always", "never"]),
    only=st.just(()) | st.lists(_values, max_size=2).map(tuple),
    as_file=st.just(()) | st.lists(_values, max_size=2).map(tuple),
    family=st.none() | st.sampled_from(["image", *(family.NAME for family in FAMILIES)]),
)
_BLOBS = {Digest.of(content): content for content in _CONTENTS}


def planned(manifest: Manifest, chosen: PlanOptions, config: Any) -> Plan:
    return make_plan(
        manifest,
        Descriptor(media_type=OCI_MANIFEST, digest=Digest.of(b"m"), size=1),
        options=chosen,
        read_config=lambda: json.dumps(config).encode(),
        peek=lambda layer, count: _BLOBS[layer.digest][:count],
    )


@given(manifests(), options, _kitfiles)
def test_a_plan_is_made_or_refused_with_a_typed_error(
    manifest: Manifest, chosen: PlanOptions, config: Any
) -> None:
    try:
        plan = planned(manifest, chosen, config)
    except InvalidInput as error:
        assert str(error)
        return
    assert plan.kind == "image" or plan.active(), "an artifact is never empty"
    for step in plan.active():
        assert step.rule
        if step.path:
            assert check_relative(step.path) == step.path
    paths = [step.path for step in plan.active() if step.action == "file"]
    assert len(set(paths)) == len(paths)
    assert not any(other.startswith(f"{path}/") for path in paths for other in paths)
    assert {step.index for step in plan.steps if step.index >= 0} == set(range(len(manifest.layers)))


@given(manifests(), options, _kitfiles)
def test_a_plan_is_deterministic(manifest: Manifest, chosen: PlanOptions, config: Any) -> None:
    try:
        first = planned(manifest, chosen, config)
    except UnladeError:
        return
    second = planned(manifest, chosen, config)
    assert first == second
    assert first.canonical() == second.canonical()
    assert first.key() == second.key()


@given(manifests(), options, _kitfiles, st.randoms(use_true_random=False))
def test_the_order_of_annotations_changes_nothing(
    manifest: Manifest, chosen: PlanOptions, config: Any, random: Any
) -> None:
    try:
        plan = planned(manifest, chosen, config)
    except UnladeError:
        return

    def shuffled(layer: Descriptor) -> Descriptor:
        items = list(layer.annotations.items())
        random.shuffle(items)
        return Descriptor(
            media_type=layer.media_type, digest=layer.digest, size=layer.size, annotations=dict(items)
        )

    other = Manifest(
        media_type=manifest.media_type,
        config=manifest.config,
        layers=tuple(shuffled(layer) for layer in manifest.layers),
        artifact_type=manifest.artifact_type,
    )
    assert planned(other, chosen, config).canonical() == plan.canonical()


@given(st.lists(manifests(), min_size=1, max_size=3))
def test_merging_keeps_every_source_and_one_file_per_path(several: list[Manifest]) -> None:
    try:
        plans = [planned(manifest, PlanOptions(), {}) for manifest in several]
        merged = merge_plans(plans)
    except InvalidInput:
        return
    assert len(merged.sources) == len(several)
    paths = [step.path for step in merged.active() if step.action == "file"]
    assert len(set(paths)) == len(paths)
    last = plans[-1]
    assert {s.path for s in last.active() if s.action == "file"} <= set(paths)


@given(st.text() | st.lists(_words | st.text(max_size=4), max_size=4).map("/".join))
def test_no_accepted_path_escapes(unsafe: str) -> None:
    try:
        path = check_relative(unsafe)
    except UnsafeTitle:
        return
    root = "/destination"
    joined = posixpath.normpath(posixpath.join(root, path))
    assert joined == f"{root}/{path}", "one spelling only"
    assert os.path.commonpath([root, joined]) == root
    assert "\0" not in joined


@given(
    st.binary(max_size=2048) | st.builds(lambda t, n: t[:n], st.sampled_from(_CONTENTS), st.integers(0, 4096))
)
def test_looking_at_any_bytes_never_fails(head: bytes) -> None:
    archive = look(head)
    assert archive is None or isinstance(archive.names, tuple)


@given(st.text("ab*?[]!-/", max_size=12), st.text("ab/-[", max_size=12))
def test_patterns_never_fail_and_take_what_is_below(pattern: str, path: str) -> None:
    try:
        check((pattern,))
    except InvalidPattern:
        return
    if matches((pattern,), path):
        assert matches((pattern,), f"{path}/below")


@given(st.lists(st.text("ab*?[]!-\\", min_size=1, max_size=4), min_size=1, max_size=3).map("/".join))
def test_beneath_is_literal(path: str) -> None:
    assert matches(beneath(path), path)
    assert not matches(beneath(path), f"{path}x")
    assert not matches(beneath(path), f"x{path}")
