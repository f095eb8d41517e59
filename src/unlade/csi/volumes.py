"""Inline volumes: from a pod's attributes to a read-only directory in the pod, and back.

Publishing, in this order, each step safe to be the last before a crash: the tree is in the store; a lease
that outlives the process holds it (`holding`); the record is written and synced (a lease that a power loss
forgot is made again from it); the target is made; the mount is put there by one call. Unpublishing goes the
other way. So what is mounted is on record, what is on record is held, and whatever a crash leaves, the
kubelet's next call (or `recover`) ends in one of the two states.

What a pod sees is decided once: a publish that finds its record mounts the recorded digests, whatever the
tags mean by now.

Cost of a publish whose content is here: no request to the registry when the policy and a remembered grant
allow it, one synced file, and a mount: a few milliseconds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast

from unlade.csi import attributes
from unlade.csi.attributes import Wanted
from unlade.csi.credentials import NodeCredentials
from unlade.csi.fetching import Alive, Fetches
from unlade.csi.holding import Holder
from unlade.csi.observed import Metrics
from unlade.csi.pods import NoEvents, Pod, PodEvents
from unlade.csi.records import Record, Records, Source, key_of
from unlade.csi.statuses import AlreadyPublished, NoSuchVolume, Overtaken, message
from unlade.delivery import AsTree, Delivered, Engine, PullPolicy, Request
from unlade.errors import StoreError, UnladeError
from unlade.kernel import failpoints
from unlade.model import Digest, Platform, Reference
from unlade.mount import MountOptions, is_mount_point, mount_layers, unpublish
from unlade.registry import CredentialSource, Registry
from unlade.registry.keyed import KeyedLocks
from unlade.tree import Tree

_log = logging.getLogger(__name__)

# Leases of volumes, by name: `recover` ends those that no record stands behind.
_LEASE: Final = "csi:"
# Between the fetch and the lease a collection may take a tree that no record names; not often in a row.
_TRIES: Final = 3


@dataclass(frozen=True, kw_only=True)
class Publish:
    """One NodePublishVolume for an inline volume."""

    volume_id: str
    target: str
    attributes: Mapping[str, str]
    flags: Sequence[str] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    seconds: float | None = None
    alive: Alive = lambda: True


@dataclass(frozen=True, slots=True)
class Stats:
    """What a volume holds; `problem` is empty while all is well."""

    size: int
    entries: int
    problem: str


@dataclass(frozen=True, slots=True)
class Tidied:
    """What `tidy` dropped, by key."""

    records: tuple[str, ...]
    leases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a node's administrator decides about volumes."""

    forced_pull: PullPolicy | None = None
    handlers: Mapping[str, Platform] = field(default_factory=dict)


class Inline:
    """The inline volumes of one node; thread-safe. The engine, registry and holder belong to the caller.

    The engine's trees are the holder's.
    """

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        holder: Holder,
        state: Path,
        *,
        credentials: NodeCredentials,
        metrics: Metrics,
        events: PodEvents | None = None,
        rules: Rules | None = None,
        parallel: int = 8,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._holder = holder
        self._records = Records(state / "volumes")
        self._empty = state / "empty"
        self._empty.mkdir(mode=0o755, exist_ok=True)
        self._credentials = credentials
        self._events = events or NoEvents()
        self._metrics = metrics
        self._rules = rules or Rules()
        self._fetches = Fetches(holder, metrics, parallel=parallel)
        self._alone = KeyedLocks()
        self._flights = _Flights()
        metrics.watch_volumes(lambda: len(self._records.all()))

    @property
    def capacity(self) -> int:
        """How many publishes may wait for content at once."""
        return self._fetches.capacity

    def close(self) -> None:
        """End what is being fetched; what is mounted stays."""
        self._fetches.close()

    def publish(self, ask: Publish) -> None:
        """Mount a volume; idempotent. Raises UnladeError: nothing is mounted then."""
        key = key_of(ask.volume_id, ask.target)
        wanted = attributes.parse(ask.attributes, ask.flags)
        with self._flights.begin(key) as flight:
            with self._alone.held(key):
                record = self._records.get(key)
                if record is not None and self._published(key, record, wanted):
                    return
            source = self._credentials.for_publish(wanted.references, ask.secrets, ask.attributes)
            for _ in range(_TRIES):
                delivered = self._fetch(key, record, wanted, source, ask)
                with self._alone.held(key):
                    flight.check(ask.alive)
                    # Another call for this volume may have come first.
                    record = self._records.get(key)
                    if record is not None and self._published(key, record, wanted):
                        return
                    if self._mount_new(key, record, wanted, delivered, ask):
                        self._metrics.publishes.labels("cached" if delivered.cached else "fetched").inc()
                        return
        raise StoreError(
            "the content was collected before it could be mounted",
            next_step="nothing: the kubelet asks again",
            retryable=True,
        )

    def unpublish(self, volume_id: str, target: str) -> None:
        """Unmount a volume and forget it; idempotent, also for one that never was."""
        key = key_of(volume_id, target)
        self._flights.void(key)
        self._fetches.cancel(key)
        with self._alone.held(key):
            self._withdraw(key, target)

    def stats(self, volume_id: str, path: str) -> Stats:
        """What is published there; raises NoSuchVolume."""
        record = self._records.get(key_of(volume_id, path))
        if record is None:
            raise NoSuchVolume(f"no volume {volume_id} is published at {path}")
        problem = ""
        if not is_mount_point(path):
            problem = "nothing is mounted: delete the pod, its successor mounts the volume again"
        elif self._is_lost(Digest.parse(record.tree)):
            problem = "its content is gone from the node's store: delete the pod, its successor fetches it"
        return Stats(record.size, record.entries, problem)

    def recover(self) -> int:
        """After a start, before anything is collected: hold what is on record; returns how many volumes."""
        records = self._records.all()
        for key, record in records.items():
            self._hold(key, Digest.parse(record.tree), record.pod)
        return len(records)

    def tidy(self) -> Tidied:
        """Drop records that no pod is behind any more, and leases that no record is behind."""
        dropped, released = [], []
        for key, record in self._records.all().items():
            with self._alone.held(key):
                # The kubelet made the parent for its pod and removes it after the pod: without it, nobody
                # will ever ask to unpublish.
                if not is_mount_point(record.target) and not os.path.isdir(os.path.dirname(record.target)):
                    self._records.drop(key)
                    dropped.append(key)
        for name in sorted(self._holder.held()):
            key = name.removeprefix(_LEASE)
            if key == name:
                continue
            # A publish holds and records under the same lock: no lease of one under way is seen here.
            with self._alone.held(key):
                if self._records.get(key) is None:
                    self._holder.release(name)
                    released.append(key)
        return Tidied(tuple(dropped), tuple(released))

    def _published(self, key: str, record: Record, wanted: Wanted) -> bool:
        """Whether it is mounted, or could be from its record with what is in the store."""
        if record.wanted != wanted.fingerprint():
            raise AlreadyPublished(
                f"volume {record.volume_id} is published at {record.target} with other attributes",
                next_step="delete the pod",
            )
        if is_mount_point(record.target):
            self._metrics.publishes.labels("there").inc()
            return True
        tree = self._hold(key, Digest.parse(record.tree), record.pod)
        if tree is None:
            return False
        self._mount(tree, record)
        self._metrics.publishes.labels("recorded").inc()
        return True

    def _fetch(
        self, key: str, record: Record | None, wanted: Wanted, source: CredentialSource, ask: Publish
    ) -> Delivered:
        request = self._request(wanted) if record is None else _pinned(record)
        pod = Pod.of(ask.attributes)
        engine = self._engine.using(self._registry.with_credentials(source))

        def unheard(error: UnladeError) -> None:
            # What a call answers, the kubelet makes an event of; this is for what comes between two calls.
            self._events.tell(pod, reason="FetchFailed", message=message(error), warning=True)

        return self._fetches.ask(
            key,
            " ".join(str(reference) for reference in request.references),
            lambda job: self._fetches.fetch(engine, request, job),
            seconds=ask.seconds,
            alive=ask.alive,
            unheard=unheard,
        )

    def _request(self, wanted: Wanted) -> Request:
        return Request(
            references=wanted.references,
            destination=AsTree(),
            platform=wanted.platform or self._rules.handlers.get(wanted.handler),
            handler=wanted.handler,
            pull=self._rules.forced_pull or wanted.pull,
            unpack=wanted.unpack,
            referrer=wanted.referrer,
            reauthorize=True,
        )

    def _mount_new(
        self, key: str, record: Record | None, wanted: Wanted, delivered: Delivered, ask: Publish
    ) -> bool:
        """Hold, record and mount what was fetched; False when it was collected meanwhile."""
        assert delivered.tree is not None
        first = record is None
        pod = str(Pod.of(ask.attributes))
        try:
            tree = self._hold(key, delivered.tree, pod)
            failpoints.reach("csi.publish.held")
            if tree is None:
                return False
            if first and is_mount_point(ask.target):
                # A record comes before its mount: what is here without one is of a state that was lost.
                unpublish(ask.target)
            if record is None or record.tree != str(tree.key):
                record = _record(ask, wanted, delivered, tree, pod)
                self._records.put(key, record)
            self._mount(tree, record)
        except Exception:
            if first:
                # A sub-path that is not there, a disk without space: not published, so nothing is left.
                self._withdraw(key, ask.target)
            raise
        return True

    def _withdraw(self, key: str, target: str) -> None:
        """Unmount, forget and let go, in an order that every crash survives."""
        unpublish(target)
        failpoints.reach("csi.unpublish.unmounted")
        self._records.drop(key)
        self._holder.release(_LEASE + key)
        failpoints.reach("csi.unpublish.released")

    def _mount(self, tree: Tree, record: Record) -> None:
        options = MountOptions(
            record.executable, record.context, record.sub_path, str(self._empty), sealed=True
        )
        mount_layers([str(layer) for layer in tree.layers], record.target, options, make_target=True)
        failpoints.reach("csi.publish.mounted")

    def _hold(self, key: str, tree: Digest, pod: str) -> Tree | None:
        """Hold a tree for a volume, over crashes and reboots; None when it is not in the store."""
        return self._holder.hold(_LEASE + key, f"volume of {pod}", tree)

    def _is_lost(self, tree: Digest) -> bool:
        """Whether a tree is known not to be there; a store that is away for now says nothing."""
        try:
            return self._holder.find(tree) is None
        except StoreError as error:
            if error.retryable:
                return False
            raise


class _Flight:
    """A publish that is under way."""

    def __init__(self) -> None:
        self.void = False

    def check(self, alive: Callable[[], bool]) -> None:
        """Raise Overtaken when an unpublish came since, or nobody waits any more."""
        if self.void or not alive():
            raise Overtaken("the volume was unpublished meanwhile", next_step="publish it again if needed")


class _Flights:
    """Publishes under way by volume: an unpublish voids those that began before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[str, set[_Flight]] = {}

    @contextmanager
    def begin(self, key: str) -> Iterator[_Flight]:
        flight = _Flight()
        with self._lock:
            self._flying.setdefault(key, set()).add(flight)
        try:
            yield flight
        finally:
            with self._lock:
                self._flying[key].discard(flight)
                if not self._flying[key]:
                    del self._flying[key]

    def void(self, key: str) -> None:
        with self._lock:
            for flight in self._flying.get(key, ()):
                flight.void = True


def _pinned(record: Record) -> Request:
    """The request that gives again what a record says, whatever the tags mean now."""
    return Request(
        references=tuple(
            Reference.parse(source.reference).with_digest(Digest.parse(source.digest))
            for source in record.sources
        ),
        destination=AsTree(),
        platform=Platform.parse(record.platform) if record.platform else None,
        handler=record.handler,
        pull="missing",
        unpack=cast("Literal['auto', 'always', 'never']", record.unpack),
        reauthorize=True,
    )


def _record(ask: Publish, wanted: Wanted, delivered: Delivered, tree: Tree, pod: str) -> Record:
    return Record(
        volume_id=ask.volume_id,
        target=ask.target,
        wanted=wanted.fingerprint(),
        sources=tuple(Source(str(one.reference), str(one.digest)) for one in delivered.resolved),
        tree=str(tree.key),
        size=tree.size,
        entries=tree.entries,
        sub_path=wanted.sub_path,
        unpack=wanted.unpack,
        executable=wanted.executable,
        context=wanted.context,
        handler=wanted.handler,
        platform=str(wanted.platform or ""),
        pod=pod,
    )
