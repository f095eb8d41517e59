"""Inline volumes with a stock kubelet and a directory store: what pods see, and keep seeing.

V1 to V5, V7, V8, V10, V14, V15, V17. containerd runs the pods and nothing else: the driver is not told where
its socket is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
from collections.abc import Iterable

from rig.cluster import USERS, Rig
from rig.kube import until
from rig.pods import Namespace, Pod
from tests.corpus import Artifact, corpus
from tests.corpus.pushing import push
from tests.rig.csi.conftest import inline
from unlade.csi.service import CsiService
from unlade.errors import NothingProduced
from unlade.mount.table import read_table
from unlade.planning import PlanOptions
from unlade.tree import fsck

# Digest or target, then path, of every file and link below each volume.
LIST = (
    "for v in /data/*; do cd $v; "
    'find . -type f -exec sha256sum {} + | sed "s|^|$v |"; '
    'for l in $(find . -type l); do echo "$v -> $(readlink $l) $l"; done; done'
)
# Pods mount several artifacts each: a pod takes seconds, a volume milliseconds.
VOLUMES = 12


def _chosen(full: bool) -> list[Artifact]:
    """What an inline volume can ask for: all in a full run, else one of each family and some more."""
    found = [
        one
        for one in corpus()
        if one.tree
        and one.options == PlanOptions(unpack=one.options.unpack)
        and not one.artifact_type
        and not one.annotations
        # A layer that stays at another address: this registry refuses it.
        and "foreign" not in one.name
    ]
    if full:
        return found
    dice = random.Random(20261115)
    dice.shuffle(found)
    firsts = {one.family: one for one in found}
    rest = [one for one in found if one is not firsts[one.family]]
    return [*firsts.values(), *rest][:VOLUMES]


def _expected(artifact: Artifact) -> set[str]:
    assert artifact.tree
    lines = set()
    for path, node in artifact.tree.items():
        if node.content is not None:
            lines.add(f"{hashlib.sha256(node.content).hexdigest()}  ./{path}")
        elif node.target is not None:
            lines.add(f"-> {node.target} ./{path}")
    return lines


def test_every_format_family_arrives_whole(
    cluster: Rig, service: CsiService, namespace: Namespace, full: bool
) -> None:
    chosen = _chosen(full)
    families = {one.family for one in chosen}
    assert families >= {"image", "oras", "helm", "flux", "modelpack", "kitops", "ollama", "wasm", "kpt"}
    for number, start in enumerate(range(0, len(chosen), VOLUMES)):
        _check_pod(cluster, namespace, f"corpus-{number}", chosen[start : start + VOLUMES])


def _check_pod(rig: Rig, namespace: Namespace, name: str, artifacts: Iterable[Artifact]) -> None:
    expected: dict[str, set[str]] = {}
    volumes: dict[str, dict[str, object]] = {}
    for artifact in artifacts:
        repository = f"corpus/{artifact.name}"
        push(rig.registry.address, repository, artifact)
        told = {"platform": artifact.platform}
        if artifact.options.unpack != "auto":
            told["unpack"] = artifact.options.unpack
        volumes[f"/data/{artifact.name}"] = inline(f"{rig.registry.address}/{repository}:v1", **told)
        expected[artifact.name] = _expected(artifact)
    pod = namespace.run(name, command=LIST, volumes=volumes)
    pod.wait("Succeeded", "Failed", seconds=120)
    seen: dict[str, set[str]] = {artifact: set() for artifact in expected}
    for line in pod.logs().splitlines():
        where, _, what = line.partition(" ")
        seen[where.removeprefix("/data/")].add(what)
    assert seen == expected


def test_merged_parts_and_flags(cluster: Rig, service: CsiService, namespace: Namespace) -> None:
    """Two references in their order, a file and a directory of one, and the flags of each mount (V8)."""
    one = cluster.registry.push_artifact("inline/one", {"both": b"one", "a/only-one": b"1"})
    two = cluster.registry.push_artifact("inline/two", {"both": b"two", "a/b/only-two": b"2"})
    tool = cluster.registry.push_artifact("inline/tool", {"run.sh": b"#!/bin/sh\necho ran\n"})
    pod = namespace.run(
        "merged",
        command="""
            cat /merged/both /swapped/both; echo; cd /merged && find . -type f | sort
            cat /file; ls /directory
            touch /merged/x 2>&1 | grep -o 'Read-only file system'
            sleep 1000000
        """,
        volumes={
            "/merged": inline(references=f"{one.reference}, {two.reference}"),
            "/swapped": inline(references=f"{two.reference}\n{one.pinned}"),
            "/file": inline(two.reference, subPath="a/b/only-two"),
            "/directory": inline(two.reference, subPath="a/b"),
            "/tool": inline(tool.reference, exec="true"),
        },
    )
    pod.wait("Running")
    until("all is written", lambda: "Read-only" in pod.logs())
    assert pod.logs().split("\n") == [
        "twoone",
        "./a/b/only-two",
        "./a/only-one",
        "./both",
        "2only-two",
        "Read-only file system",
        "",
    ]
    directory = cluster.node.kubelet_root / "pods" / pod.read()["metadata"]["uid"] / "volumes"
    seen = {}
    for entry in read_table():
        if entry.path.startswith(os.fsencode(directory / "kubernetes.io~csi")):
            seen[entry.path.split(b"/")[-2].decode()] = entry.options & {"ro", "nosuid", "nodev", "noexec"}
    plain = frozenset({"ro", "nosuid", "nodev", "noexec"})
    assert seen == {"v0": plain, "v1": plain, "v2": plain, "v3": plain, "v4": plain - {"noexec"}}


def test_nobody_writes_to_what_is_shared(cluster: Rig, service: CsiService, namespace: Namespace) -> None:
    """A pod that does not say readOnly gets `rw` from the container runtime, over our own flags."""
    artifact = cluster.registry.push_artifact("inline/shared", {"f": b"shared", "d/g": b"too"})
    volumes = {
        "/whole": inline(artifact.reference),
        "/part": inline(artifact.reference, subPath="d"),
        "/file": inline(artifact.reference, subPath="d/g"),
    }
    for volume in volumes.values():
        del volume["csi"]["readOnly"]
    pod = namespace.run(
        "writer",
        command="for f in /whole/f /whole/new /part/g /part/new /file; do echo evil > $f; done 2>&1",
        volumes=volumes,
        container={"securityContext": {"privileged": True}},
    )
    pod.wait("Succeeded", "Failed")
    assert pod.logs().count("Read-only file system") == 5
    reader = namespace.run(
        "after", command="cd /data; cat f d/g; find . -type f", volumes={"/data": inline(artifact.pinned)}
    )
    reader.wait("Succeeded")
    assert sorted(reader.logs().split("\n")) == ["", "./d/g", "sharedtoo./f"]
    assert service.store
    assert fsck(service.store) == []


def test_pull_policies_over_restarts(cluster: Rig, service: CsiService, namespace: Namespace) -> None:
    """A tag moves: new pods see it by their policy, a pod's restarted container never does (V2)."""
    first = cluster.registry.push_artifact("inline/moving", {"f": b"first"})
    # A container that ends when told, and is started again by the kubelet.
    policies = ("Always", "IfNotPresent", "Never")

    def reader(name: str, policy: str) -> Pod:
        return namespace.run(
            name,
            command="cat /data/f; echo; while ! [ -e /tmp/end ]; do sleep 0.1; done",
            volumes={"/data": inline(first.reference, pullPolicy=policy)},
            spec={"restartPolicy": "Always"},
        )

    never = reader("never-yet", "Never")
    never.wait_event("FailedMount", contains="next: ")
    pods = [reader(policy.lower(), policy) for policy in policies[:2]]
    for pod in pods:
        pod.wait_ready()
    # What is here by now is enough for the one that waits.
    never.wait_ready(seconds=200)
    pods.append(never)
    cluster.registry.push_artifact("inline/moving", {"f": b"second"})
    for pod in pods:
        assert pod.logs() == "first\n"
        pod.exec("touch", "/tmp/end")
    for pod in pods:
        until(
            f"{pod.name} was restarted",
            lambda pod=pod: pod.read()["status"]["containerStatuses"][0]["restartCount"] > 0,  # type: ignore[misc]
        )
        until("it reads again", lambda pod=pod: pod.logs() == "first\n")  # type: ignore[misc]
    # Before anybody pulled the new content, and after.
    for name, policy, expected in (
        ("later-missing", "IfNotPresent", "first"),
        ("later-always", "Always", "second"),
        ("later-never", "Never", "second"),
    ):
        pod = reader(name, policy)
        pod.wait_ready()
        assert pod.logs() == f"{expected}\n", policy
    assert [pod.exec("cat", "/data/f") for pod in pods] == ["first"] * 3


def _pull_secret(namespace: Namespace, registry: str, user: str, name: str = "pull") -> None:
    encoded = base64.b64encode(f"{user}:{USERS[user]}".encode()).decode()
    document = json.dumps({"auths": {registry: {"auth": encoded}}}).encode()
    namespace.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "type": "kubernetes.io/dockerconfigjson",
            "data": {".dockerconfigjson": base64.b64encode(document).decode()},
        }
    )


def test_private_content_is_each_namespaces_own(
    cluster: Rig, service: CsiService, namespace: Namespace
) -> None:
    """V4, V5: what one namespace's secret brought to the node is not handed to another without one."""
    artifact = cluster.private_registry.push_artifact("secret/inline", {"f": b"private"})
    _pull_secret(namespace, cluster.private_registry.address, "alice")
    other = Namespace(cluster)
    try:
        for policy in ("Always", "IfNotPresent"):
            volume = {"/data": inline(artifact.reference, secret="pull", pullPolicy=policy)}
            pod = namespace.run(f"may-{policy.lower()}", command="cat /data/f", volumes=volume)
            pod.wait("Succeeded")
            assert pod.logs() == "private"
        refused = [
            other.run(f"bare-{policy.lower()}", volumes={"/data": inline(reference, pullPolicy=policy)})
            for policy, reference in (
                ("Always", artifact.reference),
                ("IfNotPresent", artifact.pinned),
                ("Never", artifact.reference),
            )
        ]
        for pod in refused:
            event = pod.wait_event("FailedMount", contains=artifact.repository)
            assert "next: " in event["message"]
            assert pod.read()["status"]["phase"] == "Pending"
        # Another user's own secret will do: the registry decides, not who was first.
        _pull_secret(other, cluster.private_registry.address, "bob")
        pod = other.run(
            "bob", command="cat /data/f", volumes={"/data": inline(artifact.reference, secret="pull")}
        )
        pod.wait("Succeeded")
        assert pod.logs() == "private"
    finally:
        other.delete()


def test_what_cannot_be_is_said_on_the_pod(cluster: Rig, service: CsiService, namespace: Namespace) -> None:
    """V14, V15: the kubelet's event names what is wrong and the next step."""
    nothing = next(one for one in corpus() if one.error is NothingProduced)
    push(cluster.registry.address, "corpus/nothing", nothing)
    empty = f"{cluster.registry.address}/corpus/nothing:v1"
    artifact = cluster.registry.push_artifact("inline/said", {"f": b"x"})
    missing = f"{cluster.registry.address}/inline/missing:v1"
    cases = {
        "nothing": (inline(empty), "FailedPrecondition", empty),
        "missing": (inline(missing), "NotFound", missing),
        "misspelt": (inline(artifact.reference, pullpolicy="Always"), "InvalidArgument", "pullpolicy"),
        "outside": (inline(artifact.reference, subPath="../x"), "InvalidArgument", "subPath"),
        "no-such": (inline(artifact.reference, subPath="not/there"), "InvalidArgument", "not/there"),
        "bare": (inline(), "InvalidArgument", "reference"),
    }
    pods = {name: namespace.run(name, volumes={"/data": case[0]}) for name, case in cases.items()}
    for name, (_, code, words) in cases.items():
        event = pods[name].wait_event("FailedMount", contains=code)
        assert words in event["message"], event["message"]
        assert "next: " in event["message"]
        assert pods[name].read()["status"]["phase"] == "Pending"
    for pod in pods.values():
        pod.delete()


def test_nothing_is_left_when_the_pods_are_gone(
    cluster: Rig, service: CsiService, namespace: Namespace
) -> None:
    artifact = cluster.registry.push_artifact("inline/left", {"f": b"x"})
    pods = [
        namespace.run(
            f"left-{number}", volumes={"/a": inline(artifact.reference), "/b": inline(artifact.pinned)}
        )
        for number in range(2)
    ]
    for pod in pods:
        pod.wait_ready()
    assert service.holder
    before = service.holder.held()
    uids = [pod.read()["metadata"]["uid"] for pod in pods]
    for pod in pods:
        pod.delete()
    until(
        "the mounts are gone",
        lambda: not any(uid.encode() in entry.path for uid in uids for entry in read_table()),
    )
    until(
        "the leases are gone",
        lambda: len(before) - len(service.holder.held()) == 4,  # type: ignore[union-attr]
    )
