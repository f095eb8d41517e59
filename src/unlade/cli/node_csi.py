"""`unlade node csi`: the CSI driver of a Kubernetes node.

The work is in `unlade.csi`, imported when the command runs. It needs neither containerd, which is its store
only where it is told the socket, nor a setting of the kubelet: it registers itself by the plugin socket. It
runs as a DaemonSet whose mounts reach the host (`mountPropagation: Bidirectional`), or as a host service.
Logs go to stderr as JSON lines that name the pod a volume is for. SIGTERM lets running calls end within the
grace, then ends with 0; volumes stay mounted.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unlade.cli.service import address, grace_option, log_json, service_options
from unlade.cli.settings import accepting

if TYPE_CHECKING:
    from unlade.controllers.api import ApiServer
    from unlade.controllers.pods import PodSecrets
    from unlade.cri.service import NodeConfig, NodeService
    from unlade.csi.pods import PodEvents
    from unlade.csi.service import CsiConfig, CsiService

# Connections to the API server: secrets of several pods at once, and events; the provisioner's watches and
# workers.
_CONNECTIONS = 16
# Events a second of the whole node, and at once.
_EVENTS_RATE = 2.0
_EVENTS_BURST = 20
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
            "--containerd-socket",
            default="",
            metavar="SOCKET",
            help="Keep content in containerd, as images that the kubelet collects; default: in --state.",
        ),
        click.option(
            "--containerd-namespace",
            default="k8s.io",
            show_default=True,
            help="With --containerd-socket: the kubelet's namespace there.",
        ),
        click.option(
            "--containerd-snapshotter",
            default="overlayfs",
            show_default=True,
            help="With --containerd-socket: overlayfs or native; that of the node's containers.",
        ),
        click.option(
            "--containerd-state",
            default="/run/unlade",
            show_default=True,
            metavar="DIR",
            help="With --containerd-socket: for locks; the --state of `unlade node serve` if it runs, too.",
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
        click.option(
            "--pod-secrets/--no-pod-secrets",
            "pod_secrets",
            default=False,
            help="Read the pull secrets of pods; needs the right to read secrets.",
        ),
        click.option(
            "--events/--no-events",
            default=False,
            help="Write events on pods; needs the right to create events.",
        ),
        click.option(
            "--kubeconfig",
            type=click.Path(),
            help="For --pod-secrets, --events and --writable: kubeconfig file; else the pod's account.",
        ),
        click.option("--writable/--no-writable", default=False, help="Serve writable volumes, too."),
        click.option(
            "--gc-high",
            type=click.FloatRange(1, 95),
            default=85.0,
            show_default=True,
            metavar="PERCENT",
            help="Of the store's disk in use: from here on what no volume uses is removed …",
        ),
        click.option(
            "--gc-low",
            type=click.FloatRange(1, 95),
            default=80.0,
            show_default=True,
            metavar="PERCENT",
            help="… until this is reached, used longest ago first.",
        ),
    )
    return accepting(command, options)


@click.command(short_help="Serve volumes to the kubelet, with or without containerd.")
@_options
@click.option(
    "--provision/--no-provision",
    default=True,
    show_default=True,
    help="With --writable: make volumes for claims placed on this node. Off where a sidecar does.",
)
@click.option(
    "--namespace",
    envvar="POD_NAMESPACE",
    default="default",
    show_default=True,
    help="With --writable: where the node's storage capacity is published; $POD_NAMESPACE.",
)
@service_options("127.0.0.1:9754")
@grace_option
def csi(
    *,
    listen: str,
    grace: float,
    log_level: str,
    kubeconfig: str | None,
    pod_secrets: bool,
    events: bool,
    provision: bool,
    namespace: str,
    **options: Any,
) -> None:
    """Serve inline volumes (driver oci.unlade.dev) to this node's kubelet until told to stop. Needs root.

    \b
    Examples:
      unlade node csi
      unlade node csi --force-pull-policy always --listen 0.0.0.0:9754
      unlade node csi --containerd-socket /run/containerd/containerd.sock
    """
    try:
        from unlade.controllers.health import HealthServer
        from unlade.csi.service import CsiService
    except ModuleNotFoundError as error:
        from unlade.errors import InvalidInput

        if (error.name or "").partition(".")[0] not in {"grpc", "google", "prometheus_client"}:
            raise
        raise InvalidInput(
            f"the driver needs {error.name}, which is not installed", next_step="pip install 'unlade[node]'"
        ) from error
    host, port = address(listen)
    log_json(log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    log = logging.getLogger(__name__)
    with ExitStack() as parts:
        provision = provision and options["writable"]
        cluster = parts.enter_context(
            _cluster(kubeconfig, pod_secrets=pod_secrets, events=events, provision=provision)
        )
        service = CsiService(config_of(cluster, **options), events=cluster.events)

        # Filled by the provisioner, which needs the service before it can be asked.
        watched: list[Callable[[], list[str]]] = [
            lambda: [reason for reason in (service.healthy(),) if reason]
        ]

        def health() -> list[str]:
            return [reason for ask in watched for reason in ask()]

        window = HealthServer(host, port, healthy=health, ready=health, metrics=service.metrics.text)
        parts.callback(window.close)
        log.info("numbers and probes on port %d", window.port)
        parts.callback(service.close, 0)
        service.start()
        with ExitStack() as serving:
            if provision:
                made = _provisioning(cluster, service, options["node_name"], namespace)
                watched.append(serving.enter_context(made))
            stop.wait()
        log.info("stopping: running calls have %g s", grace)
        service.close(grace)


@dataclass(frozen=True)
class _Cluster:
    """What the driver may ask of the API server; nothing unless it was told to."""

    secrets: PodSecrets | None = None
    events: PodEvents | None = None
    server: ApiServer | None = None


@contextmanager
def _cluster(
    kubeconfig: str | None, *, pod_secrets: bool, events: bool, provision: bool
) -> Iterator[_Cluster]:
    """The connection to the API server, if one is needed; raises InvalidInput when there is none."""
    if not (pod_secrets or events or provision):
        yield _Cluster()
        return
    try:
        from unlade.controllers.api import ApiServer, load_client
        from unlade.controllers.pods import COMPONENT, PodNotes, PodSecrets
        from unlade.controllers.recorder import Recorder
        from unlade.controllers.throttle import TokenBucket
    except ModuleNotFoundError as error:
        from unlade.errors import InvalidInput

        raise InvalidInput(
            f"--pod-secrets, --events and --writable need {error.name}, which is not installed",
            next_step="pip install 'unlade[kube]', or leave them out (--writable goes with --no-provision)",
        ) from error
    client = load_client(
        kubeconfig=kubeconfig, context=None, connections=_CONNECTIONS, user_agent="unlade-csi"
    )
    server = ApiServer(client)
    recorder = Recorder(server, COMPONENT, limit=TokenBucket(_EVENTS_RATE, _EVENTS_BURST))
    recorder.start()
    try:
        yield _Cluster(
            PodSecrets(server) if pod_secrets else None, PodNotes(recorder) if events else None, server
        )
    finally:
        recorder.stop()
        server.close()


@contextmanager
def _provisioning(
    cluster: _Cluster, service: CsiService, node: str, namespace: str
) -> Iterator[Callable[[], list[str]]]:
    """Serve the claims that are placed on this node, beside the driver; yields what asks for its health."""
    import socket as sockets

    from unlade.controllers.provisioner import Provisioner

    assert cluster.server is not None
    assert service.writable is not None
    provisioner = Provisioner(
        cluster.server,
        service.writable,
        node=node or sockets.gethostname(),
        namespace=namespace,
        secrets=cluster.secrets,
    )
    stop = threading.Event()
    thread = threading.Thread(target=provisioner.run, args=(stop,), name="provisioner", daemon=True)
    thread.start()

    def problems() -> list[str]:
        if not thread.is_alive():
            return ["the provisioner has died"]
        return provisioner.problems() if provisioner.synced else []

    try:
        yield problems
    finally:
        stop.set()
        thread.join()


def beside_options(command: Callable[..., None]) -> Callable[..., None]:
    """For `node serve`: the driver in the same process. What both need, they share."""
    options = (
        click.option(
            "--csi/--no-csi",
            default=False,
            help="Serve inline CSI volumes from this process, too; more options: `unlade node csi`.",
        ),
        click.option(
            "--csi-state",
            default="/var/lib/unlade",
            show_default=True,
            metavar="DIR",
            help="With --csi: the records of volumes.",
        ),
        click.option(
            "--csi-containerd/--no-csi-containerd",
            default=True,
            show_default=True,
            help="With --csi: keep volumes' content in containerd, or in --csi-state.",
        ),
        click.option(
            "--csi-socket",
            default=f"/var/lib/kubelet/plugins/{_DRIVER}/csi.sock",
            show_default=True,
            help="With --csi: where the driver listens.",
        ),
        click.option(
            "--csi-registration-socket",
            "csi_registration",
            default=f"/var/lib/kubelet/plugins_registry/{_DRIVER}-reg.sock",
            show_default=True,
            help="With --csi: where the kubelet's plugin watcher finds it.",
        ),
        click.option(
            "--node-name",
            envvar="NODE_NAME",
            default="",
            help="With --csi: this node's name in the cluster; $NODE_NAME, else the host's name.",
        ),
    )
    return accepting(command, options)


def beside(
    service: NodeService,
    config: NodeConfig,
    *,
    csi_state: str,
    csi_containerd: bool,
    csi_socket: str,
    csi_registration: str,
    node_name: str,
) -> CsiService:
    """The driver that shares a process, its settings, its numbers and containerd with the image service."""
    import socket as sockets

    from unlade.csi.credentials import NodeCredentials
    from unlade.csi.observed import Metrics
    from unlade.csi.service import CsiConfig, CsiService, Shared
    from unlade.csi.volumes import Rules

    def shared() -> Shared:
        assert service.artifacts is not None
        handler = service.artifacts.handlers.resolve("")
        return Shared(service.artifacts.containerd, handler.snapshotter)

    settings = CsiConfig(
        socket=csi_socket,
        registration=csi_registration,
        state=Path(csi_state),
        node_id=node_name or sockets.gethostname(),
        parallel_pulls=config.parallel_pulls,
        rules=Rules(handlers={handler.name: handler.platform for handler in config.handlers}),
        registry=config.registry,
        credentials=NodeCredentials(node=config.credentials),
    )
    metrics = Metrics(service.metrics.registry)
    return CsiService(settings, metrics=metrics, shared=shared if csi_containerd else None)


def config_of(
    cluster: _Cluster,
    *,
    socket: str,
    registration: str,
    state: str,
    containerd_socket: str,
    containerd_namespace: str,
    containerd_snapshotter: str,
    containerd_state: str,
    node_name: str,
    parallel_pulls: int,
    forced: str | None,
    handlers: tuple[str, ...],
    certs_dirs: tuple[str, ...],
    plain_http: tuple[str, ...],
    provider_config: str,
    provider_dir: str,
    writable: bool,
    gc_high: float,
    gc_low: float,
) -> CsiConfig:
    """The driver's settings from its options; raises InvalidInput."""
    import socket as sockets

    from unlade.csi.credentials import NodeCredentials
    from unlade.csi.service import CsiConfig, InContainerd
    from unlade.csi.volumes import Rules
    from unlade.registry import DockerConfigCredentials, KubeletProviderCredentials, RegistryConfig

    system = RegistryConfig.system()
    providers = KubeletProviderCredentials(provider_config, provider_dir) if provider_config else None
    containerd = InContainerd(
        address=containerd_socket,
        namespace=containerd_namespace,
        snapshotter=containerd_snapshotter,
        state=Path(containerd_state),
    )
    return CsiConfig(
        socket=socket,
        registration=registration,
        state=Path(state),
        node_id=node_name or sockets.gethostname(),
        parallel_pulls=parallel_pulls,
        writable=writable,
        containerd=containerd if containerd_socket else None,
        gc_high=gc_high,
        gc_low=gc_low,
        rules=Rules(
            forced_pull=forced,  # type: ignore[arg-type]
            handlers=dict(_handler(text) for text in handlers),
        ),
        registry=replace(
            system, certs_dirs=(*certs_dirs, *system.certs_dirs), plain_http=frozenset(plain_http)
        ),
        credentials=NodeCredentials(
            node=DockerConfigCredentials(), providers=providers, pods=cluster.secrets
        ),
    )


def _handler(text: str) -> tuple[str, Any]:
    from unlade.errors import InvalidInput
    from unlade.model import Platform

    name, _, platform = text.partition("=")
    if not name or not platform:
        raise InvalidInput(f"--handler {text!r} cannot be read", next_step="write NAME=OS/ARCH[/VARIANT]")
    return name, Platform.parse(platform)
