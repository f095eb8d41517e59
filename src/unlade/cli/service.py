"""What every service of ours has on its command line: where it is asked how it fares, and its log.

`controller`, `node serve` and `node csi` run until they are told to stop. Logs go to stderr as JSON lines,
because a daemon's reader is a collector.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import click

from unlade.cli.settings import Command, accepting

grace_option: Final = click.option(
    "--grace",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long running calls may go on after SIGTERM.",
)


def service_options(listen: str) -> Callable[[Command], Command]:
    """Accept --listen, with this default, and --log-level."""
    options = (
        click.option(
            "--listen",
            default=listen,
            show_default=True,
            metavar="HOST:PORT",
            help="Where /healthz, /readyz and /metrics are served.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="info",
            show_default=True,
        ),
    )

    return lambda function: accepting(function, options)


def address(listen: str) -> tuple[str, int]:
    """HOST:PORT, as --listen takes it."""
    from unlade.errors import InvalidInput

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal():
        raise InvalidInput(f"--listen {listen!r} is not HOST:PORT", next_step="write 127.0.0.1:9753")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - an empty host means every address


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the traceback when there is one, and what the
    line is about where its writer said so: the pod, the reference, the error's code.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**line, **getattr(record, "about", {})})


def log_json(level: str) -> None:
    """Sends the log to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # urllib3 reports at warning level what our own messages already say better
    logging.getLogger("urllib3").setLevel(logging.ERROR)
