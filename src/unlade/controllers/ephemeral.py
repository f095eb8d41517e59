"""The ephemeral volume controller: a claim for every `ephemeral` volume of every pod (E1 to E6).

For a volume with `ephemeral.volumeClaimTemplate` it creates the PersistentVolumeClaim `<pod>-<volume>` in
the pod's namespace, with the template's labels, annotations and spec, controlled by the pod. It never
updates and never deletes: volumes of a pod are immutable, and the garbage collector takes the claim when
the pod goes. A claim of that name that another object controls, or nobody, is left alone: the pod gets an
event and is tried again until the conflict ends.

Its outcomes equal those of the controller built into kube-controller-manager, which a differential test
on a real cluster holds it to; where ours differs on purpose, docs/controllers.md says so. Both may run at
once: whoever comes second finds the claim made.

Memory: of a pod without such volumes nothing is kept, of one with them its identity and the templates as
they came; of a claim, who controls it. Spec: KEP-1698.
"""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client.core import Metric

from unlade.controllers.api import ApiError, ApiServer
from unlade.controllers.informer import Informer, Resource
from unlade.controllers.metrics import Metrics, counter, gauge
from unlade.controllers.objects import METADATA, MetadataOnly, PodManifest
from unlade.controllers.recorder import Recorder, Subject
from unlade.controllers.throttle import TokenBucket
from unlade.controllers.workqueue import WorkQueue
from unlade.errors import UnladeError

log = logging.getLogger(__name__)

NAME = "ephemeral-volumes"
COMPONENT = "unlade-ephemeral-volumes"  # the source of our events; the built-in one is "ephemeral_volume"
REASON = "FailedBinding"  # the reason the built-in controller uses, which dashboards look for


class Volume(msgspec.Struct, frozen=True, gc=False):
    """An ephemeral volume of a pod; `source` is its JSON as the API server wrote it."""

    name: str
    source: bytes


class Pod(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a pod that has ephemeral volumes."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    terminating: bool
    volumes: tuple[Volume, ...]

    def subject(self) -> Subject:
        """The pod as the object of an event."""
        return Subject("Pod", self.namespace, self.name, self.uid, self.resource_version)


class Claim(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a claim: which object controls it, if any."""

    controller_uid: str


class ClaimConflict(UnladeError):
    """A claim of the name that a volume needs exists and is not the pod's."""

    code = "claim-conflict"
    retryable = True


class _Template(msgspec.Struct):
    metadata: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None


class _Source(msgspec.Struct, rename="camel"):
    volume_claim_template: _Template | None = None


_SOURCE = msgspec.json.Decoder(_Source)


def keep_pod(manifest: PodManifest) -> Pod | None:
    """The record of a pod with ephemeral volumes; None for all others."""
    volumes = tuple(
        # a copy: the raw value is a view of the whole page that it came in
        Volume(volume.name, bytes(volume.ephemeral))
        for volume in manifest.spec.volumes or ()
        if isinstance(volume.ephemeral, msgspec.Raw) and bytes(volume.ephemeral) != b"null"
    )
    if not volumes:
        return None
    metadata = manifest.metadata
    return Pod(
        metadata.namespace,
        metadata.name,
        metadata.uid,
        metadata.resource_version,
        metadata.deletion_timestamp is not None,
        volumes,
    )


def keep_claim(manifest: MetadataOnly) -> Claim:
    """The record of a claim: any claim may stand in a volume's way."""
    return Claim(manifest.metadata.controller_uid)


PODS: Resource[PodManifest, Pod] = Resource("pods", "/api/v1/pods", PodManifest, keep_pod)
CLAIMS: Resource[MetadataOnly, Claim] = Resource(
    "persistentvolumeclaims", "/api/v1/persistentvolumeclaims", MetadataOnly, keep_claim
)


def claim_name(pod: str, volume: str) -> str:
    """The name of the claim of a pod's volume. Not unique: `a-b`+`c` and `a`+`b-c` share one."""
    return f"{pod}-{volume}"


def claim_body(pod: Pod, volume: Volume) -> dict[str, Any]:
    """The claim to create for a volume, as the API server takes it."""
    template = _SOURCE.decode(volume.source).volume_claim_template or _Template()
    metadata: dict[str, Any] = {
        "name": claim_name(pod.name, volume.name),
        "namespace": pod.namespace,
        "ownerReferences": [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod.name,
                "uid": pod.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    for copied in ("labels", "annotations"):
        value = (template.metadata or {}).get(copied)
        if value:
            metadata[copied] = value
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": template.spec or {},
    }


class EphemeralVolumes:
    """The controller. `run` does everything, from the first list to the last worker's end."""

    def __init__(
        self, server: ApiServer, *, limit: TokenBucket, workers: int, resync: float, metrics: Metrics
    ) -> None:
        self.pods = Informer(server, PODS)
        self.claims = Informer(server, CLAIMS)
        self.queue = WorkQueue(observe_wait=metrics.waits.labels(NAME).observe)
        self.recorder = Recorder(
            server, COMPONENT, limit=limit, count=lambda result: metrics.events.labels(result).inc()
        )
        self._server = server
        self._limit = limit
        self._workers = workers
        self._resync = resync
        self._metrics = metrics
        self._stop = threading.Event()
        self.pods.handlers.added = self._pod_added
        self.pods.handlers.updated = self._pod_updated
        self.claims.handlers.deleted = self._claim_deleted

    @property
    def synced(self) -> bool:
        """True once both caches are whole."""
        return self.pods.synced.is_set() and self.claims.synced.is_set()

    def problems(self) -> list[str]:
        """Why the running controller is not healthy; empty when it is."""
        return [f"informer {part.resource.name} has died" for part in self._informers() if not part.alive]

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set; every thread it started has ended when it returns. Once only."""
        unregister = self._metrics.read_when_scraped(self._live_numbers)
        threads = [
            threading.Thread(target=self._work, name=f"{NAME}-{number}", daemon=True)
            for number in range(self._workers)
        ]
        try:
            self.recorder.start()
            for informer in self._informers():
                informer.start()
            # an absence may only be believed once the list of claims is whole
            while not self.synced and not stop.wait(0.05):
                pass
            if not stop.is_set():
                log.info("%s: %d pods, %d claims", NAME, len(self.pods), len(self.claims))
                for thread in threads:
                    thread.start()
            while not stop.wait(self._resync):
                self._sweep()
        finally:
            self._stop.set()
            self.queue.close()
            for informer in self._informers():
                informer.stop()
            for thread in threads:
                if thread.is_alive():
                    thread.join()
            self.recorder.stop()
            unregister()

    def sync(self, key: str) -> None:
        """Makes what is missing of one pod, volume by volume; raises at the first that cannot be made."""
        pod = self.pods.get(key)
        if pod is None or pod.terminating:
            return
        for volume in pod.volumes:
            try:
                self._ensure(pod, volume)
            except (ApiError, ClaimConflict) as error:
                # an unanswered or postponed request says nothing about the pod: no event for that
                if not isinstance(error, ApiError) or not (error.unanswered or error.wants_patience):
                    text = f"ephemeral volume {volume.name}: {error}"
                    self.recorder.warn(pod.subject(), REASON, text)
                raise

    # --- what makes a pod due

    def _pod_added(self, key: str, pod: Pod) -> None:
        if not pod.terminating:
            self.queue.add(key)

    def _pod_updated(self, key: str, old: Pod, new: Pod) -> None:
        # volumes are immutable, so an update means work only when it hides a deletion
        if old.uid != new.uid:
            self._pod_added(key, new)

    def _claim_deleted(self, key: str, _claim: Claim) -> None:
        for pod in self._pods_of(key):
            self.queue.add(pod)

    def _pods_of(self, claim_key: str) -> Iterator[str]:
        """The pods whose volume would have this claim: the name is cut at each hyphen in turn."""
        namespace, _slash, name = claim_key.partition("/")
        cut = name.find("-")
        while cut >= 0:
            key = f"{namespace}/{name[:cut]}"
            pod = self.pods.get(key)
            if pod is not None and any(volume.name == name[cut + 1 :] for volume in pod.volumes):
                yield key
            cut = name.find("-", cut + 1)

    def _sweep(self) -> None:
        """Queues every pod that lacks a claim, in case anything was ever missed."""
        missing = 0
        for key in self.pods.keys():  # noqa: SIM118 - a snapshot, not a view
            pod = self.pods.get(key)
            if pod is None or pod.terminating:
                continue
            names = (f"{pod.namespace}/{claim_name(pod.name, volume.name)}" for volume in pod.volumes)
            if any(self.claims.get(name) is None for name in names):
                self.queue.add(key)
                missing += 1
        log.debug("%s: resync found %d pods without a claim", NAME, missing)

    # --- the work

    def _work(self) -> None:
        while (key := self.queue.get()) is not None:
            started = time.monotonic()
            result = "done"
            try:
                self.sync(key)
                self.queue.forget(key)
            except (ApiError, ClaimConflict) as error:
                result = "retry"
                self._retry(key, error)
            except Exception:
                result = "failed"
                log.exception("%s: pod %s: unexpected failure", NAME, key)
                self.queue.retry(key)
            finally:
                self.queue.done(key)
                self._metrics.runs.labels(NAME, result).observe(time.monotonic() - started)

    def _retry(self, key: str, error: ApiError | ClaimConflict) -> None:
        if self._stop.is_set():
            return
        if isinstance(error, ApiError) and error.retry_after:
            pause = error.retry_after  # the server named the time; our own count of failures stays as it is
            self.queue.add_after(key, pause)
        else:
            pause = self.queue.retry(key)
        log.info("%s: pod %s: %s; again in %.3g s", NAME, key, error, pause)

    def _ensure(self, pod: Pod, volume: Volume) -> None:
        name = claim_name(pod.name, volume.name)
        claim = self.claims.get(f"{pod.namespace}/{name}")
        if claim is not None:
            self._check_owner(pod, name, claim)
            return
        path = f"/api/v1/namespaces/{pod.namespace}/persistentvolumeclaims"
        if not self._limit.wait(self._stop):
            raise ApiError("stopping")
        try:
            self._server.read("POST", path, body=claim_body(pod, volume))
        except ApiError as error:
            self._metrics.claims.labels("unanswered" if error.unanswered else "refused").inc()
            if error.status != 409 or error.reason != "AlreadyExists":
                if error.unanswered or error.wants_patience:
                    raise
                # Admission speaks before existence does: with a cache that is behind, a quota refuses the
                # claim that already counts against it.
                if error.status == 403 and self._is_there(pod, name, path):
                    return
                raise ApiError(
                    f"create PVC {name}: {error}",
                    status=error.status,
                    reason=error.reason,
                    retry_after=error.retry_after,
                ) from error
            # the cache is behind: an answer that was lost, another leader, or a stranger's claim
            found = METADATA.decode(self._server.read("GET", f"{path}/{name}"))
            self._check_owner(pod, name, keep_claim(found))
        else:
            self._metrics.claims.labels("created").inc()

    def _is_there(self, pod: Pod, name: str, path: str) -> bool:
        try:
            found = METADATA.decode(self._server.read("GET", f"{path}/{name}"))
        except ApiError:
            return False
        self._check_owner(pod, name, keep_claim(found))
        return True

    def _check_owner(self, pod: Pod, name: str, claim: Claim) -> None:
        if claim.controller_uid != pod.uid:
            self._metrics.conflicts.inc()
            raise ClaimConflict(
                f"PVC {pod.namespace}/{name} was not created for pod {pod.namespace}/{pod.name}"
                " (pod is not owner)"
            )

    # --- numbers

    def _informers(self) -> tuple[Informer[Any, Any], ...]:
        return self.claims, self.pods

    def _live_numbers(self) -> Iterator[Metric]:
        yield gauge(
            "unlade_controller_queue", "Keys that wait for a worker", {"controller": NAME}, len(self.queue)
        )
        yield gauge(
            "unlade_controller_failing",
            "Keys whose last run failed",
            {"controller": NAME},
            self.queue.failing,
        )
        for informer in self._informers():
            labels = {"resource": informer.resource.name}
            yield gauge("unlade_informer_kept", "Objects in the cache", labels, len(informer))
            for name, value in vars(informer.counts).items():
                yield counter(f"unlade_informer_{name}", f"Informer: {name}", labels, value)
