"""`unlade node …`: the image service of a Kubernetes node.

The work is in `unlade.cri`, imported when the command runs: gRPC alone takes longer to import than the
whole of `unlade --help` may. It is a host service that starts after containerd and before the kubelet.
Logs go to stderr as JSON lines that name the pod a pull was for. SIGTERM lets running calls end within the
grace, then ends with 0; what a killed one left is tidied away by the next start.
"""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unlade.cli.node_csi import beside, beside_options, csi
from unlade.cli.node_install import install, status, uninstall
from unlade.cli.service import address, grace_option, log_json, service_options

if TYPE_CHECKING:
    from unlade.containerd import Handler


@click.group(short_help="The image service of a Kubernetes node.")
def node() -> None:
    """The image service of a Kubernetes node: native image volumes of any artifact.

    \b
    Examples:
      unlade node install
      unlade node status
      unlade node serve --socket /run/unlade/image.sock
    """


for _command in (install, uninstall, status, csi):
    node.add_command(_command)


@node.command(short_help="Serve the kubelet, in front of containerd.")
@click.option(
    "--socket",
    default="/run/unlade/image.sock",
    show_default=True,
    help="Where to listen: the kubelet's imageServiceEndpoint.",
)
@click.option(
    "--containerd",
    default="/run/containerd/containerd.sock",
    show_default=True,
    metavar="SOCKET",
    help="containerd's socket.",
)
@click.option(
    "--state",
    default="/run/unlade",
    show_default=True,
    metavar="DIR",
    help="For locks, and for `unlade top`.",
)
@click.option(
    "--parallel-pulls",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="Pulls at once; more wait for their turn.",
)
@click.option(
    "--parallel-pulls-per-registry",
    "per_registry",
    type=click.IntRange(1, 256),
    help="Of these, from one registry; default: all.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(),
    help="Tell the progress of long pulls as events of their pods, with these credentials.",
)
@click.option(
    "--handler",
    "handlers",
    multiple=True,
    metavar="NAME=PLATFORM[,SNAPSHOTTER]",
    help="What runs inside a runtime handler; may be repeated. Others run the host's platform.",
)
@click.option(
    "--handlers-are-told",
    is_flag=True,
    help="The kubelet's gate RuntimeClassInImageCriApi is on: pulls name the handler they are for.",
)
@click.option(
    "--tuple-aware-kubelet",
    "tuple_aware",
    is_flag=True,
    help="Lists show an entry for each handler. A stock kubelet would remove what pods use.",
)
@click.option(
    "--certs-dir",
    "certs_dirs",
    multiple=True,
    metavar="DIR",
    help="Per-host certificates and mirrors, before the system's; may be repeated.",
)
@click.option(
    "--plain-http",
    "plain_http",
    multiple=True,
    metavar="HOST[:PORT]",
    help="A registry without TLS; may be repeated.",
)
@beside_options
@service_options("127.0.0.1:9753")
@grace_option
def serve(
    *,
    socket: str,
    containerd: str,
    state: str,
    parallel_pulls: int,
    per_registry: int | None,
    kubeconfig: str | None,
    handlers: tuple[str, ...],
    handlers_are_told: bool,
    tuple_aware: bool,
    certs_dirs: tuple[str, ...],
    plain_http: tuple[str, ...],
    csi: bool,
    listen: str,
    grace: float,
    log_level: str,
    **driver: Any,
) -> None:
    """Serve the kubelet's image calls, in front of containerd, until told to stop.

    \b
    Examples:
      unlade node serve
      unlade node serve --handler kata=linux/amd64 --handler vm=linux/arm64,native
    """
    try:
        from unlade.cri.announcing import Announcer
        from unlade.cri.observed import Window
        from unlade.cri.service import NodeConfig, NodeService
        from unlade.cri.watching import Watch, shown
    except ModuleNotFoundError as error:
        from unlade.errors import InvalidInput

        if (error.name or "").partition(".")[0] not in {"grpc", "google", "prometheus_client"}:
            raise
        raise InvalidInput(
            f"the node's service needs {error.name}, which is not installed",
            next_step="pip install 'unlade[node]'",
        ) from error
    from importlib.metadata import version

    from unlade.cli.node_events import RecordedEvents
    from unlade.host.notify import notify
    from unlade.registry import RegistryConfig

    host, port = address(listen)
    system = RegistryConfig.system()
    registry = replace(
        system, certs_dirs=(*certs_dirs, *system.certs_dirs), plain_http=frozenset(plain_http)
    )  # fmt: skip
    config = NodeConfig(
        socket=socket,
        containerd=containerd,
        state=Path(state),
        parallel_pulls=parallel_pulls,
        parallel_pulls_per_registry=per_registry or 0,
        handlers=tuple(_handler(text) for text in handlers),
        handlers_are_told=handlers_are_told,
        tuple_aware=tuple_aware,
        registry=registry,
    )
    log_json(log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    installed = version("unlade")
    service = NodeService(config)
    volumes = beside(service, config, **driver) if csi else None
    events = RecordedEvents(kubeconfig) if kubeconfig else None

    def healthy() -> str:
        return service.healthy() or (volumes.healthy() if volumes is not None else "")

    def ready() -> str:
        return healthy() or service.ready()

    window = Window(host, port, service.metrics, healthy=healthy, ready=ready)
    log = logging.getLogger(__name__)
    log.info("numbers and probes on port %d", window.port)
    with ExitStack() as parts:
        parts.callback(window.close)
        parts.callback(service.close, 0)
        service.start()
        if volumes is not None:
            parts.callback(volumes.close, 0)
            volumes.start()
        try:
            watch = Watch(config.state, lambda: shown(service.pulls.states(), installed))
            parts.callback(watch.close)
        except OSError as error:  # pods matter more
            log.warning("`unlade top` cannot ask: %s", error)
        if events is not None:
            announcer = Announcer(service.pulls, events)
            announcer.start()
            parts.callback(events.close)
            parts.callback(announcer.close)
        notify("READY=1", f"STATUS=serving on {socket}")
        stop.wait()
        notify("STOPPING=1")
        log.info("stopping: running calls have %g s", grace)
        if volumes is not None:
            volumes.close(grace)
        service.close(grace)


def _handler(text: str) -> Handler:
    from unlade.containerd import Handler
    from unlade.errors import InvalidInput
    from unlade.model import Platform

    name, equals, rest = text.partition("=")
    platform, comma, snapshotter = rest.partition(",")
    if not name or not equals or not platform or (comma and not snapshotter):
        raise InvalidInput(
            f"--handler {text!r} cannot be read",
            next_step="write NAME=OS[(VERSION+FEATURE)]/ARCH[/VARIANT][,SNAPSHOTTER]",
        )
    guest = Platform.parse(platform)
    return Handler(name, guest, snapshotter)  # empty: containerd's own for this handler
