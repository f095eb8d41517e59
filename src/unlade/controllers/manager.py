"""One controller process: configuration in, leadership, controllers, health, a clean end.

`run` is all that the command line calls. The order matters: the health port opens first (a kubelet that
probes early must hear "not ready", not a refusal), then the lease is waited for, and only a leader lists
and watches, so that a standby costs the API server two small reads a second. Losing the lease stops
the controllers and makes the process a candidate again, with fresh caches.
"""

import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from unlade.controllers import ephemeral
from unlade.controllers.api import ApiServer, load_client
from unlade.controllers.elector import Elector, LeaseTimes
from unlade.controllers.health import HealthServer
from unlade.controllers.metrics import Metrics
from unlade.controllers.throttle import TokenBucket
from unlade.errors import InvalidInput

log = logging.getLogger(__name__)

CONTROLLERS = (ephemeral.NAME,)
ACCOUNT_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@dataclass(frozen=True)
class Options:
    """Everything that the command line can say; defaults are those of the Kubernetes components."""

    controllers: tuple[str, ...] = ()
    kubeconfig: str | None = None
    context: str | None = None
    workers: int = 10
    qps: float = 20.0
    burst: int = 30
    resync: float = 600.0
    listen: str = "0.0.0.0:8080"
    elect: bool = True
    lease_name: str = "unlade-controller"
    lease_namespace: str = ""
    times: LeaseTimes = field(default_factory=LeaseTimes)


class Manager:
    """The parts of one process. `run` blocks until `stop` is set."""

    def __init__(self, options: Options, *, user_agent: str) -> None:
        unknown = [name for name in options.controllers if name not in CONTROLLERS]
        if unknown or not options.controllers:
            raise InvalidInput(
                f"no such controller: {', '.join(unknown)}" if unknown else "no controller was named",
                next_step=f"name at least one of: {', '.join(CONTROLLERS)}",
            )
        self.options = options
        self.metrics = Metrics()
        # a connection each for workers, two watches, two lists, events, and the lease
        client = load_client(
            kubeconfig=options.kubeconfig,
            context=options.context,
            connections=options.workers + 6,
            user_agent=user_agent,
        )
        self.server = ApiServer(client, observe=self.metrics.observe_request)
        self.identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        self._controller: ephemeral.EphemeralVolumes | None = None
        self._elector: Elector | None = None
        if options.elect:
            self._elector = Elector(
                client,
                name=options.lease_name,
                namespace=options.lease_namespace or own_namespace(),
                identity=self.identity,
                times=options.times,
            )

    def run(self, stop: threading.Event, *, on_listen: Callable[[int], None] = lambda _port: None) -> None:
        """Serves health, leads when it may, until `stop`. Raises what ended it otherwise."""
        host, _colon, port = self.options.listen.rpartition(":")
        try:
            health = HealthServer(
                host.strip("[]"),
                int(port),
                healthy=self.unhealthy,
                ready=self.unready,
                metrics=self.metrics.text,
            )
        except (ValueError, OverflowError, OSError) as error:
            raise InvalidInput(
                f"cannot listen on {self.options.listen}: {error}", next_step="give a free HOST:PORT"
            ) from error
        on_listen(health.port)
        try:
            if self._elector is None:
                self.lead(stop)
            else:
                self._elector.run(stop, self.lead)
        finally:
            health.close()
            self.server.close()

    def lead(self, stop: threading.Event) -> None:
        """Runs the controllers until `stop`; each time with fresh caches."""
        controller = ephemeral.EphemeralVolumes(
            self.server,
            limit=TokenBucket(self.options.qps, self.options.burst),
            workers=self.options.workers,
            resync=self.options.resync,
            metrics=self.metrics,
        )
        self._controller = controller
        self.metrics.leader.set(1)
        try:
            controller.run(stop)
        finally:
            self.metrics.leader.set(0)
            self._controller = None

    def unhealthy(self) -> list[str]:
        """Why this process should be restarted."""
        controller = self._controller
        return controller.problems() if controller is not None and controller.synced else []

    def unready(self) -> list[str]:
        """Why this process cannot do its job yet, as leader or as standby."""
        controller = self._controller
        if controller is not None:
            return [] if controller.synced else ["the caches are not synced yet"]
        if self._elector is None:
            return ["the controller has not started yet"]
        silent = self._elector.silent_for
        if silent == float("inf"):
            return ["the lease has not been read yet"]
        # a lease read within its duration: this standby would notice that the leader is gone
        if silent > self.options.times.duration:
            return [f"the lease was last read {silent:.0f} s ago"]
        return []


def own_namespace() -> str:
    """The namespace of the pod this process runs in, else `default`."""
    try:
        with open(ACCOUNT_NAMESPACE, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return os.environ.get("POD_NAMESPACE") or "default"


def stop_on_signals(stop: threading.Event) -> None:
    """SIGTERM and SIGINT set `stop`; must be called on the main thread."""

    def on_signal(number: int, _frame: object) -> None:
        log.info("stopping: %s", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
