"""Scripts that are run once with the built-in controller and once with ours (E6).

A scenario has a namespace of its own and a few steps; all scenarios take their first step, then the cluster
settles, then all take their second, and so on. After each step the claims and the controller's events are
written down. A step names the claims that must exist when it has settled: that is what is waited for, and
what says what the scenario is about; that both controllers reach it is the first half of the comparison.

Pods here name a scheduler that does not exist: they stay pending and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rig.kube import Api, ApiError, Json

GROUP = "example.test/hold"


def template(storage: str = "1Mi", **over: Any) -> Json:
    """A claim template; `labels` and `annotations` go to its metadata, the rest over its spec."""
    metadata = {key: over.pop(key) for key in ("labels", "annotations", "name") if key in over}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}, **over}
    return {"metadata": metadata, "spec": {key: value for key, value in spec.items() if value is not None}}


class World:
    """What a step may do: requests in the scenario's namespace; refusals are part of the outcome."""

    def __init__(self, api: Api, namespace: str, classes: dict[str, str]) -> None:
        self.api = api
        self.namespace = namespace
        self.classes = classes
        self.refusals: list[str] = []

    def pod(self, name: str, volumes: dict[str, Json] | list[str], **over: Any) -> None:
        """Creates a pod; a list of volume names means the plain template for each."""
        templates = volumes if isinstance(volumes, dict) else {volume: template() for volume in volumes}
        metadata = {"name": name, **over.pop("metadata", {})}
        extra = over.pop("extra_volumes", [])
        sources = [{"name": v, "ephemeral": {"volumeClaimTemplate": t}} for v, t in templates.items()]
        spec = {**pod_spec([*extra, *sources]), **over}
        self.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def claim(self, name: str, **metadata: Any) -> None:
        """Creates a claim by hand."""
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **template()}
        self.create({**body, "metadata": {"name": name, **metadata}})

    def create(self, thing: Json) -> None:
        """Creates anything in the namespace."""
        body = {**thing, "metadata": {**thing["metadata"], "namespace": self.namespace}}
        self._try(lambda: self.api.create(body))

    def delete(self, kind: str, name: str, policy: str = "Background") -> None:
        """Deletes with a propagation policy."""
        path = self.api.path(kind, self.namespace, name)
        query = {"propagationPolicy": policy, "gracePeriodSeconds": "0"}
        self._try(lambda: self.api.request("DELETE", path, query=query))

    def patch(self, kind: str, name: str, change: Any) -> None:
        """A merge patch."""
        self._try(lambda: self.api.patch(kind, name, change, self.namespace))

    def finish(self, pod: str, phase: str = "Succeeded") -> None:
        """Sets a pod's phase, as its kubelet would."""
        path = self.api.path("Pod", self.namespace, pod) + "/status"
        body = {"status": {"phase": phase}}
        form = "application/merge-patch+json"
        self._try(lambda: self.api.request("PATCH", path, body=body, content_type=form))

    def uid(self, kind: str, name: str) -> str:
        """The UID of an object that exists."""
        return str(self.api.get(kind, name, self.namespace)["metadata"]["uid"])

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except ApiError as error:
            self.refusals.append(f"{error.status} {error.reason}: {error.message}")


def pod_spec(volumes: list[Json]) -> Json:
    """A pod that no scheduler takes."""
    return {
        "schedulerName": "nobody",
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "main", "image": "none.invalid/none:1"}],
        "volumes": volumes,
    }


Act = Callable[[World], None]


def both(first: Act, second: Act) -> Act:
    """Two actions, the second at once after the first."""

    def act(w: World) -> None:
        first(w)
        second(w)

    return act


def each(action: Callable[[World, int], None], count: int) -> Act:
    """One action for each number."""

    def act(w: World) -> None:
        for number in range(count):
            action(w, number)

    return act


@dataclass(frozen=True)
class Step:
    """One action, and the claims that exist once it has settled."""

    act: Act
    claims: tuple[str, ...]


@dataclass(frozen=True)
class Scenario:
    """`timing`: events that come or not depending on how fast the garbage collector is."""

    name: str
    steps: tuple[Step, ...]
    timing: bool = False


@dataclass
class Collection:
    """The scenarios in order, by name."""

    all: dict[str, Scenario] = field(default_factory=dict)

    def add(self, name: str, *steps: tuple[Act, tuple[str, ...]], timing: bool = False) -> None:
        assert name not in self.all, name
        self.all[name] = Scenario(name, tuple(Step(act, claims) for act, claims in steps), timing)


SCENARIOS = Collection()
_add = SCENARIOS.add


def _shapes() -> None:
    """One step each: what a template may say, and what becomes of it."""

    def one(name: str, **over: Any) -> None:
        _add(name, (lambda w: w.pod("p", {"v": template(**over)}), ("p-v",)))

    one("plain")
    one("labels", labels={"app": "x", "example.test/tier": ""})
    one("annotations", annotations={"note": "grüße ☃", "long": "x" * 5000})
    one("labels-and-annotations", labels={"a": "1"}, annotations={"b": "2"})
    one("class-missing", storageClassName="no-such-class")
    one("class-empty", storageClassName="")
    one("block", volumeMode="Block")
    one("filesystem", volumeMode="Filesystem")
    one("rwx", accessModes=["ReadWriteMany"])
    one("rwop", accessModes=["ReadWriteOncePod"])
    one("two-modes", accessModes=["ReadOnlyMany", "ReadWriteOnce"])
    one("selector-labels", selector={"matchLabels": {"disk": "ssd"}})
    one("selector-expression", selector={"matchExpressions": [{"key": "disk", "operator": "Exists"}]})
    one("limits", resources={"requests": {"storage": "1Gi"}, "limits": {"storage": "2Gi"}})
    one("quantity-fraction", storage="1.5Gi")
    one("quantity-exponent", storage="1e9")
    one("quantity-milli", storage="1000000m")
    one("volume-name", volumeName="a-volume-that-is-not-there")
    one("attributes-class", volumeAttributesClassName="gold")
    one("data-source-claim", dataSource={"kind": "PersistentVolumeClaim", "name": "src"})
    one(
        "data-source-snapshot",
        dataSource={"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "snap"},
    )
    one("data-source-ref", dataSourceRef={"apiGroup": "example.test", "kind": "Content", "name": "model"})
    _add("class-default", (lambda w: w.pod("p", {"v": template(storageClassName=None)}), ("p-v",)))
    _add(
        "class-late",
        (lambda w: w.pod("p", {"v": template(storageClassName=w.classes["late"])}), ("p-v",)),
    )
    _add(
        "class-immediate",
        (lambda w: w.pod("p", {"v": template(storageClassName=w.classes["immediate"])}), ("p-v",)),
    )


def _pods() -> None:
    """One or two steps: what a pod may look like."""
    _add("two-volumes", (lambda w: w.pod("p", ["v", "w"]), ("p-v", "p-w")))
    eight = [f"v{number}" for number in range(8)]
    _add("eight-volumes", (lambda w: w.pod("p", eight), tuple(f"p-{v}" for v in eight)))
    different = {"small": template("1Mi", labels={"s": "1"}), "large": template("1Ti", volumeMode="Block")}
    _add("different-volumes", (lambda w: w.pod("p", different), ("p-large", "p-small")))
    others: list[Json] = [
        {"name": "cache", "emptyDir": {}},
        {"name": "host", "hostPath": {"path": "/tmp"}},
        {"name": "content", "image": {"reference": "none.invalid/none:1"}},
        {"name": "own", "persistentVolumeClaim": {"claimName": "another"}},
    ]
    _add("among-other-volumes", (lambda w: w.pod("p", ["v"], extra_volumes=others), ("p-v",)))
    itself: list[Json] = [{"name": "own", "persistentVolumeClaim": {"claimName": "p-v"}}]
    _add("invalid-names-its-own-claim", (lambda w: w.pod("p", ["v"], extra_volumes=itself), ()))
    _add("no-ephemeral-volume", (lambda w: w.pod("p", [], extra_volumes=others), ()))
    _add("dots-in-name", (lambda w: w.pod("a.b.c", ["v"]), ("a.b.c-v",)))
    _add("digits", (lambda w: w.pod("0", ["1"]), ("0-1",)))
    long_volume = "v" * 63
    _add("long-volume-name", (lambda w: w.pod("p", [long_volume]), (f"p-{long_volume}",)))
    longest = "p" * 251
    _add("longest-name", (lambda w: w.pod(longest, ["v"]), (f"{longest}-v",)))
    _add("invalid-name-too-long", (lambda w: w.pod("p" * 252, ["v"]), ()))
    _add("three-pods", (each(lambda w, n: w.pod(f"p{n}", ["v"]), 3), ("p0-v", "p1-v", "p2-v")))
    gates = [{"name": "example.test/wait"}]
    _add("gated", (lambda w: w.pod("p", ["v"], schedulingGates=gates), ("p-v",)))

    def stateful(w: World) -> None:
        sources = [{"name": "v", "ephemeral": {"volumeClaimTemplate": template(labels={"set": "yes"})}}]
        w.create(
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": "s"},
                "spec": {
                    "serviceName": "s",
                    "replicas": 3,
                    "podManagementPolicy": "Parallel",
                    "selector": {"matchLabels": {"app": "s"}},
                    "template": {"metadata": {"labels": {"app": "s"}}, "spec": pod_spec(sources)},
                },
            }
        )

    _add(
        "stateful-set",
        (stateful, ("s-0-v", "s-1-v", "s-2-v")),
        (lambda w: w.delete("Pod", "s-1"), ("s-0-v", "s-1-v", "s-2-v")),
        timing=True,
    )
    _add(
        "pod-updates",
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (each(lambda w, n: w.patch("Pod", "p", {"metadata": {"labels": {"n": str(n)}}}), 5), ("p-v",)),
    )
    _add(
        "pod-finished",
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (lambda w: w.finish("p"), ("p-v",)),
        (lambda w: w.delete("PersistentVolumeClaim", "p-v"), ("p-v",)),
    )


def _collisions() -> None:
    """Names that meet (E3)."""
    claim = ("PersistentVolumeClaim",)
    human = (lambda w: w.claim("p-v", labels={"by": "hand"}), ("p-v",))
    _add("human-claim", human, (lambda w: w.pod("p", ["v"]), ("p-v",)))
    _add(
        "human-claim-goes",
        human,
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (lambda w: w.delete(*claim, "p-v"), ("p-v",)),
    )
    _add(
        "human-claim-stays-after-pod",
        human,
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (lambda w: w.delete("Pod", "p"), ("p-v",)),
    )
    _add(
        "human-claim-edited",
        human,
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (lambda w: w.patch(*claim, "p-v", {"metadata": {"labels": {"by": "another"}}}), ("p-v",)),
    )

    def adopt(w: World) -> None:
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": w.uid("Pod", "p"), "controller": True}
        w.patch(*claim, "p-v", {"metadata": {"ownerReferences": [owner]}})

    _add("human-claim-adopted", human, (lambda w: w.pod("p", ["v"]), ("p-v",)), (adopt, ("p-v",)))
    _add(
        "pods-meet",
        (lambda w: w.pod("a-b", ["c"]), ("a-b-c",)),
        (lambda w: w.pod("a", ["b-c"]), ("a-b-c",)),
    )
    _add(
        "pods-meet-reversed",
        (lambda w: w.pod("a", ["b-c"]), ("a-b-c",)),
        (lambda w: w.pod("a-b", ["c"]), ("a-b-c",)),
    )
    _add(
        "pods-meet-first-goes",
        (lambda w: w.pod("a-b", ["c"]), ("a-b-c",)),
        (lambda w: w.pod("a", ["b-c"]), ("a-b-c",)),
        (lambda w: w.delete("Pod", "a-b"), ("a-b-c",)),
    )
    _add(
        "three-pods-meet",
        (lambda w: w.pod("a", ["b-c-d"]), ("a-b-c-d",)),
        (both(lambda w: w.pod("a-b", ["c-d"]), lambda w: w.pod("a-b-c", ["d"])), ("a-b-c-d",)),
        (both(lambda w: w.delete("Pod", "a"), lambda w: w.delete("Pod", "a-b")), ("a-b-c-d",)),
        timing=True,
    )
    _add(
        "second-volume-collides",
        (lambda w: w.claim("p-b"), ("p-b",)),
        (lambda w: w.pod("p", ["a", "b", "c"]), ("p-a", "p-b")),
        (lambda w: w.delete(*claim, "p-b"), ("p-a", "p-b", "p-c")),
    )
    _add(
        "first-volume-collides",
        (lambda w: w.claim("p-a"), ("p-a",)),
        (lambda w: w.pod("p", ["a", "b"]), ("p-a",)),
        (lambda w: w.delete(*claim, "p-a"), ("p-a", "p-b")),
    )

    def owned(w: World, kind: str, name: str, *, controller: bool | None) -> None:
        owner: Json = {"apiVersion": "v1", "kind": kind, "name": name, "uid": w.uid(kind, name)}
        if controller is not None:
            owner["controller"] = controller
        w.claim("p-v", ownerReferences=[owner])

    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
    _add(
        "claim-of-a-config-map",
        (lambda w: w.create(config), ()),
        (lambda w: owned(w, "ConfigMap", "c", controller=True), ("p-v",)),
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (lambda w: w.delete("ConfigMap", "c"), ("p-v",)),
    )

    def plain_pod(w: World) -> None:
        w.pod("q", [], extra_volumes=[{"name": "x", "emptyDir": {}}])

    _add(
        "claim-of-another-pod",
        (plain_pod, ()),
        (lambda w: owned(w, "Pod", "q", controller=True), ("p-v",)),
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
    )
    _add(
        "owner-but-not-controller",
        (lambda w: w.claim("p-v"), ("p-v",)),
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (
            lambda w: w.patch(
                *claim,
                "p-v",
                {
                    "metadata": {
                        "ownerReferences": [
                            {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": w.uid("Pod", "p")}
                        ]
                    }
                },
            ),
            ("p-v",),
        ),
    )


def _endings() -> None:
    """Pods and claims that go (E2)."""
    claim = ("PersistentVolumeClaim",)
    made = (lambda w: w.pod("p", ["v", "w"]), ("p-v", "p-w"))
    held = (lambda w: w.pod("p", ["v"], metadata={"finalizers": [GROUP]}), ("p-v",))

    def let_go(kind: str, name: str) -> Act:
        return lambda w: w.patch(kind, name, {"metadata": {"finalizers": None}})

    _add("pod-deleted", made, (lambda w: w.delete("Pod", "p"), ()))
    _add("pod-deleted-foreground", made, (lambda w: w.delete("Pod", "p", "Foreground"), ()))
    _add("pod-deleted-orphan", made, (lambda w: w.delete("Pod", "p", "Orphan"), ("p-v", "p-w")))
    _add(
        "pod-recreated-after-orphan",
        made,
        (lambda w: w.delete("Pod", "p", "Orphan"), ("p-v", "p-w")),
        (lambda w: w.pod("p", ["v", "w"]), ("p-v", "p-w")),
    )
    _add(
        "pod-terminating",
        held,
        (lambda w: w.delete("Pod", "p"), ("p-v",)),
        (let_go("Pod", "p"), ()),
    )
    _add(
        "claim-deleted-while-terminating",
        held,
        (lambda w: w.delete("Pod", "p"), ("p-v",)),
        (lambda w: w.delete(*claim, "p-v"), ()),
        (let_go("Pod", "p"), ()),
    )
    _add(
        "collision-ends-while-terminating",
        (lambda w: w.claim("p-v"), ("p-v",)),
        (lambda w: w.pod("p", ["v"], metadata={"finalizers": [GROUP]}), ("p-v",)),
        (lambda w: w.delete("Pod", "p"), ("p-v",)),
        (lambda w: w.delete(*claim, "p-v"), ()),
    )
    _add(
        "pod-recreated",
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (both(lambda w: w.delete("Pod", "p"), lambda w: w.pod("p", ["v"])), ("p-v",)),
        timing=True,
    )
    _add(
        "pod-recreated-with-other-volumes",
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (both(lambda w: w.delete("Pod", "p"), lambda w: w.pod("p", ["w"])), ("p-w",)),
    )
    _add(
        "pod-recreated-without-volumes",
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (both(lambda w: w.delete("Pod", "p"), lambda w: w.pod("p", [])), ()),
    )
    _add(
        "pod-recreated-later",
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (lambda w: w.delete("Pod", "p"), ()),
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
    )
    _add("claim-deleted", made, (lambda w: w.delete(*claim, "p-v"), ("p-v", "p-w")))
    _add(
        "claims-deleted",
        made,
        (both(lambda w: w.delete(*claim, "p-v"), lambda w: w.delete(*claim, "p-w")), ("p-v", "p-w")),
        (lambda w: w.delete(*claim, "p-w"), ("p-v", "p-w")),
    )
    _add(
        "claim-held-then-deleted",
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (lambda w: w.patch(*claim, "p-v", {"metadata": {"finalizers": [GROUP]}}), ("p-v",)),
        (lambda w: w.delete(*claim, "p-v"), ("p-v",)),
        (let_go("PersistentVolumeClaim", "p-v"), ("p-v",)),
    )
    _add(
        "claim-and-pod-deleted",
        made,
        (both(lambda w: w.delete(*claim, "p-v"), lambda w: w.delete("Pod", "p")), ()),
    )
    _add(
        "claim-edited",
        (lambda w: w.pod("p", {"v": template(labels={"a": "1"})}), ("p-v",)),
        (
            lambda w: w.patch(*claim, "p-v", {"metadata": {"labels": {"a": "2"}, "annotations": {"b": "3"}}}),
            ("p-v",),
        ),
    )
    _add(
        "owner-taken-away",
        (lambda w: w.pod("p", ["v"]), ("p-v",)),
        (lambda w: w.patch(*claim, "p-v", {"metadata": {"ownerReferences": None}}), ("p-v",)),
        (lambda w: w.delete("Pod", "p"), ("p-v",)),
        timing=True,  # a restarted controller sees the conflict, one that runs on does not look
    )

    def delete_namespace(w: World) -> None:
        w.api.delete("Namespace", w.namespace)

    _add("namespace-deleted", made, (delete_namespace, ()))
    # the namespace controller takes pods first and waits for them: the claim stays as long as the pod does
    _add("namespace-deleted-pod-held", held, (delete_namespace, ("p-v",)), (let_go("Pod", "p"), ()))


def _refusals() -> None:
    """What the API server does not let through (E4)."""
    claim = ("PersistentVolumeClaim",)

    def quota(**hard: str) -> Act:
        hard_named = {key.replace("__", "/").replace("_", "."): value for key, value in hard.items()}
        body = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "q"},
            "spec": {"hard": hard_named},
        }
        return lambda w: w.create(body)

    _add("quota-none", (quota(persistentvolumeclaims="0"), ()), (lambda w: w.pod("p", ["v"]), ()))
    _add(
        "quota-lifted",
        (quota(persistentvolumeclaims="0"), ()),
        (lambda w: w.pod("p", ["v"]), ()),
        (lambda w: w.delete("ResourceQuota", "q"), ("p-v",)),
    )
    _add(
        "quota-for-one-of-two",
        (quota(persistentvolumeclaims="1"), ()),
        (lambda w: w.pod("p", ["v", "w"]), ("p-v",)),
    )
    _add(
        "quota-of-storage",
        (quota(requests_storage="10Mi"), ()),
        (lambda w: w.pod("p", {"v": template("11Mi")}), ()),
    )

    def limits(**bounds: Json) -> Act:
        limit = {"type": "PersistentVolumeClaim", **bounds}
        return lambda w: w.create(
            {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"}, "spec": {"limits": [limit]}}
        )

    _add("limit-most", (limits(max={"storage": "1Ki"}), ()), (lambda w: w.pod("p", ["v"]), ()))
    _add("limit-least", (limits(min={"storage": "1Gi"}), ()), (lambda w: w.pod("p", ["v"]), ()))
    denied = {"v": template(labels={"deny": "yes"})}
    _add("policy-denies", (lambda w: w.pod("p", denied), ()))
    _add("policy-denies-second", (lambda w: w.pod("p", {"a": template(), **denied}), ("p-a",)))
    invalid: dict[str, Json] = {
        "no-access-mode": template(accessModes=[]),
        "no-request": template(resources={}),
        "negative": template("-1Gi"),
        "bad-label": template(labels={"no spaces": "x"}),
        "named": template(name="mine"),
        "bad-mode": template(accessModes=["Sometimes"]),
        "bad-class": template(storageClassName="Not A Name"),
    }

    def invalid_pod(bad: Json) -> Act:
        return lambda w: w.pod("p", {"v": bad})

    for name, bad in invalid.items():
        _add(f"invalid-{name}", (invalid_pod(bad), ()))
    _add(
        "refused-then-pod-goes",
        (quota(persistentvolumeclaims="0"), ()),
        (lambda w: w.pod("p", ["v"]), ()),
        (lambda w: w.delete("Pod", "p"), ()),
        (lambda w: w.delete("ResourceQuota", "q"), ()),
    )
    _add(
        "quota-counts-a-human-claim",
        (quota(persistentvolumeclaims="1"), ()),
        (lambda w: w.claim("other"), ("other",)),
        (lambda w: w.pod("p", ["v"]), ("other",)),
        (lambda w: w.delete(*claim, "other"), ("p-v",)),
    )


_shapes()
_pods()
_collisions()
_endings()
_refusals()
