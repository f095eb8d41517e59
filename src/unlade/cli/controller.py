"""`unlade controller`: the controllers of one cluster in one process.

Everything beyond the options is in `unlade.controllers`, which is imported when the command runs and not
before: the Kubernetes client alone takes longer to import than the whole of `unlade --help` may. Logs go
to stderr as JSON lines, because a daemon's reader is a collector. It ends with 0 after SIGTERM or SIGINT,
having given its lease back; with anything else it ended against its will.
"""

import logging
import threading

import click

from unlade.cli.service import log_json, service_options


@click.command()
@click.option(
    "--controllers",
    "names",
    multiple=True,
    metavar="NAME",
    help="A controller to run; may be repeated. There is: ephemeral-volumes. None runs unless named.",
)
@click.option(
    "--kubeconfig", type=click.Path(), help="Kubeconfig file; else the pod's account, else the usual."
)
@click.option("--context", help="Context of the kubeconfig.")
@click.option("--workers", type=click.IntRange(1, 256), default=10, show_default=True, help="Parallel runs.")
@click.option(
    "--kube-api-qps",
    "qps",
    type=click.FloatRange(0),
    default=20.0,
    show_default=True,
    help="Writes a second; 0: no limit.",
)
@click.option(
    "--kube-api-burst",
    "burst",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="Writes at once before the rate applies.",
)
@click.option(
    "--resync",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How often every pod is looked at again.",
)
@click.option(
    "--leader-elect/--no-leader-elect", "elect", default=True, help="Run only while holding the lease."
)
@click.option("--lease-name", default="unlade-controller", show_default=True, help="Name of the Lease.")
@click.option("--lease-namespace", default="", help="Namespace of the Lease; the pod's own when not given.")
@click.option("--lease-duration", type=click.IntRange(2), default=15, show_default=True, metavar="SECONDS")
@click.option("--renew-deadline", type=click.IntRange(1), default=10, show_default=True, metavar="SECONDS")
@click.option("--retry-period", type=click.FloatRange(1), default=2.0, show_default=True, metavar="SECONDS")
@service_options("0.0.0.0:8080")
def controller(
    *,
    names: tuple[str, ...],
    kubeconfig: str | None,
    context: str | None,
    workers: int,
    qps: float,
    burst: int,
    resync: float,
    listen: str,
    elect: bool,
    lease_name: str,
    lease_namespace: str,
    lease_duration: int,
    renew_deadline: int,
    retry_period: float,
    log_level: str,
) -> None:
    """Run controllers against a Kubernetes API server until told to stop.

    Ordinary clusters make the claims of ephemeral volumes themselves (kube-controller-manager): name
    ephemeral-volumes only where nothing else does, such as a virtual or hosted control plane.
    """
    log_json(log_level)
    try:
        from unlade.controllers.elector import LeaseTimes
        from unlade.controllers.manager import Manager, Options, stop_on_signals
    except ModuleNotFoundError as error:
        from unlade.errors import InvalidInput

        if (error.name or "").partition(".")[0] not in {"kubernetes", "prometheus_client"}:
            raise
        raise InvalidInput(
            f"the controllers need {error.name}, which is not installed",
            next_step="pip install 'unlade[kube]'",
        ) from error

    options = Options(
        controllers=names,
        kubeconfig=kubeconfig,
        context=context,
        workers=workers,
        qps=qps,
        burst=burst,
        resync=resync,
        listen=listen,
        elect=elect,
        lease_name=lease_name,
        lease_namespace=lease_namespace,
        times=LeaseTimes(lease_duration, renew_deadline, retry_period),
    )
    stop = threading.Event()
    stop_on_signals(stop)
    log = logging.getLogger(__name__)
    Manager(options, user_agent="unlade-controller").run(
        stop, on_listen=lambda port: log.info("listening on port %d", port)
    )
