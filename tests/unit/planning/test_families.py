"""What single families do beyond their table."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.corpus import corpus
from tests.corpus.archives import f, gzip, tar
from tests.corpus.interpreter import plan_of
from tests.unit.planning.building import Made, config, layer, summary
from unlade.model import decode_manifest
from unlade.planning import kitops, make_plan
from unlade.planning.generic import stable_name
from unlade.planning.modelpack import InvalidMetadata, file_metadata
from unlade.planning.view import InvalidConfig

TAR = tar([f("x", "x")])
KIT = config("application/vnd.kitops.modelkit.config.v1+json")
HELM = config("application/vnd.cncf.helm.config.v1+json")
CHART = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_METADATA = "org.cncf.model.file.metadata+json"


class TestKitOps:
    @pytest.mark.parametrize(
        "value",
        [
            {"manifestVersion": "1.0.0"},
            {"a": {"b": [1, [2, {"c": "d"}], {}], "e": []}, "yes": "no", "on": None, "1": 1.5, "": ""},
            {
                "text": "line\nbreak\ttab \"quotes\" 'single' # hash: colon",
                "emoji": "🐝",
                "odd": "\x7f\x85\u2028\ufeff",
            },
            {"list": [{"path": "a", "nested": {"x": [True, False]}}, "text", ["y"]]},
        ],
    )
    def test_a_kitfile_is_the_same_data_as_yaml(self, value: dict[str, Any]) -> None:
        assert YAML(typ="safe").load(kitops.render(value).decode()) == value

    def test_digests_are_left_out_and_other_uses_of_the_word_stay(self) -> None:
        value = {
            "package": {"name": "x", "digest": "kept"},
            "model": {
                "path": "m",
                "digest": "d",
                "diffId": "d",
                "parts": [{"path": "p", "digest": "d"}],
                "parameters": {"digest": "kept"},
            },
            "code": [{"path": "c", "digest": "d", "diffId": "d"}],
        }
        assert YAML(typ="safe").load(kitops.render(value).decode()) == {
            "package": {"name": "x", "digest": "kept"},
            "model": {"path": "m", "parts": [{"path": "p"}], "parameters": {"digest": "kept"}},
            "code": [{"path": "c"}],
        }

    def test_a_kit_without_a_model_of_its_own_says_where_it_is(self) -> None:
        child = next(artifact for artifact in corpus() if artifact.name == "kitops-child")
        (note,) = plan_of(child).notes
        assert "registry.example/base:v1" in note

    @pytest.mark.parametrize("raw", [b"not json", b"[]", b"[" * 100_000, b'{"a":' * 40 + b"1" + b"}" * 40])
    def test_a_config_that_is_no_kitfile_is_refused(self, raw: bytes) -> None:
        made = Made(layer(TAR, None, "application/vnd.kitops.modelkit.model.v1.tar"), config=KIT)
        made.config_bytes = raw
        with pytest.raises(InvalidConfig):
            made.plan()

    @pytest.mark.parametrize(
        "raw", [b"{}", b'{"model":[]}', b'{"model":{"path":3}}', b'{"model":null,"code":{"path":"x"}}']
    )
    def test_a_kitfile_that_says_nothing_of_a_layer(self, raw: bytes) -> None:
        made = Made(layer(TAR, None, "application/vnd.kitops.modelkit.model.v1.tar"), config=KIT)
        made.config_bytes = raw
        assert summary(made.plan()) == [("file", "Kitfile"), ("untar", "")]


class TestHelm:
    @pytest.mark.parametrize(
        ("raw", "name"),
        [
            (b'{"name":"web","version":"1.2.3"}', "web-1.2.3.tgz"),
            (b'{"name":"../web","version":"1"}', "chart.tgz"),
            (b'{"name":".","version":"/../../x"}', "chart.tgz"),
            (b'{"name":"a/b","version":"1"}', "chart.tgz"),
            (b"{}", "chart.tgz"),
        ],
    )
    def test_a_packed_chart_is_named_as_helm_pull_names_it(self, raw: bytes, name: str) -> None:
        made = Made(layer(gzip(TAR), None, CHART), config=HELM)
        made.config_bytes = raw
        assert summary(made.plan(unpack="never")) == [("file", name)]

    def test_the_config_is_not_read_for_an_unpacked_chart(self) -> None:
        made = Made(layer(gzip(TAR), None, CHART), config=HELM)
        made.plan()
        assert made.configs_read == 0


class TestModelPackMetadata:
    @pytest.mark.parametrize(
        ("text", "mode", "mtime_ns"),
        [
            ("{}", None, None),
            ('{"mode":420}', 0o644, None),
            ('{"mode":0}', None, None),
            ('{"mode":3565}', 0o755, None),
            ('{"mtime":"2026-03-01T10:00:00Z"}', None, 1772359200_000000000),
            ('{"mtime":"2026-03-01T11:00:00.5+01:00"}', None, 1772359200_500000000),
            ('{"mtime":"2026-03-01T10:00:00.123456789Z"}', None, 1772359200_123456789),
            ('{"mtime":"0001-01-01T00:00:00Z"}', None, None),
            ('{"mtime":"1970-01-01T00:00:00Z"}', None, 0),
        ],
    )
    def test_what_is_applied(self, text: str, mode: int | None, mtime_ns: int | None) -> None:
        found = file_metadata(layer(b"w", None, **{_METADATA: text}))
        assert (found.mode, found.mtime_ns) == (mode, mtime_ns)

    @pytest.mark.parametrize(
        "text",
        [
            "no json",
            "[]",
            '{"mode":-1}',
            '{"mode":"0644"}',
            '{"mode":true}',
            '{"size":1e400}',
            '{"size":99999999999999999999}',
            '{"mtime":7}',
            '{"mtime":"yesterday"}',
            '{"mtime":"9999-12-31T23:59:59-23:00"}',
            "[" * 100_000,
        ],
    )
    def test_what_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidMetadata):
            file_metadata(layer(b"w", None, **{_METADATA: text}))


def test_a_set_id_bit_never_comes_from_an_artifact() -> None:
    raw = "application/vnd.cncf.model.code.v1.raw"
    model = config("application/vnd.cncf.model.config.v1+json")
    suid = layer(b"w", None, raw, org__cncf__model__filepath="w", **{_METADATA: '{"mode":2541}'})
    assert Made(suid, config=model).plan().steps[0].mode == 0o755


def test_ollama_manifests_served_as_plain_text() -> None:
    """The registry has served them so; the document's own type counts."""
    artifact = next(artifact for artifact in corpus() if artifact.name == "ollama-model")
    decoded = decode_manifest(artifact.top.raw, content_type="text/plain; charset=utf-8")
    assert decoded == artifact.document(artifact.top.digest)


@pytest.mark.parametrize(
    ("media_type", "name"),
    [
        ("application/vnd.oci.image.layer.v1.tar", "layer-007.tar"),
        ("application/vnd.oci.image.layer.v1.tar+gzip", "layer-007.tar.gz"),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", "layer-007.tar.gz"),
        ("application/vnd.oci.image.layer.v1.tar+zstd", "layer-007.tar.zst"),
        ("application/tar+gzip", "layer-007.tar.gz"),
        ("application/x-tar", "layer-007.tar"),
        ("application/vnd.in-toto+json", "layer-007.json"),
        ("application/json", "layer-007.json"),
        ("application/../../etc+json", "layer-007.json"),
        ("text/plain", "layer-007"),
        ("", "layer-007"),
    ],
)
def test_stable_names(media_type: str, name: str) -> None:
    assert stable_name(7, media_type) == name


def test_make_plan_is_what_the_package_exports() -> None:
    import unlade.planning

    assert unlade.planning.make_plan is make_plan
