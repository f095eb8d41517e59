"""Artifacts through native `image:` volumes: stock kubelet, stock containerd, our service (V1, V7, V14)."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from rig.cluster import USERS, Rig
from rig.images import tar
from rig.pods import Namespace
from tests.corpus import Artifact, corpus
from tests.corpus.pushing import push
from tests.rig.node.client import Client
from tests.rig.node.conftest import node_config
from unlade.cri.api import images_pb2 as api
from unlade.cri.service import NodeService
from unlade.errors import NothingProduced
from unlade.planning import PlanOptions
from unlade.registry import RegistryConfig

# Digest or target, then path, of every file and link below each volume.
LIST = (
    "for v in /data/*; do cd $v; "
    'find . -type f -exec sha256sum {} + | sed "s|^|$v |"; '
    'for l in $(find . -type l); do echo "$v -> $(readlink $l) $l"; done; done'
)
# Pods mount several artifacts each: a pod takes seconds, a volume milliseconds.
VOLUMES = 12


def test_the_defect_is_gone(served: Rig, namespace: Namespace) -> None:
    """The pod of test_rig_defect, word for word; this time the file is there."""
    artifact = served.registry.push_artifact("models/ended", {"weights.bin": b"\x00\x01" * 512})
    volume = {"/data": {"image": {"reference": artifact.reference, "pullPolicy": "Always"}}}
    pod = namespace.run("artifact", command="cd /data && find . | sort", volumes=volume)
    pod.wait("Succeeded")
    event = pod.wait_event("Pulled", contains=f'"{artifact.reference}"')
    assert "Successfully pulled" in event["message"]
    assert pod.logs() == ".\n./weights.bin\n"


def _chosen(full: bool) -> list[Artifact]:
    """What a pod can read here: all in a full run, else one of each family and some more."""
    found = [one for one in corpus() if one.tree and one.platform == "linux/amd64" and one.family != "image"]
    if full:
        return found
    dice = random.Random(20260301)
    dice.shuffle(found)
    firsts = {one.family: one for one in found}
    rest = [one for one in found if one is not firsts[one.family]]
    return [*firsts.values(), *rest][: 2 * VOLUMES]


def _annotations(group: str, reference: str, artifact: Artifact) -> dict[str, str]:
    """An artifact's options as a pod writes them."""
    options = artifact.options
    told = {
        "unpack": options.unpack if options.unpack != "auto" else "",
        "only": ",".join(options.only),
        "as-file": ",".join(options.as_file),
        "family": options.family or "",
        "artifact-type": artifact.artifact_type or "",
        "annotations": ",".join(f"{key}={value}" for key, value in artifact.annotations.items()),
    }
    set_ = {f"unlade.dev/{group}.{name}": value for name, value in told.items() if value}
    return {**set_, f"unlade.dev/{group}.for": reference} if set_ else {}


def _expected(artifact: Artifact) -> set[str]:
    assert artifact.tree
    lines = set()
    for path, node in artifact.tree.items():
        if node.content is not None:
            lines.add(f"{hashlib.sha256(node.content).hexdigest()}  ./{path}")
        elif node.target is not None:
            lines.add(f"-> {node.target} ./{path}")
    return lines


def test_every_format_family_arrives_whole(served: Rig, namespace: Namespace, full: bool) -> None:
    chosen = _chosen(full)
    assert {one.family for one in chosen} >= {"oras", "helm", "flux", "modelpack", "kitops", "ollama", "wasm"}
    assert full or any(one.options != PlanOptions() for one in chosen)
    for number, start in enumerate(range(0, len(chosen), VOLUMES)):
        _check_pod(served, namespace, f"corpus-{number}", chosen[start : start + VOLUMES])


def _check_pod(rig: Rig, namespace: Namespace, name: str, artifacts: Iterable[Artifact]) -> None:
    expected: dict[str, set[str]] = {}
    volumes: dict[str, dict[str, object]] = {}
    annotations: dict[str, str] = {}
    for number, artifact in enumerate(artifacts):
        repository = f"corpus/{artifact.name}"
        push(rig.registry.address, repository, artifact)
        reference = f"{rig.registry.address}/{repository}:v1"
        volumes[f"/data/{artifact.name}"] = {"image": {"reference": reference}}
        annotations |= _annotations(f"v{number}", reference, artifact)
        expected[artifact.name] = _expected(artifact)
    pod = namespace.run(name, command=LIST, volumes=volumes, metadata={"annotations": annotations})
    pod.wait("Succeeded", "Failed", seconds=120)
    seen: dict[str, set[str]] = {artifact: set() for artifact in expected}
    for line in pod.logs().splitlines():
        where, _, what = line.partition(" ")
        seen[where.removeprefix("/data/")].add(what)
    assert seen == expected


def test_nothing_produced_is_told_with_the_next_step(served: Rig, namespace: Namespace) -> None:
    artifact = next(one for one in corpus() if one.error is NothingProduced)
    push(served.registry.address, "corpus/nothing", artifact)
    reference = f"{served.registry.address}/corpus/nothing:v1"
    pod = namespace.run("nothing", volumes={"/data": {"image": {"reference": reference}}})
    event = pod.wait_event("Failed", contains="next: ")
    assert reference in event["message"]
    assert "FailedPrecondition" in event["message"]
    assert pod.read()["status"]["phase"] == "Pending"


def test_pull_policies_and_digests(served: Rig, namespace: Namespace, ours: Client) -> None:
    artifact = served.registry.push_artifact("models/policies", {"f": b"first"})
    missing = {"/data": {"image": {"reference": artifact.reference, "pullPolicy": "Never"}}}
    namespace.run("never", volumes=missing).wait_event("ErrImageNeverPull")
    for name, reference, policy in (
        ("pinned", artifact.pinned, "IfNotPresent"),
        ("tagged", artifact.reference, "Always"),
        ("never-again", artifact.reference, "Never"),
    ):
        volume = {"/data": {"image": {"reference": reference, "pullPolicy": policy}}}
        pod = namespace.run(name, command="cat /data/f", volumes=volume)
        pod.wait("Succeeded")
        assert pod.logs() == "first"
    seen = ours.status(artifact.reference)
    assert seen is not None
    assert list(seen.repo_digests) == [artifact.pinned]
    assert len(b"first") <= seen.size < 2000  # containerd counts its config and manifest too
    served.registry.push_artifact("models/policies", {"f": b"second"})
    volume = {"/data": {"image": {"reference": artifact.reference, "pullPolicy": "Always"}}}
    pod = namespace.run("moved", command="cat /data/f", volumes=volume)
    pod.wait("Succeeded")
    assert pod.logs() == "second"


def test_sub_path_of_an_artifact(served: Rig, namespace: Namespace) -> None:
    artifact = served.registry.push_artifact("models/deep", {"a/b/f": b"deep", "other": b"x"})
    pod = namespace.run(
        "deep",
        command="ls /data && cat /data/f",
        volumes={"/unused": {"image": {"reference": artifact.reference}}},
        container={"volumeMounts": [{"name": "v0", "mountPath": "/data", "subPath": "a/b"}]},
    )
    pod.wait("Succeeded")
    assert pod.logs() == "f\ndeep"


def _refusal(client: Client, image: str, **more: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        client.pull(image, **more)  # type: ignore[arg-type]
    return caught.value.code(), caught.value.details()


def test_what_is_not_known_is_refused(served: Rig, ours: Client) -> None:
    artifact = served.registry.push_artifact("models/refused", {"f": b"1"})
    code, words = _refusal(ours, artifact.reference, handler="kata")
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "'kata'" in words
    code, words = _refusal(ours, artifact.reference, annotations={"unlade.dev/onyl": "*"})
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "unlade.dev/onyl" in words
    assert ours.status(artifact.reference) is None
    assert ours.pull(artifact.reference, handler="second") in ours.images()


def test_private_artifacts_need_the_pods_secret(served: Rig, namespace: Namespace, ours: Client) -> None:
    """V4, V5: what is here already is asked for again with each caller's own credentials."""
    artifact = served.private_registry.push_artifact("secret/model", {"f": b"private"})
    alice = api.AuthConfig(username="alice", password=USERS["alice"])
    encoded = base64.b64encode(f"bob:{USERS['bob']}".encode()).decode()
    assert _refusal(ours, artifact.reference)[0] != grpc.StatusCode.OK
    pulled = ours.pull(artifact.reference, auth=alice)
    assert ours.pull(artifact.reference, auth=api.AuthConfig(auth=encoded)) == pulled
    wrong = api.AuthConfig(username="alice", password="wrong-password")
    for auth in (None, wrong, api.AuthConfig(username="alice", password="x", server_address="other.example")):
        _, words = _refusal(ours, artifact.reference, auth=auth)
        assert "wrong-password" not in words
    ours.remove(artifact.reference)
    config = {"auths": {served.private_registry.address: {"auth": encoded}}}
    secret = base64.b64encode(json.dumps(config).encode()).decode()
    namespace.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "pull"},
            "type": "kubernetes.io/dockerconfigjson",
            "data": {".dockerconfigjson": secret},
        }
    )
    volume: Mapping[str, dict[str, object]] = {
        "/data": {"image": {"reference": artifact.reference, "pullPolicy": "IfNotPresent"}}
    }
    pod = namespace.run(
        "allowed", command="cat /data/f", volumes=volume, spec={"imagePullSecrets": [{"name": "pull"}]}
    )
    pod.wait("Succeeded")
    assert pod.logs() == "private"
    namespace.run("refused", volumes=volume).wait_event("Failed", contains=artifact.reference)


def test_what_containerd_alone_can_reach(cluster: Rig, direct: Client, tmp_path: Path) -> None:
    """A registry that only containerd knows how to reach: images still come, an artifact never as nothing."""
    config = replace(node_config(cluster, tmp_path), registry=RegistryConfig(attempts=1))
    image = cluster.registry.push_image("node/forwarded", [tar({"f": b"1"})])
    artifact = cluster.registry.push_artifact("node/not-forwarded", {"f": b"1"})
    with NodeService(config):
        client = Client(config.socket)
        assert client.pull(image.reference) in direct.images()
        before = direct.images()
        _, words = _refusal(client, artifact.reference)
        assert "next: " in words
    assert direct.status(artifact.reference) is None
    assert direct.images() == before


def test_what_was_pulled_before_the_service_came(served: Rig, namespace: Namespace, direct: Client) -> None:
    """containerd had the artifact as an empty image; a pod that would use what is there gets the files."""
    artifact = served.registry.push_artifact("models/earlier", {"f": b"earlier"})
    direct.pull(artifact.reference)
    assert direct.status(artifact.reference) is not None
    volume = {"/data": {"image": {"reference": artifact.reference, "pullPolicy": "IfNotPresent"}}}
    pod = namespace.run("earlier", command="cat /data/f", volumes=volume)
    pod.wait("Succeeded")
    assert pod.logs() == "earlier"
