"""The image service as a process of its own, as a node runs it: started, asked to end, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import urllib3

from rig.cluster import Rig
from rig.kube import until
from tests.rig.node import armed
from tests.rig.node.client import Client
from unlade.kernel import failpoints

_ROOT = Path(__file__).parents[3]


class Agent:
    """`unlade node serve` on a socket of its own; the log is a file."""

    def __init__(self, rig: Rig, directory: Path, *options: str) -> None:
        self.socket = directory / "image.sock"
        self.log = directory / "agent.log"
        self._home = directory
        self._arm = directory / "armed"
        self._program = ["-m", "unlade"]
        self._argv = [
            *("node", "serve"),
            *("--socket", str(self.socket), "--containerd", str(rig.node.containerd_socket)),
            *("--state", str(directory / "state"), "--certs-dir", str(rig.node.directory / "certs.d")),
            *("--listen", "127.0.0.1:0", "--grace", "5", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, dies_at: str = "") -> None:
        """Start, and wait until it serves; `dies_at` is a failpoint that kills it."""
        environment = {
            **os.environ,
            **{"HOME": str(self._home), "PYTHONPATH": f"{_ROOT}:{_ROOT / 'src'}"},
            **{failpoints.VARIABLE: dies_at, armed.VARIABLE: str(self._arm)},
        }
        before = len(self.lines())
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._program, *self._argv], stderr=log, env=environment
            )

        def serving() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()
            return any(line["message"].startswith("serving on") for line in self.lines()[before:])

        until("the image service", serving, seconds=60)

    def arm(self, step: int | None) -> None:
        """Die at this durable step from now on (0: only note the steps), or at none.

        Only what is started after `armable` takes notice.
        """
        self._arm.unlink(missing_ok=True)
        if step is not None:
            fresh = self._arm.with_suffix(".new")
            fresh.write_text(str(step))
            fresh.rename(self._arm)

    def armable(self) -> None:
        """Start the program that can be armed while it runs, from the next start on."""
        self._program = ["-m", "tests.rig.node.armed"]

    def steps(self) -> list[str]:
        """The durable steps that were reached while armed, since this was asked last."""
        trace = Path(f"{self._arm}.trace")
        reached = trace.read_text().split() if trace.exists() else []
        trace.unlink(missing_ok=True)
        return reached

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit code, once it ended."""
        assert self._process is not None
        return self._process.wait(30)

    @property
    def pid(self) -> int:
        """Its process, which may have ended."""
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        """End it if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def client(self) -> Client:
        """A client on a fresh connection."""
        return Client(self.socket)

    def lines(self) -> list[dict[str, Any]]:
        """The log so far: every line is a JSON object, or this raises."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of one of its HTTP pages."""
        told = next(line for line in reversed(self.lines()) if "probes on port" in line["message"])
        port = told["message"].rpartition(" ")[2]
        answer = urllib3.request("GET", f"http://127.0.0.1:{port}{path}", timeout=5, retries=False)
        return answer.status, answer.data.decode()
