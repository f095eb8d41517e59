"""The image service as a process of its own, as a node runs it: started, asked to end, killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
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
        self._argv = [
            *("node", "serve"),
            *("--socket", str(self.socket), "--containerd", str(rig.node.containerd_socket)),
            *("--state", str(directory / "state"), "--certs-dir", str(rig.node.directory / "certs.d")),
            *("--listen", "127.0.0.1:0", "--grace", "5", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, dies_at: str = "") -> None:
        """Start, and wait until it serves; `dies_at` is a failpoint that kills it."""
        before = self.log.stat().st_size if self.log.exists() else 0
        self._launch({**os.environ, **self._environment(), failpoints.VARIABLE: dies_at})

        def serving() -> bool:
            assert self._runs(), self.log.read_text()[before:]
            return b'"serving on' in self.log.read_bytes()[before:]

        until("the image service", serving, seconds=60)

    def _environment(self) -> dict[str, str]:
        return {"HOME": str(self._home), "PYTHONPATH": f"{_ROOT}:{_ROOT / 'src'}"}

    def _launch(self, environment: dict[str, str]) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unlade", *self._argv], stderr=log, env=environment
            )

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

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
        if self._process is not None and self._runs():
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


class ArmedAgent(Agent):
    """A service that can be told, while it runs, at which of its next durable steps it dies.

    Its lives are children of one process that has imported everything: hundreds of them take minutes.
    """

    def __init__(self, rig: Rig, directory: Path, *options: str) -> None:
        super().__init__(rig, directory, *options)
        self._arm = directory / "armed"
        self._life = 0

    def arm(self, step: int | None) -> None:
        """Die at this durable step from now on (0: only note the steps), or at none."""
        self._arm.unlink(missing_ok=True)
        if step is not None:
            fresh = self._arm.with_suffix(".new")
            fresh.write_text(str(step))
            fresh.rename(self._arm)

    def steps(self) -> list[str]:
        """The durable steps that were reached while armed, since this was asked last."""
        trace = Path(f"{self._arm}.trace")
        reached = trace.read_text().split() if trace.exists() else []
        trace.unlink(missing_ok=True)
        return reached

    def stop(self, number: int = signal.SIGTERM) -> int:
        os.kill(self._life, number)
        return self.wait()

    def wait(self) -> int:
        return int(self._told())

    @property
    def pid(self) -> int:
        return self._life

    def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._life, signal.SIGKILL)
        self._process.communicate(timeout=30)

    def _launch(self, environment: dict[str, str]) -> None:
        if self._process is None:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.rig.node.armed", *self._argv],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**environment, armed.VARIABLE: str(self._arm)},
                    bufsize=0,
                )
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._life = int(self._told())

    def _runs(self) -> bool:
        return Path(f"/proc/{self._life}").exists()

    def _told(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 60)
        assert ready, "the life before does not end"
        return self._process.stdout.readline()
