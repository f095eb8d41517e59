"""The provisioner of one node: volumes for the claims that the scheduler placed here (E7, E9).

A claim of a class of ours waits for its first consumer; the scheduler writes the node it chose on the claim,
and the agent of that node, which is this, makes the volume and the PersistentVolume. It grows a volume when
its claim asks for more, and deletes it when the claim is gone. No leader is needed: a claim has one node.

Order, so that a kill anywhere leaks nothing and loses nothing: volume, PersistentVolume (with a finalizer),
note in the volume's record that it is bound; and back: volume, PersistentVolume, finalizer. A volume that is
not bound and whose claim is gone, or is another node's by now, is what a killed process left and is deleted;
one that is bound is deleted only through its PersistentVolume.

Cost for a fleet: every agent watches the metadata of all claims (there is no field to select them by; that
is about a kilobyte a change, and nothing is kept of other nodes' claims), its own PersistentVolumes by a
label, and the storage classes. A claim's life costs about ten requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from unlade.controllers import claims, quantities
from unlade.controllers.api import ApiError, ApiServer
from unlade.controllers.capacity import Capacity
from unlade.controllers.claims import CannotProvision, Claim, ClassManifest, VolumeManifest
from unlade.controllers.informer import Informer, Resource
from unlade.controllers.nodevolumes import Made, Secrets, Volumes
from unlade.controllers.recorder import Recorder, Subject
from unlade.controllers.throttle import TokenBucket
from unlade.controllers.workqueue import WorkQueue
from unlade.errors import UnladeError, one_line
from unlade.model import Deadline
from unlade.registry import CredentialSource
from unlade.registry.keyed import KeyedLocks

log = logging.getLogger(__name__)

NAME: Final = "provisioner"
COMPONENT: Final = "unlade-provisioner"
# The reasons that the standard provisioner uses, which dashboards look for.
PROVISIONING, PROVISIONED, FAILED = "Provisioning", "ProvisioningSucceeded", "ProvisioningFailed"
RESIZE_PENDING = "FileSystemResizeRequired"
TOO_SMALL, GROWN, GROW_FAILED, DELETE_FAILED = (
    "VolumeTooSmall",
    "Resized",
    "ResizeFailed",
    "VolumeFailedDelete",
)
MERGE: Final = "application/merge-patch+json"
_CLAIM, _VOLUME = "claim ", "volume "
_OWNER: Final = "claim "
# First try again after so long: what fails here is a registry or a full disk, not a cache that is behind.
FIRST_RETRY: Final = 0.5
# How often a volume that cannot grow in use is looked at: a pod's restart announces itself to nobody here.
LOOK_AGAIN: Final = 20.0


class Provisioner:
    """The controller. `run` does everything, from the first list to the last worker's end."""

    def __init__(
        self,
        server: ApiServer,
        volumes: Volumes,
        *,
        node: str,
        namespace: str,
        secrets: Secrets | None = None,
        workers: int = 4,
        resync: float = 300.0,
        limit: TokenBucket | None = None,
    ) -> None:
        self._server = server
        self._volumes = volumes
        self._node = node
        self._secrets = secrets
        self._workers = workers
        self._resync = resync
        self._stop = threading.Event()
        self._limit = limit or TokenBucket(10.0, 20)
        self._lock = threading.Lock()
        self._alone = KeyedLocks()
        self._running: set[Deadline] = set()
        self._waiting: dict[str, int] = {}  # claims that were told that they grow later, and to what size
        self.queue = WorkQueue(first_retry=FIRST_RETRY)
        self.recorder = Recorder(server, COMPONENT, limit=self._limit)
        self.claims = Informer(server, _own_claims(node))
        self.persistent = Informer(server, _own_volumes(node))
        self.classes = Informer(server, _own_classes())
        self.capacity = Capacity(
            server, node=node, namespace=namespace, room=lambda: volumes.room().available
        )
        self.claims.handlers.added = lambda key, _new: self.queue.add(_CLAIM + key)
        self.claims.handlers.updated = lambda key, _old, _new: self.queue.add(_CLAIM + key)
        # Without a capacity of its own, a new class fits on no node.
        self.classes.handlers.added = lambda _key, _new: self.capacity.wake()
        self.classes.handlers.deleted = lambda _key, _old: self.capacity.wake()
        self.persistent.handlers.added = lambda key, _new: self.queue.add(_VOLUME + key)
        self.persistent.handlers.updated = lambda key, _old, _new: self.queue.add(_VOLUME + key)

    @property
    def synced(self) -> bool:
        """True once the caches are whole."""
        return all(informer.synced.is_set() for informer in self._informers())

    def problems(self) -> list[str]:
        """Why the running provisioner is not healthy; empty when it is."""
        return [f"informer {part.resource.name} has died" for part in self._informers() if not part.alive]

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set; every thread it started has ended when it returns. Once only."""
        threads = [
            threading.Thread(target=self._work, name=f"{NAME}-{number}", daemon=True)
            for number in range(self._workers)
        ]
        publisher = threading.Thread(target=self._publish_capacity, name="capacity", daemon=True)
        try:
            self.recorder.start()
            for informer in self._informers():
                informer.start()
            while not self.synced and not stop.wait(0.05):
                pass
            if not stop.is_set():
                log.info("%s: %d claims, %d volumes", NAME, len(self.claims), len(self.persistent))
                for thread in (*threads, publisher):
                    thread.start()
            while not stop.is_set():
                self._sweep()
                stop.wait(self._resync)
        finally:
            self._stop.set()
            self.capacity.wake()
            with self._lock:
                for deadline in self._running:
                    deadline.cancel()
            self.queue.close()
            for informer in self._informers():
                informer.stop()
            for thread in (*threads, publisher):
                if thread.is_alive():
                    thread.join()
            self.recorder.stop()

    # --- a claim

    def sync_claim(self, key: str) -> None:
        """Makes or grows the volume of one claim; raises what must be tried again."""
        if self.claims.get(key) is None:
            return
        # Alone with the deletion of its volume: a claim that was read before it was bound and deleted would
        # have its volume made again, and nobody would ever look for that one.
        with self._alone.held(key):
            self._sync_claim(key)

    def _sync_claim(self, key: str) -> None:
        claim = self._read_claim(key)
        if claim is None or not claims.serves(claim.metadata.annotations, self._node):
            return
        if claim.spec.volume_name:
            if claim.status.phase == "Bound":
                self._grow(claim)
            return
        if claim.metadata.deletion_timestamp is None:
            self._provision(claim)

    def _provision(self, claim: Claim) -> None:
        subject = _subject(claim)
        try:
            storage_class = self._class_of(claim)
            claims.check(claim)
            parameters, origin, credentials = self._content(claim, storage_class)
            with self._deadline() as deadline:
                made = self._volumes.create(
                    claims.volume_name(claim),
                    claim.size,
                    parameters,
                    origin=origin,
                    owner=f"{_OWNER}{claim.metadata.key}",
                    credentials=credentials,
                    deadline=deadline,
                )
        except ApiError:
            raise  # says nothing about the claim
        except UnladeError as error:
            if not self._stop.is_set():
                self.recorder.warn(subject, FAILED, one_line(error))
                if error.code == "no-room":
                    self._give_back(claim)
                    return
            raise
        body = claims.volume_body(
            claim, storage_class, node=self._node, handle=made.id, size=made.size, digests=made.digests
        )
        self._create_persistent(claim, body)
        self._volumes.bind(made.id)
        self._patch_claim(claim, {"metadata": {"annotations": claims.content_annotations(made.digests)}})
        for warning in made.warnings:
            self.recorder.warn(subject, TOO_SMALL, warning)
        content = ", ".join(made.digests)
        self.recorder.inform(subject, PROVISIONED, f"volume {body['metadata']['name']} starts with {content}")
        self.capacity.wake()

    def _content(
        self, claim: Claim, storage_class: ClassManifest
    ) -> tuple[dict[str, str], str, CredentialSource | None]:
        """Parameters, or what to copy, and the claim's own credentials."""
        own = claims.asked_parameters(claim)
        source = claims.data_source(claim)
        if source is None:
            return claims.parameters_of(storage_class, own), "", None
        if own:
            raise CannotProvision(
                "the claim names its content twice, in an annotation and as a data source",
                next_step="remove the annotation",
            )
        if source.kind == "PersistentVolumeClaim" and not source.api_group:
            return {}, self._handle_of(claim, source.name), None
        if source.kind != claims.KIND or source.api_group != claims.GROUP:
            raise CannotProvision(
                f"a data source of kind {source.kind} is not served",
                next_step=f"use {claims.KIND} of the group {claims.GROUP}, or a PersistentVolumeClaim",
            )
        path = claims.SOURCES.format(namespace=claim.metadata.namespace, name=source.name)
        try:
            spec = claims.SOURCE_OBJECT.decode(self._server.read("GET", path)).spec
        except ApiError as error:
            if error.status != 404:
                raise
            raise CannotProvision(
                f"there is no {claims.KIND} {claim.metadata.namespace}/{source.name}",
                next_step="create it, or apply the CRD of deploy/csi",
            ) from error
        except msgspec.ValidationError as error:
            raise CannotProvision(
                f"{claims.KIND} {source.name}: {error}", next_step="see its fields in the CRD"
            ) from error
        self.recorder.inform(
            _subject(claim), PROVISIONING, f"making a volume of {', '.join(spec.references)}"
        )
        credentials = None
        if spec.secret_name:
            if self._secrets is None:
                raise CannotProvision(
                    f"{claims.KIND} {source.name} names a secret, and this agent may read none",
                    next_step="run the agent with --pod-secrets and grant it the secret",
                )
            credentials = self._secrets.of_secret(claim.metadata.namespace, spec.secret_name)
        return claims.parameters_of(storage_class, spec.parameters()), "", credentials

    def _handle_of(self, claim: Claim, name: str) -> str:
        """The volume of another claim, which must be on this node."""
        path = f"/api/v1/namespaces/{claim.metadata.namespace}/persistentvolumeclaims/{name}"
        source = claims.CLAIM.decode(self._server.read("GET", path))
        volume = self.persistent.get(source.spec.volume_name) if source.spec.volume_name else None
        if volume is None or volume.spec.csi is None:
            raise CannotProvision(
                f"the claim {name} has no volume on node {self._node}, where its copy was placed",
                next_step="place the pod on the node of the claim that is copied",
            )
        return volume.spec.csi.volume_handle

    def _class_of(self, claim: Claim) -> ClassManifest:
        name = claim.spec.storage_class_name or ""
        found = self.classes.get(name)
        if found is None:
            raise CannotProvision(
                f"the storage class {name!r} is gone, or is not of {claims.DRIVER}",
                next_step="create it again",
            )
        return found

    def _create_persistent(self, claim: Claim, body: dict[str, Any]) -> None:
        try:
            self._write("POST", "/api/v1/persistentvolumes", body)
        except ApiError as error:
            if error.status != 409:
                raise
            path = f"/api/v1/persistentvolumes/{body['metadata']['name']}"
            found = claims.VOLUME.decode(self._server.read("GET", path))
            if found.spec.claim_ref is None or found.spec.claim_ref.uid != claim.metadata.uid:
                raise

    def _give_back(self, claim: Claim) -> None:
        """Let the scheduler choose another node: this one has no room."""
        self.capacity.wake()
        self._patch_claim(claim, {"metadata": {"annotations": {claims.SELECTED_NODE: None}}})

    def _grow(self, claim: Claim) -> None:
        wanted = claim.size
        volume = self.persistent.get(claim.spec.volume_name)
        if wanted <= claim.capacity or volume is None or volume.spec.csi is None:
            return
        subject = _subject(claim)
        try:
            grown = self._volumes.expand(volume.spec.csi.volume_handle, wanted)
        except UnladeError as error:
            self.recorder.warn(subject, GROW_FAILED, one_line(error))
            raise
        size = quantities.write(grown.size)
        if grown.pending:
            self._await_restart(claim, grown.size)
            return
        name = claim.spec.volume_name
        change = {"spec": {"capacity": {"storage": size}}}
        self._write("PATCH", f"/api/v1/persistentvolumes/{name}", change, MERGE)
        self._patch_status(claim, {"capacity": {"storage": size}, "conditions": None})
        self._waiting.pop(claim.metadata.uid, None)
        self.recorder.inform(subject, GROWN, f"the volume has {size} now")
        self.capacity.wake()

    def _await_restart(self, claim: Claim, size: int) -> None:
        """Say once that the file system grows when the pod is next started, and look again now and then.

        The PersistentVolume keeps its old size until then: a larger one would have the kubelet ask the
        driver to grow it in use, over and over.
        """
        self.queue.add_after(_CLAIM + claim.metadata.key, LOOK_AGAIN)
        if self._waiting.get(claim.metadata.uid) == size:
            return
        text = "the file system grows when the pod that uses it is started again"
        condition = {
            "type": "FileSystemResizePending",
            "status": "True",
            "message": text,
            "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._patch_status(claim, {"conditions": [condition]})
        self._waiting[claim.metadata.uid] = size
        self.recorder.inform(_subject(claim), RESIZE_PENDING, text)

    def _patch_status(self, claim: Claim, status: dict[str, Any]) -> None:
        path = f"/api/v1/namespaces/{claim.metadata.namespace}/persistentvolumeclaims/{claim.metadata.name}"
        self._write("PATCH", f"{path}/status", {"status": status}, MERGE)

    # --- a PersistentVolume

    def sync_volume(self, name: str) -> None:
        """Deletes the volume of a PersistentVolume whose claim is gone; raises what must be tried again."""
        volume = self.persistent.get(name)
        if volume is None or volume.spec.csi is None or volume.spec.csi.driver != claims.DRIVER:
            return
        leaving = volume.metadata.deletion_timestamp is not None
        if volume.status.phase == "Bound" or not (leaving or volume.status.phase in {"Released", "Failed"}):
            return
        owner = volume.spec.claim_ref
        with self._alone.held(f"{owner.namespace}/{owner.name}" if owner is not None else ""):
            self._release(volume, volume.spec.csi.volume_handle, leaving=leaving)

    def _release(self, volume: VolumeManifest, handle: str, *, leaving: bool) -> None:
        if self._claim_lives(volume):
            return
        name = volume.metadata.name
        if volume.spec.persistent_volume_reclaim_policy == "Delete":
            try:
                self._volumes.delete(handle)
            except UnladeError as error:
                # A pod's mount goes a moment after its claim: no news for anybody.
                if error.code != "volume-in-use":
                    subject = Subject("PersistentVolume", "default", name, volume.metadata.uid)
                    self.recorder.warn(subject, DELETE_FAILED, one_line(error))
                raise
            self._delete_persistent(volume)
            self.capacity.wake()
        elif not leaving:
            return
        self._let_go(volume)

    def _claim_lives(self, volume: VolumeManifest) -> bool:
        owner = volume.spec.claim_ref
        if owner is None or not owner.uid:
            return False
        claim = self._read_claim(f"{owner.namespace}/{owner.name}")
        return claim is not None and claim.metadata.uid == owner.uid

    def _delete_persistent(self, volume: VolumeManifest) -> None:
        body = {"preconditions": {"uid": volume.metadata.uid}}
        with _gone_is_fine():
            self._write("DELETE", f"/api/v1/persistentvolumes/{volume.metadata.name}", body)

    def _let_go(self, volume: VolumeManifest) -> None:
        """Take our finalizer off; the cached object's others may be out of date, so it is read again."""
        path = f"/api/v1/persistentvolumes/{volume.metadata.name}"
        with _gone_is_fine():
            found = claims.VOLUME.decode(self._server.read("GET", path)).metadata
            finalizers = found.finalizers or []
            if found.uid != volume.metadata.uid or claims.FINALIZER not in finalizers:
                return
            left = [one for one in finalizers if one != claims.FINALIZER]
            # With the version that was read: another's finalizer is never put back nor lost.
            version = {"uid": found.uid, "resourceVersion": found.resource_version}
            self._write("PATCH", path, {"metadata": {**version, "finalizers": left}}, MERGE)

    # --- what was missed

    def _sweep(self) -> None:
        """Queues everything once more, and deletes what a killed process left unfinished."""
        for informer, prefix in ((self.claims, _CLAIM), (self.persistent, _VOLUME)):
            for key in informer.keys():  # noqa: SIM118 - a snapshot, not a view
                self.queue.add(prefix + key)
        for volume in self._volumes.volumes():
            if self._stop.is_set():
                return
            if volume.state == "ready" and not volume.bound and volume.owner.startswith(_OWNER):
                try:
                    self._adopt_or_delete(volume)
                except UnladeError as error:
                    log.warning("%s: volume %s: %s", NAME, volume.id, error)

    def _adopt_or_delete(self, volume: Made) -> None:
        try:
            self._server.read("GET", f"/api/v1/persistentvolumes/{volume.name}")
        except ApiError as error:
            if error.status != 404:
                raise
        else:
            self._volumes.bind(volume.id)
            return
        claim = self._read_claim(volume.owner.removeprefix(_OWNER))
        if (
            claim is not None
            and claims.volume_name(claim) == volume.name
            and claims.serves(claim.metadata.annotations, self._node)
        ):
            return  # its claim is queued
        log.info("%s: volume %s was made for a claim that is gone", NAME, volume.id)
        self._volumes.delete(volume.id)

    # --- the work

    def _work(self) -> None:
        while (key := self.queue.get()) is not None:
            try:
                if key.startswith(_CLAIM):
                    self.sync_claim(key.removeprefix(_CLAIM))
                else:
                    self.sync_volume(key.removeprefix(_VOLUME))
                self.queue.forget(key)
            except UnladeError as error:
                if not self._stop.is_set():
                    pause = self.queue.retry(key)
                    log.info("%s: %s: %s; again in %.3g s", NAME, key, error, pause)
            except Exception:
                log.exception("%s: %s: unexpected failure", NAME, key)
                self.queue.retry(key)
            finally:
                self.queue.done(key)

    def _publish_capacity(self) -> None:
        self.capacity.run(self._stop, self.classes.keys)

    @contextmanager
    def _deadline(self) -> Iterator[Deadline]:
        """A deadline that never comes, unless this process is told to stop."""
        deadline = Deadline.never()
        with self._lock:
            self._running.add(deadline)
            if self._stop.is_set():
                deadline.cancel()
        try:
            yield deadline
        finally:
            with self._lock:
                self._running.discard(deadline)

    def _read_claim(self, key: str) -> Claim | None:
        namespace, _slash, name = key.partition("/")
        try:
            data = self._server.read("GET", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return claims.CLAIM.decode(data)

    def _patch_claim(self, claim: Claim, change: dict[str, Any]) -> None:
        metadata = claim.metadata
        body = {**change, "metadata": {**change.get("metadata", {}), "uid": metadata.uid}}
        path = f"/api/v1/namespaces/{metadata.namespace}/persistentvolumeclaims/{metadata.name}"
        with _gone_is_fine():
            self._write("PATCH", path, body, MERGE)

    def _write(
        self, verb: str, path: str, body: dict[str, Any], content_type: str = "application/json"
    ) -> None:
        if not self._limit.wait(self._stop):
            raise ApiError("stopping")
        self._server.read(verb, path, body=body, content_type=content_type)

    def _informers(self) -> tuple[Informer[Any, Any], ...]:
        return self.claims, self.persistent, self.classes


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status != 404:
            raise


def _own_claims(node: str) -> Resource[claims.ClaimHeader, claims.OwnClaim]:
    def keep(header: claims.ClaimHeader) -> claims.OwnClaim | None:
        metadata = header.metadata
        if not claims.serves(metadata.annotations, node):
            return None
        return claims.OwnClaim(metadata.uid, metadata.resource_version)

    return Resource("claims", "/api/v1/persistentvolumeclaims", claims.ClaimHeader, keep)


def _own_volumes(node: str) -> Resource[VolumeManifest, VolumeManifest]:
    selector = (("labelSelector", f"{claims.NODE_LABEL}={claims.node_label(node)}"),)
    return Resource(
        "volumes", "/api/v1/persistentvolumes", VolumeManifest, lambda volume: volume, selector=selector
    )


def _own_classes() -> Resource[ClassManifest, ClassManifest]:
    def keep(found: ClassManifest) -> ClassManifest | None:
        return found if found.provisioner == claims.DRIVER else None

    return Resource("classes", "/apis/storage.k8s.io/v1/storageclasses", ClassManifest, keep)


def _subject(claim: Claim) -> Subject:
    metadata = claim.metadata
    return Subject(
        "PersistentVolumeClaim", metadata.namespace, metadata.name, metadata.uid, metadata.resource_version
    )
