"""Many pods at once, and what came of them."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from rig.kube import Api, ApiError, Json, until
from tests.rig.controllers.scenarios import pod_spec, template


def pod(namespace: str, name: str, *, ephemeral: bool = True) -> Json:
    """A pod that no scheduler takes, with one ephemeral volume or none."""
    source = {"ephemeral": {"volumeClaimTemplate": template(labels={"app": "load"})}}
    volumes = [{"name": "v", **source}] if ephemeral else []
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "load"}},
        "spec": pod_spec(volumes),
    }


def create_pods(
    api: Api, namespace: str, names: list[str], *, ephemeral: bool = True, threads: int = 8
) -> float:
    """Creates pods, again where the server was away, until all are there; seconds taken."""
    started = time.monotonic()

    def create(name: str) -> None:
        def made() -> bool:
            try:
                api.create(pod(namespace, name, ephemeral=ephemeral))
            except ApiError as error:
                return error.reason == "AlreadyExists"
            return True

        until(f"pod {name} created", made, seconds=120, pause=0.2)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(create, names))
    return time.monotonic() - started


def count_claims(api: Api, namespace: str) -> int:
    """How many claims there are, from the server's own count, without fetching them."""
    page = api.request("GET", api.path("PersistentVolumeClaim", namespace), query={"limit": "1"})
    metadata = page["metadata"]
    return len(page["items"]) + int(metadata.get("remainingItemCount", 0))


def wrong_claims(api: Api, namespace: str) -> str:
    """What is wrong: every pod must have exactly the claim of its volume, controlled by it, and none else."""
    pods = {p["metadata"]["name"]: p["metadata"]["uid"] for p in api.list("Pod", namespace)}
    found = api.list("PersistentVolumeClaim", namespace)
    expected = {f"{name}-v" for name in pods}
    names = {c["metadata"]["name"] for c in found}
    if names != expected:
        return f"missing: {sorted(expected - names)[:5]}, too many: {sorted(names - expected)[:5]}"
    owners = Counter(o["uid"] for c in found for o in c["metadata"]["ownerReferences"] if o["controller"])
    strange = owners - Counter(pods.values())
    return f"claims of pods that are gone: {dict(strange)}" if strange else ""


def wait_claims(api: Api, namespace: str, count: int, *, seconds: float) -> None:
    """Waits until so many claims exist, and then until nothing is wrong with any of them.

    The second wait is the garbage collector's: a claim made for a pod that was just replaced under the same
    name goes with it, and only then can the new pod have its own.
    """
    until(f"{count} claims", lambda: count_claims(api, namespace) == count, seconds=seconds, pause=0.1)
    until("claims are right", lambda: wrong_claims(api, namespace) == "" or None, seconds=seconds, pause=0.5)
    assert count_claims(api, namespace) == count
