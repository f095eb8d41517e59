"""The rules that decide: who speaks first, what is looked at, what is refused (V7, V14, V16, V17)."""

from __future__ import annotations

import pytest

from tests.corpus.archives import d, f, gzip, tar, zstd
from tests.unit.planning.building import Made, config, layer, summary
from unlade.errors import InvalidInput, NothingProduced
from unlade.model import Digest
from unlade.model.mediatypes import IMAGE_LAYERS, OCI_CONFIG, OCI_LAYER_GZIP
from unlade.model.paths import UnsafeTitle
from unlade.planning import NotATar, PathConflict, UnplacedLayers, merge_plans

TAR = tar([d("dir/"), f("dir/x", "x")])
UNPACK = {"io__deis__oras__content__unpack": "true"}


class TestRule1Images:
    @pytest.mark.parametrize("media_type", sorted(IMAGE_LAYERS))
    def test_an_image_config_and_image_layers_are_an_image(self, media_type: str) -> None:
        made = Made(layer(TAR, "../ignored", media_type), config=config(OCI_CONFIG))
        plan = made.plan()
        assert (plan.kind, plan.family) == ("image", "image")
        assert summary(plan) == [("layer", "")]
        assert made.peeked == [] and made.configs_read == 0

    def test_one_foreign_layer_makes_it_an_artifact(self) -> None:
        made = Made(layer(TAR), layer(b"{}", "a.json", "application/json"), config=config(OCI_CONFIG))
        assert made.plan().kind == "artifact"

    def test_image_layers_without_an_image_config_are_an_artifact(self) -> None:
        assert Made(layer(TAR, "layer0.tar", OCI_LAYER_GZIP)).plan().kind == "artifact"

    def test_an_empty_image_is_allowed(self) -> None:
        assert Made(config=config(OCI_CONFIG)).plan().steps == ()

    def test_never_gives_the_layers_of_an_image_as_files(self) -> None:
        made = Made(
            layer(gzip(TAR), None, OCI_LAYER_GZIP), layer(TAR, "named.tar"), config=config(OCI_CONFIG)
        )
        assert summary(made.plan(unpack="never")) == [("file", "layer-000.tar.gz"), ("file", "named.tar")]

    def test_the_caller_may_call_anything_an_image(self) -> None:
        plan = Made(layer(TAR, "layer.tar")).plan(family="image")
        assert (plan.kind, summary(plan)) == ("image", [("layer", "")])

    def test_an_image_has_no_names_to_give(self) -> None:
        with pytest.raises(InvalidInput, match="no names"):
            Made(layer(TAR), config=config(OCI_CONFIG)).plan(as_file=("x",))


class TestRule2Layers:
    def test_the_annotation_speaks_before_the_title(self) -> None:
        plan = Made(layer(gzip(TAR), "dir", OCI_LAYER_GZIP, **UNPACK)).plan()
        assert summary(plan) == [("untar", "")]
        assert plan.steps[0].rule.startswith("annotation:")

    def test_the_annotation_speaks_before_the_family(self) -> None:
        helm = config("application/vnd.cncf.helm.config.v1+json")
        chart = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
        made = Made(
            layer(gzip(TAR), "chart.tgz", chart, io__deis__oras__content__unpack="false"), config=helm
        )
        assert summary(made.plan()) == [("file", "chart.tgz")]

    def test_the_family_speaks_before_the_title(self) -> None:
        helm = config("application/vnd.cncf.helm.config.v1+json")
        chart = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
        made = Made(layer(gzip(TAR), "chart.tgz", chart), config=helm)
        assert summary(made.plan()) == [("untar", "")]
        assert made.configs_read == 0

    def test_a_title_speaks_before_the_type_and_nothing_is_looked_at(self) -> None:
        made = Made(layer(gzip(TAR), "layer0.tar", OCI_LAYER_GZIP))
        assert summary(made.plan()) == [("file", "layer0.tar")]
        assert made.peeked == []

    @pytest.mark.parametrize("packed", [TAR, gzip(TAR), zstd(TAR)], ids=["plain", "gzip", "zstd"])
    def test_an_untitled_tar_is_unpacked_whatever_its_type(self, packed: bytes) -> None:
        plan = Made(layer(packed, None, "application/octet-stream")).plan()
        assert summary(plan) == [("untar", "")]
        assert plan.steps[0].rule == "untitled: its bytes are a tar, unpacked"

    @pytest.mark.parametrize("media_type", [OCI_LAYER_GZIP, "application/vnd.example.content.v1.tar+gzip"])
    def test_a_type_alone_never_proves_a_tar(self, media_type: str) -> None:
        with pytest.raises(NothingProduced):
            Made(layer(b"plain text " * 100, None, media_type)).plan()

    def test_always_unpacks_titled_tars_and_keeps_other_files(self) -> None:
        made = Made(layer(gzip(TAR), "a.tgz"), layer(b"text", "b.txt"))
        assert summary(made.plan(unpack="always")) == [("untar", ""), ("file", "b.txt")]

    def test_never_unpacks_nothing(self) -> None:
        made = Made(layer(gzip(TAR), "dir", OCI_LAYER_GZIP, **UNPACK), layer(TAR))
        plan = made.plan(unpack="never")
        assert summary(plan) == [("file", "dir"), ("file", "layer-001.tar")]
        assert made.peeked == []

    def test_a_packed_directory_that_is_no_tar_is_refused(self) -> None:
        with pytest.raises(NotATar) as caught:
            Made(layer(b"no tar" * 200, "dir", **UNPACK)).plan()
        assert "layer 0" in str(caught.value) and "never" in caught.value.next_step

    def test_a_modelpack_tar_that_is_no_tar_is_the_file_it_names(self) -> None:
        model = config("application/vnd.cncf.model.config.v1+json")
        kind = "application/vnd.cncf.model.weight.v1.tar"
        plan = Made(layer(b"raw", None, kind, org__cncf__model__filepath="w.bin"), config=model).plan()
        assert summary(plan) == [("file", "w.bin")]
        assert plan.steps[0].rule == "modelpack: its bytes are no tar; a file at its filepath"

    def test_model_spec_s_filepath_names_a_layer_of_any_artifact(self) -> None:
        plan = Made(layer(b"raw", None, "x/y", org__cncf__model__filepath="w.bin"), layer(TAR)).plan()
        assert summary(plan) == [("file", "w.bin"), ("untar", "")]

    def test_the_rule_is_named_for_every_step(self) -> None:
        made = Made(layer(b"a", "a"), layer(TAR), layer(b"b", None, "text/plain"))
        rules = [step.rule.partition(":")[0] for step in made.plan(as_file=("b",)).steps]
        assert rules == ["title", "untitled", "caller"]

    def test_a_family_can_be_named_by_the_caller(self) -> None:
        made = Made(layer(b"GGUF", None, "application/vnd.docker.ai.gguf.v3"))
        with pytest.raises(NothingProduced):
            made.plan()
        assert summary(made.plan(family="docker-model")) == [("file", "model.gguf")]
        with pytest.raises(InvalidInput, match="no format family") as caught:
            made.plan(family="zip")
        assert "modelpack" in caught.value.next_step

    def test_bytes_are_looked_at_once_per_digest(self) -> None:
        made = Made(layer(TAR), layer(TAR), layer(gzip(TAR)))
        made.plan()
        assert len(made.peeked) == 2

    def test_what_a_peek_raises_passes_through(self) -> None:
        made = Made(layer(TAR), layer(gzip(TAR)))
        made.blobs.clear()
        with pytest.raises(KeyError):
            made.plan()


class TestContentDigest:
    @pytest.mark.parametrize(
        ("stated", "checked"),
        [
            (str(Digest.of(TAR)), True),
            ("sha512:" + "0" * 128, False),
            ("sha256:short", False),
            ("", False),
        ],
    )
    def test_the_digest_of_the_packed_tar_is_passed_on(self, stated: str, checked: bool) -> None:
        made = Made(layer(gzip(TAR), "dir", io__deis__oras__content__digest=stated, **UNPACK))
        (step,) = made.plan().steps
        assert (step.diff_id == Digest.of(TAR)) is checked
        assert step.diff_id is None or checked


class TestLargeManifests:
    """4 MiB of manifest must not become minutes or gigabytes."""

    def test_thousands_of_unnamed_layers(self) -> None:
        kind = "application/vnd.ollama.image.license"
        plan = Made(*(layer(b"%d" % n, None, kind) for n in range(5000))).plan()
        assert plan.steps[4999].path == "license-05000-of-05000.txt"

    def test_thousands_of_deep_paths(self) -> None:
        deep = "/".join(["directory-of-thirty-characters"] * 126)
        plan = Made(*(layer(b"%d" % n, f"{deep}/{n}") for n in range(1000))).plan()
        assert len(plan.active()) == 1000


class TestRule3Duplicates:
    def test_the_higher_layer_wins_and_the_lower_is_not_fetched(self) -> None:
        plan = Made(layer(b"low", "same"), layer(b"mid", "other"), layer(b"high", "same")).plan()
        assert summary(plan) == [("skip", "same"), ("file", "other"), ("file", "same")]
        assert plan.steps[0].rule == "duplicate: layer 2 has the same path and wins"
        assert plan.fetch_size() == len(b"mid") + len(b"high")

    @pytest.mark.parametrize("titles", [("a", "a/b"), ("a/b", "a"), ("a/b/c/d", "a/b")])
    def test_a_file_and_a_directory_of_one_name_are_refused(self, titles: tuple[str, str]) -> None:
        with pytest.raises(PathConflict):
            Made(*(layer(title.encode(), title) for title in titles)).plan()

    def test_a_packed_directory_and_a_file_of_its_name_are_refused(self) -> None:
        with pytest.raises(PathConflict):
            Made(layer(gzip(TAR), "dir", **UNPACK), layer(b"x", "dir")).plan()

    def test_a_conflict_can_be_decided_by_a_subset(self) -> None:
        made = Made(layer(b"1", "a"), layer(b"2", "a/b"), layer(b"3", "c"))
        assert summary(made.plan(only=("a/*", "c")))[1:] == [("file", "a/b"), ("file", "c")]

    def test_a_prefix_of_a_name_is_no_directory(self) -> None:
        plan = Made(layer(b"1", "out"), layer(b"2", "out-evil/x")).plan()
        assert summary(plan) == [("file", "out"), ("file", "out-evil/x")]


class TestRule4Names:
    @pytest.mark.parametrize("title", ["../x", "/x", "a/../../x", "..", ".", "a//b", "a/", "x\0y"])
    def test_one_bad_title_refuses_the_whole_artifact(self, title: str) -> None:
        with pytest.raises(UnsafeTitle):
            Made(layer(b"good", "good"), layer(b"bad", title)).plan()

    def test_the_error_names_reference_digest_and_layer(self) -> None:
        """V15."""
        with pytest.raises(UnsafeTitle) as caught:
            Made(layer(b"good", "good"), layer(b"bad", "../x")).plan()
        manifest, bad = Digest.of(b"manifest"), Digest.of(b"bad")
        assert str(caught.value) == (
            f"registry.example/made:v1 ({manifest}): layer 1 ({bad}): the path '../x' has a part '..'"
        )

    @pytest.mark.parametrize("unpack", ["auto", "always", "never"])
    def test_under_every_option_and_where_the_title_is_not_used(self, unpack: str) -> None:
        helm = config("application/vnd.cncf.helm.config.v1+json")
        chart = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
        with pytest.raises(UnsafeTitle):
            Made(layer(gzip(TAR), "../chart.tgz", chart), config=helm).plan(unpack=unpack)

    @pytest.mark.parametrize("key", ["org__cncf__model__filepath", "org__cnai__model__filepath"])
    def test_filepaths_too(self, key: str) -> None:
        with pytest.raises(UnsafeTitle):
            Made(layer(b"w", "w", **{key: "../../etc/passwd"})).plan()

    def test_names_from_the_caller_too(self) -> None:
        for name in ("../x", "0=/etc/passwd", "0="):
            with pytest.raises(UnsafeTitle):
                Made(layer(b"x", None, "text/plain")).plan(as_file=(name,))

    def test_the_root_of_a_packed_directory_is_its_own_root(self) -> None:
        packed = gzip(tar([d("."), f("x", "x")]))
        plan = Made(layer(packed, ".", OCI_LAYER_GZIP, **UNPACK)).plan()
        assert summary(plan) == [("untar", "")]
        kept = Made(layer(packed, ".", OCI_LAYER_GZIP, **UNPACK)).plan(unpack="never")
        assert summary(kept) == [("file", "layer-000.tar.gz")]

    def test_an_old_kitfile_cannot_lead_outside(self) -> None:
        kit = Made(
            layer(TAR, None, "application/vnd.kitops.modelkit.model.v1.tar"),
            config=config("application/vnd.kitops.modelkit.config.v1+json"),
        )
        kit.config_bytes = b'{"model":{"path":"../../outside/model"}}'
        with pytest.raises(UnsafeTitle):
            kit.plan()


class TestNothingProduced:
    def test_every_layer_is_listed_with_type_size_and_title(self) -> None:
        made = Made(
            layer(b"{}", None, "application/vnd.dev.cosign.simplesigning.v1+json"),
            layer(b"x" * 700, None, "text/spdx+json"),
        )
        with pytest.raises(NothingProduced) as caught:
            made.plan()
        text = str(caught.value)
        assert "registry.example/made:v1" in text
        assert "layer 0: application/vnd.dev.cosign.simplesigning.v1+json, 2 bytes, untitled" in text
        assert "layer 1: text/spdx+json, 700 bytes, untitled" in text
        assert "--as-file" in caught.value.next_step and "--unpack never" in caught.value.next_step

    def test_a_long_list_is_cut(self) -> None:
        with pytest.raises(NothingProduced, match="and 80 more"):
            Made(*(layer(str(n).encode(), None, "text/plain") for n in range(100))).plan()

    def test_types_reach_the_terminal_escaped(self) -> None:
        with pytest.raises(NothingProduced) as caught:
            Made(layer(b"x", None, "text/\x1b[31mred\n")).plan()
        assert str(caught.value).isprintable()

    def test_some_layers_without_a_place_are_an_error_of_their_own(self) -> None:
        with pytest.raises(UnplacedLayers, match="layer 1: text/plain"):
            Made(layer(b"a", "a"), layer(b"b", None, "text/plain")).plan()

    def test_names_go_to_unnamed_layers_in_order(self) -> None:
        made = Made(
            layer(b"a", None, "text/plain"),
            layer(b"b", "b"),
            layer(b"c", None, "text/plain"),
            layer(b"d", "d"),
        )
        plan = made.plan(as_file=("first", "3=renamed", "deep/second"))
        assert [step.path for step in plan.steps] == ["first", "b", "deep/second", "renamed"]

    def test_a_name_too_many_is_an_error(self) -> None:
        with pytest.raises(InvalidInput, match="left over"):
            Made(layer(b"a", "a")).plan(as_file=("b",))
        for wrong in ("7=b", f"{'9' * 5000}=b"):
            with pytest.raises(InvalidInput, match="no such layer"):
                Made(layer(b"a", "a")).plan(as_file=(wrong,))

    def test_a_tar_can_be_named_too(self) -> None:
        assert summary(Made(layer(TAR)).plan(as_file=("0=all.tar",))) == [("file", "all.tar")]

    def test_a_subset_that_matches_nothing_is_an_error(self) -> None:
        with pytest.raises(NothingProduced) as caught:
            Made(layer(b"a", "a")).plan(only=("b/**",))
        assert "--only" in caught.value.next_step


class TestMerge:
    def test_the_later_reference_wins(self) -> None:
        first = Made(layer(b"1", "same"), layer(b"2", "one")).plan()
        second = Made(layer(b"3", "same"), layer(b"4", "two")).plan()
        merged = merge_plans([first, second])
        assert summary(merged) == [("skip", "same"), ("file", "one"), ("file", "same"), ("file", "two")]
        assert [step.source for step in merged.steps] == [0, 0, 1, 1]
        assert merged.steps[0].rule == "duplicate: reference 2 has the same path and wins"
        assert merge_plans([second, first]).key() != merged.key()

    def test_images_stay_apart_from_one_another(self) -> None:
        image = Made(layer(TAR), config=config(OCI_CONFIG)).plan()
        merged = merge_plans([image, image])
        assert [step.source for step in merged.steps] == [0, 1]
        assert merged.kind == "image"
        assert merge_plans([image, Made(layer(b"x", "x")).plan()]).kind == "artifact"

    def test_a_file_over_a_directory_is_refused(self) -> None:
        with pytest.raises(PathConflict):
            merge_plans([Made(layer(b"1", "a/b")).plan(), Made(layer(b"2", "a")).plan()])

    def test_a_subset_may_leave_out_a_whole_reference_but_not_all(self) -> None:
        first = Made(layer(b"1", "a")).plan(only=("a",), one_of_several=True)
        second = Made(layer(b"2", "b")).plan(only=("a",), one_of_several=True)
        assert [step.path for step in merge_plans([first, second]).active()] == ["a"]
        with pytest.raises(NothingProduced):
            merge_plans([second, second])

    def test_nothing_merges_to_nothing(self) -> None:
        with pytest.raises(InvalidInput):
            merge_plans([])

    def test_one_plan_is_itself(self) -> None:
        plan = Made(layer(b"1", "a")).plan()
        assert merge_plans([plan]) == plan
