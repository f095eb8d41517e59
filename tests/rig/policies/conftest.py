"""A cluster under the shipped policies: every file of deploy/policies, as an administrator applies it.

The policies hold for the whole cluster, so it is one of its own. No kubelet: a pod is admitted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rig.cluster import Rig
from rig.kube import ApiError, Json, until
from rig.pods import Namespace
from tests.rig.conftest import MakeRig

POLICIES = Path(__file__).parents[3] / "deploy" / "policies"
# What the tests' ConfigMap allows; one is a repository, one has a port, one is a user of Docker Hub.
ALLOWED = ("registry.example.com/team", "mirror.example.com:5000/", "docker.io/team", "[fd00::1]:5000/x")


class Admission:
    """Asks the API server about pods without making them (a dry run goes through every policy)."""

    def __init__(self, rig: Rig, namespace: str) -> None:
        self.rig = rig
        self.namespace = namespace

    def pod(self, *volumes: Mapping[str, Any], **spec: Any) -> Json:
        """A pod with these volume sources; `spec` is laid over its spec."""
        main = {"name": "main", "image": "registry.example.com/team/app:1", "imagePullPolicy": "Always"}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": "asked-", "namespace": self.namespace},
            "spec": {
                "containers": [main],
                "volumes": [{"name": f"v{number}", **source} for number, source in enumerate(volumes)],
                **spec,
            },
        }

    def ask(self, *volumes: Mapping[str, Any], **spec: Any) -> Json:
        """What would be stored of such a pod, or ApiError."""
        path = self.rig.api.path("Pod", self.namespace)
        return self.rig.api.request("POST", path, query={"dryRun": "All"}, body=self.pod(*volumes, **spec))

    def refusal(self, *volumes: Mapping[str, Any], **spec: Any) -> str:
        """The words with which such a pod is refused; empty when it is not."""
        return _words(lambda: self.ask(*volumes, **spec))

    def refusal_of(self, thing: Json) -> str:
        """The same for an object of another kind, in this namespace."""
        path = self.rig.api.path(thing["kind"], self.namespace, version=thing["apiVersion"])
        return _words(lambda: self.rig.api.request("POST", path, query={"dryRun": "All"}, body=thing))

    def refusal_to(self, thing: Json, change: Json) -> str:
        """The words with which a merge patch of an object is refused."""
        name, kind, version = thing["metadata"]["name"], thing["kind"], thing["apiVersion"]
        return _words(lambda: self.rig.api.patch(kind, name, change, self.namespace, version=version))


def _words(act: Callable[[], object]) -> str:
    try:
        act()
    except ApiError as error:
        return error.message
    return ""


def source(*references: str) -> Json:
    """What writable volumes start with."""
    return {
        "apiVersion": "unlade.dev/v1alpha1",
        "kind": "OCISource",
        "metadata": {"name": "source"},
        "spec": {"references": list(references)},
    }


def claim(**annotations: str) -> Json:
    """A claim whose annotations name its content."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": "claim",
            "annotations": {f"unlade.dev/{name}": value for name, value in annotations.items()},
        },
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def csi(**attributes: str) -> Json:
    """An inline volume of our driver; always pulled unless told."""
    return {
        "csi": {
            "driver": "oci.unlade.dev",
            "readOnly": True,
            "volumeAttributes": {"pullPolicy": "Always", **attributes},
        }
    }


def image(reference: str, policy: str | None = "Always") -> Json:
    """A native volume."""
    return {"image": {"reference": reference, **({"pullPolicy": policy} if policy else {})}}


@pytest.fixture(scope="module")
def policed(make_module_rig: MakeRig) -> Rig:
    """A cluster with all of deploy/policies but the one that sets Always; a pod was there first."""
    rig = make_module_rig(kubelets=False)
    rig.kubectl("apply", "-f", str(POLICIES.parent / "csi" / "ocisource.yaml"))
    _make_old(rig)
    apply(rig, "parameters.yaml", "pull-always-required.yaml", "registries.yaml", "digests.yaml")
    apply(rig, "ephemeral-volumes.yaml")
    rig.api.patch(
        "ConfigMap",
        "unlade-policies",
        {"data": {"registries": "# ours\n\n  " + "\n".join(ALLOWED) + "  \n"}},
        "unlade-system",
    )
    asking = Admission(rig, Namespace(rig).name)
    allowed, other = image("registry.example.com/team/x"), image("elsewhere.example.com/x")
    until("the list of registries is in force", lambda: not asking.refusal(allowed) and asking.refusal(other))
    until("the pull policy is in force", lambda: asking.refusal(image(f"{ALLOWED[0]}/x", "Never")))
    return rig


@dataclass(frozen=True)
class Old:
    """A pod that was there before the policies, and keeps to none of them."""

    namespace: str
    name: str


OLD = Old("from-before", "old")


@pytest.fixture
def old(policed: Rig) -> Old:
    """The pod from before."""
    return OLD


def _make_old(rig: Rig) -> None:
    asking = Admission(rig, Namespace(rig, OLD.namespace).name)
    volumes = [image("evil.io/x", "Never"), csi(reference="evil.io/x", pullPolicy="Never")]
    lax = {"name": "main", "image": "evil.io/x", "imagePullPolicy": "IfNotPresent"}
    pod = asking.pod(*volumes, containers=[lax])
    pod["metadata"] = {"name": OLD.name, "namespace": OLD.namespace}
    rig.api.create(pod)
    until("the kind is served", lambda: rig.api.list("OCISource", version="unlade.dev/v1alpha1") == [])
    for thing in (source("evil.io/x"), claim(reference="evil.io/x")):
        rig.api.create({**thing, "metadata": {**thing["metadata"], "namespace": OLD.namespace}})


@pytest.fixture(scope="module")
def asking(policed: Rig) -> Admission:
    """Ask in a namespace that nobody labels and nothing is left in."""
    return Admission(policed, Namespace(policed).name)


@pytest.fixture
def apart(policed: Rig) -> Iterator[Admission]:
    """Ask in a namespace of the test's own."""
    made = Namespace(policed)
    yield Admission(policed, made.name)
    made.delete()


def apply(rig: Rig, *names: str) -> None:
    """Apply files of deploy/policies; a complaint of the API server's type checker is a failure."""
    for name in names:
        rig.kubectl("apply", "--validate=strict", "-f", str(POLICIES / name))
    for policy in rig.api.list("ValidatingAdmissionPolicy", version="admissionregistration.k8s.io/v1"):

        def checked(name: str = policy["metadata"]["name"]) -> Json | None:
            found = rig.api.get("ValidatingAdmissionPolicy", name, version="admissionregistration.k8s.io/v1")
            checking: Json | None = found.get("status", {}).get("typeChecking")
            return {"said": checking} if checking is not None else None

        assert until(f"{policy['metadata']['name']} checked", checked) == {"said": {}}
