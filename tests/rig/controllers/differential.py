"""Runs all scenarios together, with one controller or the other, and writes down what came of them.

The outcome of a scenario is, step by step: its claims (labels, annotations, spec, who controls them, phase,
whether they are new), the controller's events, and what the API server refused. Names of namespaces and
volumes, UIDs and times are taken out, so that two outcomes can be compared for equality.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from rig.cluster import Rig
from rig.kube import Api, ApiError, Json, until
from rig.local_storage import LocalStorage
from tests.rig.controllers.scenarios import GROUP, Scenario, World

SOURCES = {"ephemeral_volume", "unlade-ephemeral-volumes"}
CALM = 2.0  # nothing new for so long counts as settled: the first retries of a failure come within it
SETTLE = 60.0


class Controller(Protocol):
    """Something that can be stopped and started; `start` does nothing when it runs."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


Snapshot = dict[str, Any]
Outcomes = dict[str, list[Snapshot]]


class Playground:
    """What scenarios need in a cluster besides their namespaces."""

    def __init__(self, rig: Rig) -> None:
        self.api: Api = rig.api
        self.late = LocalStorage(rig)
        self.immediate = LocalStorage(rig, binding="Immediate")
        self.classes = {"late": self.late.name, "immediate": self.immediate.name}
        self.api.create(
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {
                    "name": "usual",
                    "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
                },
                "provisioner": "example.test/nobody",
            }
        )
        self._policy()

    def _policy(self) -> None:
        """A policy that denies claims with the label `deny`."""
        group = "admissionregistration.k8s.io/v1"
        rule = {
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": ["persistentvolumeclaims"],
        }
        expression = "!has(object.metadata.labels) || !('deny' in object.metadata.labels)"
        self.api.create(
            {
                "apiVersion": group,
                "kind": "ValidatingAdmissionPolicy",
                "metadata": {"name": "deny"},
                "spec": {
                    "failurePolicy": "Fail",
                    "matchConstraints": {"resourceRules": [rule]},
                    "validations": [{"expression": expression, "message": "no claims like that"}],
                },
            }
        )
        self.api.create(
            {
                "apiVersion": group,
                "kind": "ValidatingAdmissionPolicyBinding",
                "metadata": {"name": "deny"},
                "spec": {"policyName": "deny", "validationActions": ["Deny"]},
            }
        )
        claim = {
            "metadata": {"name": "denied", "labels": {"deny": "yes"}},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
        }

        def denied() -> bool:
            path = self.api.path("PersistentVolumeClaim", "default")
            try:
                self.api.request("POST", path, query={"dryRun": "All"}, body=claim)
            except ApiError as error:
                return "no claims like that" in error.message
            return False

        until("the policy is in force", denied)


class Run:
    """All scenarios with one controller; `restart` stops it before each step and starts it after."""

    def __init__(
        self,
        playground: Playground,
        scenarios: list[Scenario],
        controller: Controller,
        *,
        prefix: str,
        restart: bool,
    ) -> None:
        self._api = playground.api
        self._controller = controller
        self._restart = restart
        self._scenarios = scenarios
        self._worlds = {s.name: World(self._api, f"{prefix}-{s.name}", playground.classes) for s in scenarios}
        self._by_namespace = {world.namespace: name for name, world in self._worlds.items()}
        self._known: dict[str, set[str]] = {name: set() for name in self._worlds}
        self.outcomes: Outcomes = {name: [] for name in self._worlds}
        self.seconds = 0.0
        playground.immediate.add()

    def play(self) -> Outcomes:
        """Takes every scenario through its steps; the outcomes by name."""
        started = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self._namespace, self._worlds.values()))
            for number in range(max(len(s.steps) for s in self._scenarios)):
                due = [s for s in self._scenarios if number < len(s.steps)]
                if self._restart:
                    self._controller.stop()
                list(pool.map(lambda s, n=number: s.steps[n].act(self._worlds[s.name]), due))
                self._controller.start()
                claims, events = self._settle({s.name: set(s.steps[number].claims) for s in due})
                for scenario in due:
                    self._write_down(scenario.name, claims, events)
                ended = [self._worlds[s.name] for s in due if number + 1 == len(s.steps)]
                list(pool.map(self._delete_pods, ended))
        self.seconds = time.monotonic() - started
        return self.outcomes

    def _delete_pods(self, world: World) -> None:
        """A scenario has ended: what still fails there must not use up the retries of those that go on."""
        query = {"gracePeriodSeconds": "0"}
        if "stateful" in world.namespace:
            self._api.request("DELETE", self._api.path("StatefulSet", world.namespace, version="apps/v1"))
        self._api.request("DELETE", self._api.path("Pod", world.namespace), query=query)

    def _namespace(self, world: World) -> None:
        self._api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": world.namespace}})
        until("account", lambda: self._api.get("ServiceAccount", "default", world.namespace), seconds=60)

    def _settle(self, expected: dict[str, set[str]]) -> tuple[list[Json], list[Json]]:
        """Waits until what is expected is there and nothing new happens; what was seen last otherwise."""
        end = time.monotonic() + SETTLE
        since, before = time.monotonic(), None
        while True:
            claims = [c for c in self._api.list("PersistentVolumeClaim") if self._of(c) in expected]
            events = [e for e in self._api.list("Event", fieldSelector="reason=FailedBinding") if self._of(e)]
            seen = (
                sorted((c["metadata"]["uid"], c["metadata"].get("deletionTimestamp", "")) for c in claims),
                sorted(
                    (e["metadata"]["namespace"], e["involvedObject"]["name"], e["message"]) for e in events
                ),
            )
            now = time.monotonic()
            if seen != before:
                since, before = now, seen
            if now - since >= CALM and self._reached(claims, expected):
                return claims, events
            if now > end:
                return claims, events
            time.sleep(0.25)

    def _reached(self, claims: list[Json], expected: dict[str, set[str]]) -> bool:
        found: dict[str, set[str]] = {name: set() for name in expected}
        pods = {p["metadata"]["uid"] for p in self._api.list("Pod")}
        for claim in claims:
            metadata = claim["metadata"]
            found[self._of(claim)].add(metadata["name"])
            # the garbage collector and the protection of claims in use are at work still
            if any(o["kind"] == "Pod" and o["uid"] not in pods for o in metadata.get("ownerReferences", ())):
                return False
            if "deletionTimestamp" in metadata and GROUP not in metadata.get("finalizers", ()):
                return False
        return found == expected

    def _of(self, thing: Json) -> str:
        return self._by_namespace.get(thing["metadata"]["namespace"], "")

    def _write_down(self, name: str, claims: list[Json], events: list[Json]) -> None:
        world = self._worlds[name]
        mine = [c for c in claims if self._of(c) == name]
        said = {
            (e["involvedObject"]["name"], e["type"], e["reason"], self._plain(world, e["message"]))
            for e in events
            if self._of(e) == name and e["source"]["component"] in SOURCES
        }
        self.outcomes[name].append(
            {
                "claims": {c["metadata"]["name"]: self._claim(name, c) for c in mine},
                "events": sorted(said),
                "refusals": [self._plain(world, refusal) for refusal in world.refusals],
            }
        )
        self._known[name] |= {c["metadata"]["uid"] for c in mine}

    def _claim(self, name: str, claim: Json) -> Json:
        metadata = claim["metadata"]
        owners = []
        for owner in metadata.get("ownerReferences", ()):
            kept = {key: value for key, value in owner.items() if key != "uid"}
            kept["is-the-pod"] = owner["uid"] == self._pod_uid(name, owner["name"])
            owners.append(kept)
        spec = dict(claim["spec"])
        if spec.get("volumeName", "").startswith("local-"):
            spec["volumeName"] = "a local volume"
        if spec.get("storageClassName", "").startswith("local-"):
            spec["storageClassName"] = "local"
        return {
            "labels": metadata.get("labels", {}),
            "annotations": metadata.get("annotations", {}),
            "finalizers": metadata.get("finalizers", []),
            "terminating": "deletionTimestamp" in metadata,
            "new": metadata["uid"] not in self._known[name],
            "owners": owners,
            "spec": spec,
            "phase": claim["status"].get("phase"),
        }

    def _pod_uid(self, name: str, pod: str) -> str:
        try:
            return self._worlds[name].uid("Pod", pod)
        except ApiError:
            return ""

    def _plain(self, world: World, text: str) -> str:
        return text.replace(world.namespace, "NAMESPACE")
