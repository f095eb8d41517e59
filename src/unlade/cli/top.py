"""`unlade top`: the pulls of this node, live (V18).

The service answers on a root-only socket in its state directory (`unlade.cri.watching`); where that is, an
installed service's record says, else it is the default. On a terminal a table is drawn anew every second; to
anything else a line is written for each pull. rich is imported only for the terminal.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from unlade.cli.settings import output_option, quiet_options

if TYPE_CHECKING:
    from unlade.cri.watching import Shown, ShownPull

COLUMNS: Final = ("REFERENCE", "POD", "HANDLER", "PHASE", "DONE", "OF", "%", "RATE", "LEFT", "TIME")
_STATE: Final = "/run/unlade"


@click.command(short_help="Show the pulls of this node, live.")
@click.option("--once", is_flag=True, help="Show what is now, and end.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option("--state", metavar="DIR", help="The service's --state; default: the installed one's.")
@output_option()
@quiet_options
def top(*, once: bool, interval: float, state: str | None, output: str) -> None:
    """Show each pull of this node's image service: phase, bytes, rate and time left. Ends with Ctrl-C.

    Of an image that containerd pulls itself, the bytes are those that containerd tells. With -o json, every
    look is one document; on a terminal the table is drawn anew, elsewhere each pull is a line.

    \b
    Examples:
      unlade top
      unlade top --once -o json
    """
    from unlade.cli.output import emit
    from unlade.cri.watching import SOCKET, ask

    path = Path(state or _installed_state()) / SOCKET
    if once or output != "table":
        while True:
            now = ask(path)
            emit(data(now), output, COLUMNS, [row(pull) for pull in now.pulls])
            if once:
                return
            sys.stdout.flush()
            time.sleep(interval)
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        _live(path, interval)
    else:
        _lines(path, interval)


def data(now: Shown) -> dict[str, Any]:
    """What -o json and -o yaml show."""
    import msgspec

    told: dict[str, Any] = msgspec.to_builtins(now)
    return told


def row(pull: ShownPull) -> tuple[str, ...]:
    """One pull as a person reads it."""
    from unlade.cli.output import human

    done, total, rate = pull.done_bytes, pull.total_bytes, pull.bytes_per_second
    return (
        pull.reference,
        f"{pull.pod.namespace}/{pull.pod.name}" if pull.pod else "-",
        pull.handler or "-",
        pull.phase,
        human(done) if done is not None else "-",
        human(total) if total is not None else "-",
        f"{100 * done // total}" if done is not None and total else "-",
        f"{human(int(rate))}/s" if rate is not None else "-",
        duration(pull.seconds_left) if pull.seconds_left is not None else "-",
        duration(pull.seconds),
    )


def duration(seconds: float) -> str:
    """`42s`, `3m07s`, `2h05m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def _lines(path: Path, interval: float) -> None:
    """A line per pull and look, as far as something is pulled."""
    from unlade.cli.output import printable
    from unlade.cri.watching import ask

    while True:
        for pull in ask(path).pulls:
            reference, pod, _, phase, done, total, share, rate, left, spent = row(pull)
            told = f"{printable(reference)}  {printable(pod)}  {phase}  {done} of {total} ({share} %)"
            print(f"{told}  {rate}  {left} left  {spent}", flush=True)
        time.sleep(interval)


def _live(path: Path, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from unlade.cli.output import printable
    from unlade.cri.watching import Unseen, ask

    def drawn() -> Table:
        table = Table(*COLUMNS, box=None, pad_edge=False, expand=True)
        for pull in ask(path).pulls:
            table.add_row(*(Text(printable(cell), overflow="ellipsis", no_wrap=True) for cell in row(pull)))
        if not table.row_count:
            table.add_row(Text("nothing is pulled", style="dim"))
        return table

    # Before the screen is taken: that there is no service is said where it can be read.
    first = drawn()
    with Live(first, console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                live.update(drawn(), refresh=True)
            except Unseen as error:  # a restart takes a second or two
                live.update(Text(f"{error}; looking again", style="yellow"), refresh=True)


def _installed_state() -> str:
    """Where the installed service keeps its socket; the default when none is, or nobody may look."""
    from unlade.errors import UnladeError
    from unlade.host.setup import installed
    from unlade.host.steps import Host

    try:
        return installed(Host()).version.state
    except (UnladeError, OSError):
        return _STATE
