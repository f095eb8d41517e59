"""`unlade controller` as a process of its own, under the account that deploy/controller gives it.

Tests never run the controller in their own process nor as the administrator: memory is measured from
outside, kill is a real kill, and a right that is missing from rbac.yaml fails a test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from rig.cluster import Rig
from rig.kube import until

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "controller"
NAMESPACE, ACCOUNT = "unlade-system", "unlade-controller"
COMMAND = [sys.executable, "-m", "unlade", "controller"]


def apply_account(rig: Rig) -> Path:
    """Creates the account and its rights as deploy/controller says; a kubeconfig for it."""
    rig.kubectl("apply", "-f", str(DEPLOY / "rbac.yaml"))
    return rig.account_kubeconfig(NAMESPACE, ACCOUNT)


class ControllerProcess:
    """One running controller; a context manager. `kill` is kill -9, leaving the block a clean stop."""

    def __init__(
        self, rig: Rig, kubeconfig: Path, *flags: str, name: str = "unlade-controller", ready: bool = True
    ) -> None:
        self.log = rig.logs / f"{name}-{time.time_ns()}.log"
        argv = [
            *COMMAND,
            "--controllers=ephemeral-volumes",
            f"--kubeconfig={kubeconfig}",
            f"--lease-namespace={NAMESPACE}",
            "--listen=127.0.0.1:0",
            *flags,
        ]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                argv, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONFAULTHANDLER": "1"}
            )
        self._port = 0
        if ready:
            self.wait_ready()

    def __enter__(self) -> ControllerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The port of its health server, as it logged it."""
        if not self._port:
            self._port = until("the controller listens", self._listening, seconds=60)
        return self._port

    def wait_ready(self, seconds: float = 120) -> None:
        """Waits until /readyz says so."""
        until("the controller is ready", lambda: self.get("/readyz")[0] == 200, seconds=seconds, pause=0.05)

    def get(self, path: str) -> tuple[int, str]:
        """One request to the health server; status 0 when it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, sample: str) -> float:
        """The value of one sample of /metrics, named with its labels; 0 when it is not there."""
        for line in self.get("/metrics")[1].splitlines():
            name, _space, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0

    @property
    def leads(self) -> bool:
        """Whether this one holds the lease and works."""
        return self.metric("unlade_controller_leader") == 1.0

    def memory(self) -> tuple[int, int]:
        """Resident memory now and at its peak, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        now, peak = (int(values[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return now, peak

    def stop(self) -> None:
        """SIGTERM and wait: the lease is given back."""
        ended = self.process.poll()
        assert ended is None, f"the controller died ({ended}):\n{self.log.read_text()[-4000:]}"
        self.process.send_signal(signal.SIGTERM)
        self._ended(20)
        assert self.process.returncode == 0, self.log.read_text()[-4000:]

    def kill(self) -> None:
        """SIGKILL and wait: the lease stays held."""
        self.process.kill()
        self._ended(10)

    def _ended(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise

    def _listening(self) -> int:
        if self.process.poll() is not None:
            raise AssertionError(f"the controller ended:\n{self.log.read_text()[-2000:]}")
        for line in self.log.read_text().splitlines():
            message = json.loads(line).get("message", "") if line.startswith("{") else ""
            if message.startswith("listening on port "):
                return int(message.rpartition(" ")[2])
        return 0
