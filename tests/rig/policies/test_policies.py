"""The shipped policies on a real API server, and every way round them that we could think of (V3, E9).

One cluster for the file: it starts for each, and policies hold for all of it. The policy that sets Always is
applied by the last test alone, because it would mend what the others want refused.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rig.cluster import Rig
from rig.kube import ApiError, Json, until
from tests.rig.policies.conftest import ALLOWED, OLD, Admission, Old, apply, claim, csi, image, source
from unlade.errors import InvalidInput
from unlade.model import Reference

MODEL = "registry.example.com/team/model:v1"
DIGEST = "@sha256:" + "0a" * 32

GOOD = (
    "registry.example.com/team/model:v1",
    "registry.example.com/team",
    "registry.example.com/team:v1",
    "registry.example.com/team/a/b" + DIGEST,
    "registry.example.com/team/a:v1" + DIGEST,
    "registry.example.com/team/a@sha512:" + "0a" * 64,
    "mirror.example.com:5000/anything/at/all",
    "team/model",
    "docker.io/team/model:V1",
    "index.docker.io/team/model",
    "[fd00::1]:5000/x/y",
)
BAD = (
    "",
    "registry.example.com.evil.io/team/model",
    "registry.example.com:443/team/model",
    "registry.example.com:80/team/model",
    "registry.example.com/teams/model",
    "registry.example.com/team-b/model",
    "registry.example.com/teamx",
    "registry.example.com/other/team/model",
    "registry.example.com",
    "registry.example.com:team",
    "evil.io/registry.example.com/team/model",
    "evil.io/x@registry.example.com/team/model",
    "registry.example.com@evil.io/team/x",
    "registry.example.com/team@evil.io/x",
    "mirror.example.com/anything",
    "mirror.example.com:50000/anything",
    "mirror.example.com:5000",
    "model",
    "library/model",
    "docker.io/model",
    "docker.io/library/model",
    # A user's name alone is an official image of that name.
    "docker.io/team",
    "index.docker.io/team",
    "team",
    "team:v1",
    "docker.io.evil.io/team/model",
    "docker.io:443/team/model",
    "registry-2.docker.io/team/model",
    "localhost/team/model",
    "LOCALHOST/team/model",
    "Team/model",
    "Registry.Example.com/team/model",
    "registry.example.com/Team/model",
    "REGISTRY.EXAMPLE.COM/TEAM/MODEL",
    "registry.example.com/team/../other/model",
    "registry.example.com/team/./model",
    "registry.example.com//team/model",
    "registry.example.com/team//model",
    "registry.example.com/team/",
    "/registry.example.com/team/model",
    "https://registry.example.com/team/model",
    "oci://registry.example.com/team/model",
    "docker-daemon:registry.example.com/team/model",
    "user@registry.example.com/team/model",
    "registry.example.com/team/model:v1:v2",
    "registry.example.com/team/model@sha256:abc",
    "registry.example.com/team/model@sha256:" + "0A" * 32,
    "registry.example.com/team/model@md5:" + "0a" * 16,
    "registry.example.com/team/model#evil",
    "registry.example.com/team/model?evil",
    "registry.example.com/team%2f..%2fother",
    "registry.example.com\\team\\model",
    "registry.example.com/team/m\u00f6del",
    "registry\u3002example.com/team/model",
    "r\u0435gistry.example.com/team/model",
    "registry.example.com/team/model\u00a0evil.io/x",
    "registry.example.com/team/model\u2003evil.io/x",
    "registry.example.com/team/model\x0bevil.io/x",
    "registry.example.com/team/model\x0cevil.io/x",
    "registry.example.com/team/model\x85evil.io/x",
    "registry.example.com/team/model\x00",
    "[fd00::1]/x/y",
    "[fd00::2]:5000/x/y",
    "[fd00::1]:5000/xy",
)


@pytest.mark.parametrize("reference", GOOD)
def test_allowed(asking: Admission, reference: str) -> None:
    assert asking.refusal(image(reference), csi(reference=reference)) == ""


@pytest.mark.parametrize("reference", BAD)
def test_refused(asking: Admission, reference: str) -> None:
    words = asking.refusal(image(reference))
    assert words
    if reference:  # nothing named is the driver's to refuse
        assert "registries.unlade.dev" in asking.refusal(csi(reference=reference)), reference
        assert "registries.unlade.dev" in asking.refusal(csi(references=f"{GOOD[0]},{reference}"))
        assert "registries.unlade.dev" in asking.refusal(csi(reference=GOOD[0], references=reference))


@pytest.mark.parametrize("between", [",", " ", "\n", "\t", "\r\n", ", ", " ,, ", "\n\n  ", "\u2028", "\x1f"])
def test_lists_are_looked_at_one_by_one(asking: Admission, between: str) -> None:
    plain = between.isascii() and between != "\x1f"  # what else Python would split at is refused whole
    listed = between.join((GOOD[0], GOOD[2], GOOD[4]))
    assert (asking.refusal(csi(references=listed)) == "") is plain
    for evil in range(3):
        parts = [GOOD[0], GOOD[2], GOOD[4]]
        parts[evil] = "evil.io/x"
        words = asking.refusal(csi(references=between.join(parts)))
        assert "evil.io/x" in words
    assert (asking.refusal(csi(references=between + GOOD[0] + between)) == "") is plain


def test_spaces_around_a_reference(asking: Admission) -> None:
    for reference in (f" {GOOD[0]}", f"{GOOD[0]} ", f"{GOOD[0]}\n", f"evil.io/x {GOOD[0]}"):
        assert asking.refusal(image(reference)), repr(reference)
    assert "evil.io/x" in asking.refusal(csi(reference=f"{GOOD[0]} evil.io/x"))


def test_what_is_admitted_means_the_same_on_the_node(asking: Admission) -> None:
    """Spellings put together from parts: none is admitted that the node would take for another place."""
    hosts = ("", "docker.io/", "index.docker.io/", "registry-1.docker.io/", "localhost/", "LocalHost/",
             "team/", "registry.example.com/", "registry.example.com:443/", "Registry.example.com/",
             "mirror.example.com:5000/")  # fmt: skip
    paths = (
        "team",
        "team/model",
        "library/team",
        "library",
        "Team/model",
        "team:5000/model",
        "team.io/model",
    )
    ends = ("", ":v1", ":5000", DIGEST)
    allowed = [prefix.rstrip("/") for prefix in ALLOWED]
    admitted = 0
    for parts in itertools.product(hosts, paths, ends):
        text = "".join(parts)
        if asking.refusal(csi(reference=text)):
            continue
        admitted += 1
        try:
            name = Reference.parse(text).name
        except InvalidInput:
            continue  # the node refuses it
        assert any(name == prefix or name.startswith(prefix + "/") for prefix in allowed), text
    assert admitted > 20


def test_other_drivers_and_volumes_are_left_alone(asking: Admission) -> None:
    other: Json = {"csi": {"driver": "other.example.com", "volumeAttributes": {"reference": "evil.io/x"}}}
    assert asking.refusal(other, {"emptyDir": {}}, {"configMap": {"name": "x"}}) == ""
    shouted: Json = {"csi": {"driver": "OCI.unlade.dev", "volumeAttributes": {"reference": "evil.io/x"}}}
    assert asking.refusal(shouted)
    for name in ("Reference", "REFERENCES", "reference "):
        # the driver knows no such attribute, and says so
        assert asking.refusal(csi(**{name: "evil.io/x"})) == ""


def test_many_volumes_stay_within_the_budget_of_an_expression(asking: Admission) -> None:
    volumes = [csi(references=",".join(GOOD[:4])) for _ in range(100)] + [image(GOOD[0]) for _ in range(100)]
    assert asking.refusal(*volumes) == ""
    assert "evil.io/x" in asking.refusal(*volumes, csi(reference="evil.io/x"))


def test_without_the_list_nothing_is_allowed(policed: Rig, asking: Admission) -> None:
    config = policed.api.get("ConfigMap", "unlade-policies", "unlade-system")
    policed.api.patch("ConfigMap", "unlade-policies", {"data": None}, "unlade-system")
    until("an empty list", lambda: "allowed: none" in asking.refusal(image(GOOD[0])))
    policed.api.delete("ConfigMap", "unlade-policies", "unlade-system")
    until("no list", lambda: "no params found" in asking.refusal(image(GOOD[0])))
    config["metadata"] = {"name": "unlade-policies", "namespace": "unlade-system"}
    policed.api.create(config)
    until("the list again", lambda: not asking.refusal(image(GOOD[0])))


def test_what_writable_volumes_start_with(policed: Rig, asking: Admission) -> None:
    assert asking.refusal_of(source(*GOOD)) == ""
    assert asking.refusal_of(claim(reference=GOOD[0], references=",".join(GOOD))) == ""
    assert asking.refusal_of(claim(platform="linux/arm64")) == ""
    for evil in (*BAD[1:30], f"{GOOD[0]} evil.io/x", " " + GOOD[0]):
        assert "registries.unlade.dev" in asking.refusal_of(source(GOOD[0], evil)), evil
    for evil in BAD[1:30]:
        assert "registries.unlade.dev" in asking.refusal_of(claim(reference=evil)), evil
        assert "registries.unlade.dev" in asking.refusal_of(claim(references=f"{GOOD[0]}\n{evil}")), evil
    before = Admission(policed, OLD.namespace)
    touched: Json = {"metadata": {"labels": {"touched": "yes"}}}
    for thing in (source(), claim()):
        assert before.refusal_to(thing, touched) == ""
    assert "elsewhere.io" in before.refusal_to(source(), {"spec": {"references": ["elsewhere.io/x"]}})
    moved = {"metadata": {"annotations": {"unlade.dev/reference": "elsewhere.io/x"}}}
    added = {"metadata": {"annotations": {"unlade.dev/references": "evil.io/x"}}}
    for change in (moved, added):
        assert "registries.unlade.dev" in before.refusal_to(claim(), change)


def test_digests(policed: Rig, apart: Admission) -> None:
    policed.api.patch(
        "Namespace", apart.namespace, {"metadata": {"labels": {"unlade.dev/digests": "required"}}}
    )
    good = GOOD[0] + DIGEST
    until("the label is seen", lambda: "by digest" in apart.refusal(image(GOOD[0])))
    assert apart.refusal(image(good), csi(reference=good), csi(references=f"{good}, {good}")) == ""
    for reference in (
        GOOD[0],
        GOOD[0] + "@",
        GOOD[0] + DIGEST[:-1],
        GOOD[0] + DIGEST + "x",
        good + "@" + good,
    ):
        assert apart.refusal(image(reference)), reference
        assert apart.refusal(csi(references=f"{good} {reference}")), reference
        assert apart.refusal(csi(reference=good, references=reference)), reference
    assert "by digest" in apart.refusal(csi(references=f"{good} {GOOD[0]}"))
    assert "by digest" in apart.refusal(csi(reference=good, references=GOOD[0]))
    assert apart.refusal_of(source(good, good)) == ""
    assert apart.refusal_of(claim(references=f"{good},{good}")) == ""
    assert "by digest" in apart.refusal_of(source(good, GOOD[0]))
    assert "by digest" in apart.refusal_of(claim(references=f"{good} {GOOD[0]}"))


def test_workloads_are_stopped_at_their_pods(policed: Rig, apart: Admission) -> None:
    template = apart.pod(image("evil.io/x"))
    policed.api.create(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "evil", "namespace": apart.namespace},
            "spec": {"template": {"spec": {**template["spec"], "restartPolicy": "Never"}}},
        }
    )

    def told() -> bool:
        events = policed.api.list("Event", apart.namespace)
        return any("evil.io/x" in e["message"] and e["reason"] == "FailedCreate" for e in events)

    until("the job says why it has no pod", told)
    assert policed.api.list("Pod", apart.namespace) == []


def test_volumes_cannot_be_changed_afterwards(policed: Rig, apart: Admission) -> None:
    made = policed.api.create(apart.pod(csi(reference=GOOD[0])))
    name = made["metadata"]["name"]
    swap = [{"op": "replace", "path": "/spec/volumes/0/csi/volumeAttributes/reference", "value": "evil.io/x"}]
    with pytest.raises(ApiError) as caught:
        policed.api.patch("Pod", name, swap, apart.namespace)
    assert caught.value.status == 422


TEMPLATE = {
    "ephemeral": {
        "volumeClaimTemplate": {
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
            }
        }
    }
}


def test_forbidden_by_label(policed: Rig, apart: Admission) -> None:
    assert apart.refusal(TEMPLATE) == ""

    def label(value: str | None) -> None:
        labels = {"metadata": {"labels": {"unlade.dev/ephemeral-volumes": value}}}
        policed.api.patch("Namespace", apart.namespace, labels)

    label("forbidden")
    until("the label is seen", lambda: apart.refusal({"emptyDir": {}}, TEMPLATE))
    words = apart.refusal({"emptyDir": {}}, TEMPLATE)
    assert f"forbidden in namespace {apart.namespace}: v1" in words
    claim = {"persistentVolumeClaim": {"claimName": "x"}}
    assert apart.refusal({"emptyDir": {}}, claim) == ""
    for value in ("allowed", None):
        label(value)
        until("the label is seen", lambda: not apart.refusal(TEMPLATE))


def _debug(rig: Rig, namespace: str, pod: str, **more: Any) -> Json:
    """Add an ephemeral container, as `kubectl debug` does."""
    path = rig.api.path("Pod", namespace, pod) + "/ephemeralcontainers"
    now = rig.api.request("GET", rig.api.path("Pod", namespace, pod))["spec"].get("ephemeralContainers", [])
    added = {"name": f"debug-{len(now)}", "image": MODEL, **more}
    body = {"spec": {"ephemeralContainers": [*now, added]}}
    done = rig.api.request("PATCH", path, body=body, content_type="application/strategic-merge-patch+json")
    found: Json = done["spec"]["ephemeralContainers"][-1]
    return found


def test_refused_without_always(policed: Rig, asking: Admission) -> None:
    assert asking.refusal(image(MODEL), csi(reference=MODEL)) == ""
    for policy in ("IfNotPresent", "Never", None):
        assert "v0" in asking.refusal(image(MODEL, policy))
    missing = csi(reference=MODEL)
    del missing["csi"]["volumeAttributes"]["pullPolicy"]
    shouted: Json = {**missing, "csi": {**missing["csi"], "driver": "OCI.UNLADE.DEV"}}
    none: Json = {"csi": {"driver": "oci.unlade.dev"}}
    for volume in (missing, shouted, none):
        assert "pullPolicy must be Always; it is not in volumes v0" in asking.refusal(volume)
    for policy in ("always", "Always ", "IfNotPresent", "Never", ""):
        assert "it is not in volumes v1" in asking.refusal(
            {"emptyDir": {}}, csi(reference=MODEL, pullPolicy=policy)
        )
    other = {"name": "other", "image": MODEL}
    main = asking.pod()["spec"]["containers"][0]
    assert "other" in asking.refusal(containers=[main, {**other, "imagePullPolicy": "IfNotPresent"}])
    assert "other" in asking.refusal(initContainers=[other])
    assert asking.refusal(initContainers=[{**other, "imagePullPolicy": "Always"}]) == ""


def test_a_pods_later_containers_and_images(policed: Rig, apart: Admission) -> None:
    made = policed.api.create(apart.pod())["metadata"]["name"]
    with pytest.raises(ApiError, match="debug-0"):
        _debug(policed, apart.namespace, made, imagePullPolicy="IfNotPresent")
    assert _debug(policed, apart.namespace, made, imagePullPolicy="Always")["imagePullPolicy"] == "Always"
    change = [{"op": "replace", "path": "/spec/containers/0/image", "value": "elsewhere.example.com/x"}]
    policed.api.patch("Pod", made, change, apart.namespace)


def test_always_is_set_and_pods_from_before_live_on(policed: Rig, asking: Admission, old: Old) -> None:
    lax = {"name": "main", "image": MODEL, "imagePullPolicy": "IfNotPresent"}
    apply(policed, "pull-always.yaml")
    until(
        "the policy is in force",
        lambda: asking.ask(containers=[lax])["spec"]["containers"][0]["imagePullPolicy"] == "Always",
    )
    _sets_always(asking)
    _old_pods_live_on(policed, old.namespace, old.name)
    system = Admission(policed, "kube-system")
    until("an account", lambda: policed.api.get("ServiceAccount", "default", "kube-system"))
    assert system.ask(containers=[lax])["spec"]["containers"][0]["imagePullPolicy"] == "IfNotPresent"


def _sets_always(asking: Admission) -> None:
    bare: Json = {
        "csi": {"driver": "oci.unlade.dev", "volumeAttributes": {"reference": MODEL, "exec": "true"}}
    }
    nothing: Json = {"csi": {"driver": "oci.unlade.dev"}}
    foreign: Json = {"csi": {"driver": "other.example.com", "volumeAttributes": {"pullPolicy": "Never"}}}
    one = {"name": "one", "image": MODEL, "imagePullPolicy": "Never"}
    seen = asking.ask(
        {"emptyDir": {}},
        image(MODEL, None),
        image(MODEL, "Never"),
        csi(reference=MODEL, pullPolicy="never"),
        bare,
        nothing,
        foreign,
        image(MODEL),
        containers=[one, {"name": "two", "image": f"{MODEL}@sha256:" + "0a" * 32}],
        initContainers=[
            {"name": "first", "image": MODEL},
            {**one, "name": "beside", "restartPolicy": "Always"},
        ],
    )["spec"]
    for kind in ("containers", "initContainers"):
        assert [c["imagePullPolicy"] for c in seen[kind]] == ["Always", "Always"]
    assert [c["name"] for c in seen["containers"]] == ["one", "two"]
    assert seen["initContainers"][1]["restartPolicy"] == "Always"
    sources = [{k: v for k, v in volume.items() if k != "name"} for volume in seen["volumes"]]
    always = {"driver": "oci.unlade.dev", "volumeAttributes": {"reference": MODEL, "pullPolicy": "Always"}}
    assert sources[:3] == [{"emptyDir": {}}, image(MODEL), image(MODEL)]
    assert sources[3] == {"csi": {**always, "readOnly": True}}
    assert sources[4]["csi"]["volumeAttributes"] == {
        "reference": MODEL,
        "exec": "true",
        "pullPolicy": "Always",
    }
    assert sources[5]["csi"]["volumeAttributes"] == {"pullPolicy": "Always"}
    assert sources[6:8] == [foreign, image(MODEL)]


def _old_pods_live_on(rig: Rig, namespace: str, old: str) -> None:
    rig.api.patch("Pod", old, {"metadata": {"labels": {"touched": "yes"}}}, namespace)
    with pytest.raises(ApiError, match="imagePullPolicy must be Always"):
        change = [{"op": "replace", "path": "/spec/containers/0/image", "value": "elsewhere.example.com/x"}]
        rig.api.patch("Pod", old, change, namespace)
    assert _debug(rig, namespace, old)["imagePullPolicy"] == "Always"
    assert _debug(rig, namespace, old, imagePullPolicy="Never")["imagePullPolicy"] == "Always"
    policies = [
        c["imagePullPolicy"] for c in rig.api.get("Pod", old, namespace)["spec"]["ephemeralContainers"]
    ]
    assert policies == ["Always", "Always"]
