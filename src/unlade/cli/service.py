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
from typing import Any, Final, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

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

    def accept(function: Command) -> Command:
        decorated: Any = function
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return accept


def address(listen: str) -> tuple[str, int]:
    """HOST:PORT, as --listen takes it."""
    from unlade.errors import InvalidInput

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal():
        raise InvalidInput(f"--listen {listen!r} is not HOST:PORT", next_step="write 127.0.0.1:9753")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - an empty host means every address


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
