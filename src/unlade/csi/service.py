"""The whole driver of a node, from its settings: store, engine, volumes, server.

`CsiService` serves from `start` until `close`. Nothing of it lives in this process alone: volumes are
records, mounts and leases, so an agent that was killed is simply started again, and one that is replaced
leaves its mounts to its successor.
"""

from __future__ import annotations

import logging
import os
import socket as sockets
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from unlade.csi import DRIVER_NAME
from unlade.csi.controller import controller_of
from unlade.csi.credentials import NodeCredentials
from unlade.csi.identity import Identity
from unlade.csi.node import Node
from unlade.csi.observed import Metrics
from unlade.csi.pods import PodEvents
from unlade.csi.registration import Registration
from unlade.csi.server import CsiServer
from unlade.csi.volumes import Inline, Rules
from unlade.csi.writable import StoreSeeds, Writable
from unlade.delivery import Engine
from unlade.mount import read_table
from unlade.registry import CredentialSource, Registry, RegistryConfig
from unlade.store import DirStore
from unlade.store.upkeep import HIGH_PERCENT, LOW_PERCENT, Upkeep

_log = logging.getLogger(__name__)

SOCKET: Final = f"/var/lib/kubelet/plugins/{DRIVER_NAME}/csi.sock"
REGISTRATION: Final = f"/var/lib/kubelet/plugins_registry/{DRIVER_NAME}-reg.sock"
# How often records whose pod is gone are looked for: they cost nothing but the content they hold.
_TIDY: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class CsiConfig:
    """What a node's administrator decides."""

    socket: str = SOCKET
    registration: str = REGISTRATION
    state: Path = Path("/var/lib/unlade")
    node_id: str = field(default_factory=sockets.gethostname)
    parallel_pulls: int = 8
    writable: bool = False
    # Percent of the store's file system: from the first, what is unused goes until the second is reached.
    gc_high: float = HIGH_PERCENT
    gc_low: float = LOW_PERCENT
    rules: Rules = field(default_factory=Rules)
    registry: RegistryConfig = field(default_factory=RegistryConfig.system)
    credentials: NodeCredentials = field(default_factory=NodeCredentials)


class CsiService:
    """Serves from `start` until `close`; a context manager that does both."""

    def __init__(
        self,
        config: CsiConfig,
        *,
        metrics: Metrics | None = None,
        events: PodEvents | None = None,
    ) -> None:
        self._config = config
        self._events = events
        self._parts = ExitStack()
        self._server: CsiServer | None = None
        self._stop = threading.Event()
        self.metrics = metrics or Metrics()
        self.store: DirStore | None = None
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
        # Container runtimes bind a volume again with flags of their own, and nosuid is not among them.
        engine = parts.enter_context(Engine(registry, store, setid=False))
        upkeep = Upkeep(store, mounted=_mounted, high=config.gc_high, low=config.gc_low)
        inline = Inline(
            engine,
            registry,
            store,
            config.state / "csi",
            credentials=config.credentials,
            metrics=self.metrics,
            events=self._events,
            rules=config.rules,
            parallel=config.parallel_pulls,
            room=upkeep.room,
        )
        parts.callback(inline.close)
        _log.info("volumes on record: %d", inline.recover())
        self._tidy(inline)
        writable = self._writing(engine, store) if config.writable else None
        # Not before everything on record is held.
        upkeep.start()
        parts.callback(upkeep.stop)
        self.store, self.writable = store, writable
        controller = controller_of(writable, config.node_id) if writable is not None else None
        tidying = threading.Thread(target=self._keep_tidy, args=(inline,), name="tidy", daemon=True)
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

    def _writing(self, engine: Engine, store: DirStore) -> Writable:
        def connect(credentials: CredentialSource) -> Registry:
            return Registry(self._config.registry, credentials)

        rules = self._config.rules
        seeds = StoreSeeds(
            engine, store, connect=connect, forced_pull=rules.forced_pull, handlers=rules.handlers
        )
        writable = Writable(self._config.state / "csi" / "writable", seeds)
        writable.recover()
        self.metrics.watch_writable(
            lambda: len(writable.volumes()),
            lambda: writable.room().promised,
            lambda: writable.room().available,
        )
        return writable

    def _keep_tidy(self, inline: Inline) -> None:
        while not self._stop.wait(_TIDY):
            try:
                self._tidy(inline)
            except Exception:
                _log.exception("tidying away volumes without a pod")

    def _tidy(self, inline: Inline) -> None:
        tidied = inline.tidy()
        if tidied.records or tidied.leases:
            _log.info(
                "tidied away: %d records without a pod, %d leases without a record",
                len(tidied.records),
                len(tidied.leases),
            )


def _mounted() -> list[bytes]:
    return [entry.path for entry in read_table()]
