"""The whole service of a node, wired: containerd below, the kubelet's socket above.

Started in this order: containerd answers, its handlers are known, what a killed predecessor left is tidied
away, and only then the socket is in its place. So a kubelet never sees half of anything. Nothing here is
worth keeping: containerd is the database, and a service that was killed is simply started again.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import grpc

from unlade.containerd import Artifacts, Containerd, ContainerdStore, Handler, Handlers, OrdinaryImages
from unlade.containerd.handlers import remember
from unlade.containerd.ingests import ingested
from unlade.cri.images import Images
from unlade.cri.observed import HandlerCounts, Metrics
from unlade.cri.ordinary import Ordinary
from unlade.cri.passthrough import Upstream, connect
from unlade.cri.pulled import is_image
from unlade.cri.pulls import Pulls
from unlade.cri.runtime import discover
from unlade.cri.server import ImageServer
from unlade.registry import CredentialSource, DockerConfigCredentials, Registry, RegistryConfig

_log = logging.getLogger(__name__)
# How long a start waits for containerd; then it fails, and systemd starts it again.
_START: Final = 60.0
# A probe's own patience is a second or two.
_PROBE: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """What a node's administrator decides."""

    socket: str = "/run/unlade/image.sock"
    containerd: str = "/run/containerd/containerd.sock"
    state: Path = Path("/run/unlade")
    parallel_pulls: int = 8
    parallel_pulls_per_registry: int = 0  # 0: as many as run at all
    handlers: tuple[Handler, ...] = ()
    # The kubelet's gate RuntimeClassInImageCriApi is on: pulls name the handler that they are for.
    handlers_are_told: bool = False
    # The kubelet knows that an ID may be there for one handler and not for another (none does yet).
    tuple_aware: bool = False
    registry: RegistryConfig = field(default_factory=RegistryConfig.system)
    credentials: CredentialSource = field(default_factory=DockerConfigCredentials)

    def everywhere(self, handlers: Handlers) -> bool:
        """Whether artifacts go into all handlers' snapshotters: nobody says which of them will mount one."""
        return not self.handlers_are_told and len(handlers.snapshotters()) > 1


class NodeService:
    """Serves from `start` until `close`; a context manager that does both."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._parts = ExitStack()
        self._server: ImageServer | None = None
        self._upstream: Upstream | None = None
        self.metrics = Metrics()
        self.pulls = Pulls(self.metrics)
        # From `start` on, for whoever shares the process and with it containerd.
        self.artifacts: Artifacts | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Listen; raises UnladeError when containerd is not there or not usable."""
        with ExitStack() as parts:
            self._server = self._assemble(parts)
            self._parts = parts.pop_all()
        self._server.start()
        _log.info("serving on %s", self._config.socket)

    def close(self, grace: float = 5.0) -> None:
        """Let running calls end within the grace; idempotent. The socket stays for who comes next."""
        if self._server is not None:
            self._server.close(grace)
            self._server = None
        self._parts.close()

    def healthy(self) -> str:
        """Empty while the service listens, else the reason why not."""
        if self._server is None:
            return "not started"
        return "" if os.path.exists(self._config.socket) else f"{self._config.socket} is gone"

    def ready(self) -> str:
        """Empty while containerd answers too."""
        reason = self.healthy()
        if reason or self._upstream is None:
            return reason
        try:
            self._upstream.ask("ImageFsInfo", b"", seconds=_PROBE)
        except grpc.RpcError as error:
            return f"containerd does not answer: {error.code().name}"
        return ""

    def _assemble(self, parts: ExitStack) -> ImageServer:
        config = self._config
        channel = connect(config.containerd)
        parts.callback(channel.close)
        handlers = discover(channel, config.handlers, seconds=_START)
        containerd = parts.enter_context(Containerd(config.containerd, state=config.state))
        registry = parts.enter_context(Registry(config.registry, config.credentials))
        everywhere = config.everywhere(handlers)
        artifacts = parts.enter_context(Artifacts(containerd, registry, handlers, everywhere=everywhere))
        self.artifacts = artifacts
        held = OrdinaryImages(containerd, handlers.default)
        remember(containerd, handlers)
        held.settle()
        recovered = artifacts.recover()
        _log.info(
            "tidied away: %d leases, %d images, %d names",
            *(len(found) for found in (recovered.leases, recovered.images, recovered.names)),
        )
        upstream = Upstream(channel)
        looks = partial(is_image, ContainerdStore(containerd))
        ordinary = Ordinary(held, handlers)
        images = Images(
            upstream,
            artifacts,
            ordinary,
            handlers,
            self.metrics,
            is_image=looks,
            tuple_aware=config.tuple_aware,
        )
        self._upstream = upstream
        self.pulls.ingested = partial(ingested, containerd)
        others = [name for name in handlers.known if name != handlers.default]
        self.metrics.watch_handlers(others, HandlerCounts(lambda: [*artifacts.list(), *held.recorded()]))
        return ImageServer(
            config.socket,
            upstream,
            images,
            self.metrics,
            watched=self.pulls,
            parallel_pulls=config.parallel_pulls,
            parallel_pulls_per_registry=config.parallel_pulls_per_registry,
        )
