"""`unlade` with failpoints that are armed while it runs: kills itself at the n-th durable step from then on.

    python -m tests.rig.node.armed node serve …

Each line on stdin starts a life, a child of this process; its pid and then its exit code are told on
stdout. A file that UNLADE_ARMED names holds the number; while it is not there nothing is counted. Steps that
were reached are appended to the same path with `.trace`. So a life first does again, unharmed, what the one
before it was killed at, and is then killed at a step of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

# Imported before any life begins, so that none has to; grpc starts no thread until it is used.
import unlade.cri.observed
import unlade.cri.service  # noqa: F401
from unlade.cli import main
from unlade.kernel import failpoints

VARIABLE = "UNLADE_ARMED"


class Armed:
    """Counts the steps since the file appeared."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reached = 0
        self._since = 0

    def reach(self, name: str) -> None:
        """Stands in for `failpoints.reach`."""
        with self._lock:
            try:
                with open(self._path, encoding="ascii") as file:
                    last, since = int(file.read()), os.fstat(file.fileno()).st_mtime_ns
            except FileNotFoundError:
                return
            self._reached = self._reached + 1 if since == self._since else 1
            self._since = since
            with open(f"{self._path}.trace", "a", encoding="ascii") as trace:
                trace.write(f"{name}\n")
            if self._reached == last:
                os.kill(os.getpid(), signal.SIGKILL)


def live(arguments: list[str]) -> None:
    """One life after another, until stdin ends."""
    reach = Armed(os.environ[VARIABLE]).reach
    while os.read(sys.stdin.fileno(), 1):
        life = os.fork()
        if life == 0:
            failpoints.reach = reach
            try:
                main(arguments)
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
        print(life, flush=True)
        _, status = os.waitpid(life, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    live(sys.argv[1:])
