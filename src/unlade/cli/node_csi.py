"""`unlade node csi`: the CSI driver of a Kubernetes node.

The work is in `unlade.csi`, imported when the command runs. It needs neither containerd nor a setting of the
kubelet: it registers itself by the kubelet's plugin socket. It runs as a DaemonSet whose mounts reach the
host (`mountPropagation: Bidirectional`), or as a host service. Logs go to stderr as JSON lines that name the
pod a volume is for. SIGTERM lets running calls end within the grace, then ends with 0; volumes stay mounted.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unlade.cli.controller import log_json

if TYPE_CHECKING:
    from unlade.csi.service import CsiConfig

_DRIVER = "oci.unlade.dev"


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """The driver's options; what they say becomes a CsiConfig in `config_of`."""
    options = (
        click.option(
            "--socket",
            default=f"/var/lib/kubelet/plugins/{_DRIVER}/csi.sock",
            show_default=True,
            help="Where to listen, as the kubelet sees it.",
        ),
        click.option(
            "--registration-socket",
            "registration",
            default=f"/var/lib/kubelet/plugins_registry/{_DRIVER}-reg.sock",
            show_default=True,
            help="Where the kubelet's plugin watcher finds us; empty: node-driver-registrar does it.",
        ),
        click.option(
            "--state",
            default="/var/lib/unlade",
            show_default=True,
            metavar="DIR",
            help="The store and the records of volumes; one local file system.",
        ),
        click.option(
            "--node-name",
            envvar="NODE_NAME",
            default="",
            help="This node's name in the cluster; $NODE_NAME, else the host's name.",
        ),
        click.option(
            "--parallel-pulls",
            type=click.IntRange(1, 256),
            default=8,
            show_default=True,
            help="Fetches at once; more wait for their turn.",
        ),
        click.option(
            "--force-pull-policy",
            "forced",
            type=click.Choice(["always", "missing"]),
            help="The pull policy of every volume, whatever it says itself.",
        ),
        click.option(
            "--handler",
            "handlers",
            multiple=True,
            metavar="NAME=PLATFORM",
            help="What runs inside a runtime handler that volumes name; may be repeated.",
        ),
        click.option(
            "--certs-dir",
            "certs_dirs",
            multiple=True,
            metavar="DIR",
            help="Per-host certificates and mirrors, before the system's; may be repeated.",
        ),
        click.option(
            "--plain-http",
            "plain_http",
            multiple=True,
            metavar="HOST[:PORT]",
            help="A registry without TLS; may be repeated.",
        ),
        click.option(
            "--image-credential-provider-config",
            "provider_config",
            default="",
            metavar="FILE",
            help="The kubelet's credential providers, to be asked for volumes too.",
        ),
        click.option(
            "--image-credential-provider-bin-dir",
            "provider_dir",
            default="",
            metavar="DIR",
            help="Where their programs are.",
        ),
        click.option("--writable/--no-writable", default=False, help="Serve writable volumes, too."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(short_help="Serve volumes to the kubelet, without containerd.")
@_options
@click.option(
    "--listen",
    default="127.0.0.1:9754",
    show_default=True,
    metavar="HOST:PORT",
    help="Where /healthz, /readyz and /metrics are served.",
)
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long running calls may go on after SIGTERM.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
def csi(*, listen: str, grace: float, log_level: str, **options: Any) -> None:
    """Serve inline volumes (driver oci.unlade.dev) to this node's kubelet until told to stop. Needs root.

    \b
    Examples:
      unlade node csi
      unlade node csi --force-pull-policy always --listen 0.0.0.0:9754
    """
    try:
        from unlade.cri.observed import Window
        from unlade.csi.service import CsiService
    except ModuleNotFoundError as error:
        from unlade.errors import InvalidInput

        if (error.name or "").partition(".")[0] not in {"grpc", "google", "prometheus_client"}:
            raise
        raise InvalidInput(
            f"the driver needs {error.name}, which is not installed", next_step="pip install 'unlade[node]'"
        ) from error
    from unlade.cli.node import NodeLines, _address

    host, port = _address(listen)
    config = config_of(**options)
    log_json(log_level)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(NodeLines())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    service = CsiService(config)
    metrics: Any = service.metrics  # the window needs its text alone
    window = Window(host, port, metrics, healthy=service.healthy, ready=service.healthy)
    log = logging.getLogger(__name__)
    log.info("numbers and probes on port %d", window.port)
    try:
        service.start()
        stop.wait()
        log.info("stopping: running calls have %g s", grace)
        service.close(grace)
    finally:
        service.close(0)
        window.close()


def config_of(
    *,
    socket: str,
    registration: str,
    state: str,
    node_name: str,
    parallel_pulls: int,
    forced: str | None,
    handlers: tuple[str, ...],
    certs_dirs: tuple[str, ...],
    plain_http: tuple[str, ...],
    provider_config: str,
    provider_dir: str,
    writable: bool,
) -> CsiConfig:
    """The driver's settings from its options; raises InvalidInput."""
    import socket as sockets

    from unlade.csi.credentials import NodeCredentials
    from unlade.csi.service import CsiConfig
    from unlade.csi.volumes import Rules
    from unlade.registry import DockerConfigCredentials, KubeletProviderCredentials, RegistryConfig

    system = RegistryConfig.system()
    providers = KubeletProviderCredentials(provider_config, provider_dir) if provider_config else None
    return CsiConfig(
        socket=socket,
        registration=registration,
        state=Path(state),
        node_id=node_name or sockets.gethostname(),
        parallel_pulls=parallel_pulls,
        writable=writable,
        rules=Rules(
            forced_pull=forced,  # type: ignore[arg-type]
            handlers=dict(_handler(text) for text in handlers),
        ),
        registry=replace(
            system, certs_dirs=(*certs_dirs, *system.certs_dirs), plain_http=frozenset(plain_http)
        ),
        credentials=NodeCredentials(node=DockerConfigCredentials(), providers=providers),
    )


def _handler(text: str) -> tuple[str, Any]:
    from unlade.errors import InvalidInput
    from unlade.model import Platform

    name, _, platform = text.partition("=")
    if not name or not platform:
        raise InvalidInput(f"--handler {text!r} cannot be read", next_step="write NAME=OS/ARCH[/VARIANT]")
    return name, Platform.parse(platform)
