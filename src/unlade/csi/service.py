"""The whole driver of a node, from its settings: store, engine, volumes, server.

Here, and nowhere else, it is decided where content is kept: in a directory, or in containerd (`holding`).

`CsiService` serves from `start` until `close`. Nothing of it lives in this process alone: volumes are
records, mounts and leases, so an agent that was killed is simply started again, and one that is replaced
leaves its mounts to its successor.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from unlade.containerd import Containerd
from unlade.containerd.connection import DEFAULT_STATE, PATIENCE
from unlade.containerd.handlers import DEFAULT_SNAPSHOTTER
from unlade.csi import DRIVER_NAME
from unlade.csi.contained import ContainerdHolder
from unlade.csi.controller import controller_of
from unlade.csi.credentials import NodeCredentials
from unlade.csi.holding import DirHolder, Holder, mounted
from unlade.csi.identity import Identity
from unlade.csi.node import Node
from unlade.csi.observed import Metrics
from unlade.csi.pods import PodEvents
from unlade.csi.registration import Registration
from unlade.csi.server import CsiServer
from unlade.csi.volumes import Inline, Rules
from unlade.csi.writable import StoreSeeds, Writable
from unlade.delivery import Engine
from unlade.errors import StoreError
from unlade.registry import CredentialSource, Registry, RegistryConfig
from unlade.store import DirStore
from unlade.store.upkeep import HIGH_PERCENT, LOW_PERCENT, Upkeep

_log = logging.getLogger(__name__)

SOCKET: Final = f"/var/lib/kubelet/plugins/{DRIVER_NAME}/csi.sock"
REGISTRATION: Final = f"/var/lib/kubelet/plugins_registry/{DRIVER_NAME}-reg.sock"
# How often records whose pod is gone are looked for: they cost nothing but the content they hold.
_TIDY: Final = 300.0
# While the store was away at the start and nothing could be held: containerd comes back in seconds.
_TIDY_SOON: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class InContainerd:
    """containerd as the store. `state` is for locks, the same for all who use this containerd."""

    address: str
    namespace: str = "k8s.io"
    snapshotter: str = DEFAULT_SNAPSHOTTER
    state: Path = DEFAULT_STATE
    # How long a fetch waits for a containerd that is away.
    patience: float = PATIENCE

    def connect(self) -> Containerd:
        """A connection of the caller's own; containerd need not be there yet."""
        return Containerd(self.address, namespace=self.namespace, state=self.state, patience=self.patience)


@dataclass(frozen=True, slots=True)
class Shared:
    """Somebody else's connection to containerd, who closes it, and the snapshotter that both use."""

    containerd: Containerd
    snapshotter: str = DEFAULT_SNAPSHOTTER


@dataclass(frozen=True, kw_only=True)
class CsiConfig:
    """What a node's administrator decides."""

    socket: str = SOCKET
    registration: str = REGISTRATION
    state: Path = Path("/var/lib/unlade")
    node_id: str = field(default_factory=sockets.gethostname)
    parallel_pulls: int = 8
    writable: bool = False
    # None: content is in the state directory.
    containerd: InContainerd | None = None
    # Percent of the store's file system: from the first, what is unused goes until the second is reached.
    gc_high: float = HIGH_PERCENT
    gc_low: float = LOW_PERCENT
    rules: Rules = field(default_factory=Rules)
    registry: RegistryConfig = field(default_factory=RegistryConfig.system)
    credentials: NodeCredentials = field(default_factory=NodeCredentials)


class CsiService:
    """Serves from `start` until `close`; a context manager that does both.

    `shared` gives, at the start, a connection to containerd that is used instead of one by the settings.
    """

    def __init__(
        self,
        config: CsiConfig,
        *,
        metrics: Metrics | None = None,
        events: PodEvents | None = None,
        shared: Callable[[], Shared] | None = None,
    ) -> None:
        self._config = config
        self._shared = shared
        self._events = events
        self._parts = ExitStack()
        self._server: CsiServer | None = None
        self._stop = threading.Event()
        self.metrics = metrics or Metrics()
        self.store: DirStore | None = None
        self.holder: Holder | None = None
        self.writable: Writable | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Listen and register; raises UnladeError when the state directory is not usable."""
        with ExitStack() as parts:
            server = self._assemble(parts)
            server.start()
            self._parts = parts.pop_all()
        self._server = server
        _log.info("serving on %s", self._config.socket)

    def close(self, grace: float = 5.0) -> None:
        """Let running calls end within the grace; idempotent. What is mounted stays mounted."""
        self._stop.set()
        if self._server is not None:
            self._server.close(grace)
            self._server = None
        self._parts.close()

    def healthy(self) -> str:
        """Empty while the driver listens, else the reason why not."""
        if self._server is None:
            return "not started"
        return "" if os.path.exists(self._config.socket) else f"{self._config.socket} is gone"

    def _assemble(self, parts: ExitStack) -> CsiServer:
        config = self._config
        store = parts.enter_context(DirStore(config.state / "store"))
        registry = parts.enter_context(Registry(config.registry, config.credentials.node))
        holder, keep_up = self._holder(parts, store)
        # Container runtimes bind a volume again with flags of their own, and nosuid is not among them.
        engine = parts.enter_context(Engine(registry, store, trees=holder.trees, setid=False))
        inline = Inline(
            engine,
            registry,
            holder,
            config.state / "csi",
            credentials=config.credentials,
            metrics=self.metrics,
            events=self._events,
            rules=config.rules,
            parallel=config.parallel_pulls,
        )
        parts.callback(inline.close)
        writable = self._writing(engine, holder) if config.writable else None
        self.store, self.holder, self.writable = store, holder, writable
        recovered = self._recover(inline, writable)
        # Not before everything on record is held.
        keep_up()
        controller = controller_of(writable, config.node_id) if writable is not None else None
        tidying = threading.Thread(
            target=self._keep_tidy, args=(inline, writable, recovered), name="tidy", daemon=True
        )
        tidying.start()
        parts.callback(tidying.join, 10.0)
        parts.callback(self._stop.set)
        registration = (config.registration, Registration(config.socket)) if config.registration else None
        return CsiServer(
            config.socket,
            Identity(controller=controller is not None, ready=lambda: ""),
            Node(config.node_id, inline, writable),
            self.metrics,
            waiting=inline.capacity,
            controller=controller,
            registration=registration,
        )

    def _holder(self, parts: ExitStack, store: DirStore) -> tuple[Holder, Callable[[], None]]:
        """Where content is kept, and what starts to look after its disk once all that is used is held."""
        config = self._config
        if self._shared is not None:
            shared = self._shared()
        elif config.containerd is not None:
            connection = parts.enter_context(config.containerd.connect())
            shared = Shared(connection, config.containerd.snapshotter)
        else:
            upkeep = Upkeep(store, mounted=mounted, high=config.gc_high, low=config.gc_low)
            parts.callback(upkeep.stop)
            return DirHolder(store, upkeep), upkeep.start
        _log.info("content is kept in containerd at %s", shared.containerd.address)
        scope = str(config.state.absolute())
        holder = ContainerdHolder(shared.containerd, store, scope=scope, snapshotter=shared.snapshotter)
        return holder, lambda: None  # the kubelet does

    def _writing(self, engine: Engine, holder: Holder) -> Writable:
        def connect(credentials: CredentialSource) -> Registry:
            return Registry(self._config.registry, credentials)

        rules = self._config.rules
        seeds = StoreSeeds(
            engine, holder, connect=connect, forced_pull=rules.forced_pull, handlers=rules.handlers
        )
        writable = Writable(self._config.state / "csi" / "writable", seeds)
        self.metrics.watch_writable(
            lambda: len(writable.volumes()),
            lambda: writable.room().promised,
            lambda: writable.room().available,
        )
        return writable

    def _recover(self, inline: Inline, writable: Writable | None) -> bool:
        """Hold what is on record, finish what was begun; False when the store is away: pods wait, not we."""
        assert self.holder is not None
        try:
            self.holder.held()
            _log.info("volumes on record: %d", inline.recover())
            if writable is not None:
                writable.recover()
            self._tidy(inline, writable)
        except StoreError as error:
            if not error.retryable:
                raise
            _log.warning("what volumes hold is looked at later: %s", error)
            return False
        return True

    def _keep_tidy(self, inline: Inline, writable: Writable | None, recovered: bool) -> None:
        while not self._stop.wait(_TIDY if recovered else _TIDY_SOON):
            try:
                if recovered:
                    self._tidy(inline, writable)
                else:
                    recovered = self._recover(inline, writable)
            except Exception:
                _log.exception("tidying away volumes without a pod")

    def _tidy(self, inline: Inline, writable: Writable | None) -> None:
        tidied = inline.tidy()
        if tidied.records or tidied.leases:
            _log.info(
                "tidied away: %d records without a pod, %d leases without a record",
                len(tidied.records),
                len(tidied.leases),
            )
        if writable is not None:
            writable.tidy()
        if self.holder is not None:
            self.holder.tidy()
