"""`unlade controller`: the controllers of one cluster in one process.

Everything beyond the options is in `unlade.controllers`, which is imported when the command runs and not
before: the Kubernetes client alone takes longer to import than the whole of `unlade --help` may. Logs go
to stderr as JSON lines, because a daemon's reader is a collector. It ends with 0 after SIGTERM or SIGINT,
having given its lease back; with anything else it ended against its will.
"""

import json
import logging
import sys
import threading
from datetime import UTC, datetime

import click


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
    "--listen",
    default="0.0.0.0:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Where /healthz, /readyz and /metrics are served.",
)
@click.option(
    "--leader-elect/--no-leader-elect", "elect", default=True, help="Run only while holding the lease."
)
@click.option("--lease-name", default="unlade-controller", show_default=True, help="Name of the Lease.")
@click.option("--lease-namespace", default="", help="Namespace of the Lease; the pod's own when not given.")
@click.option("--lease-duration", type=click.IntRange(2), default=15, show_default=True, metavar="SECONDS")
@click.option("--renew-deadline", type=click.IntRange(1), default=10, show_default=True, metavar="SECONDS")
@click.option("--retry-period", type=click.FloatRange(1), default=2.0, show_default=True, metavar="SECONDS")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
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


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record))

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """What one line says; a face may add to it."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return line


def log_json(level: str) -> None:
    """Sends the log to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # urllib3 reports at warning level what our own messages already say better
    logging.getLogger("urllib3").setLevel(logging.ERROR)
