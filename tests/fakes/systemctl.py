"""A stand-in for systemctl, for machines on which systemd does not run: it records calls and does them.

Run as a program, put on PATH as `systemctl` by `put_on_path`. A service is really started, with what can be
had of its sandbox without systemd: the capability bounding set and no new privileges (setpriv), read-only
/usr, /boot and /etc (a mount namespace), and, for Type=notify, the wait for READY=1. When a directory plays
the host (FAKE_SYSTEMD_ROOT), units and programs are looked up in it, and there is no sandbox. Units that
something else runs (the rig's kubelet) are asked of that something, by a socket of their name in the state
directory: see `Elsewhere`.

What it does not do: dependencies, restarts of what died, the journal, and the rest of the sandbox.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

STATE = "FAKE_SYSTEMD"
ROOT = "FAKE_SYSTEMD_ROOT"


def put_on_path(directory: Path, root: Path = Path("/")) -> dict[str, str]:
    """Make `systemctl` in a directory; the environment in which it is found first."""
    program = directory / "bin" / "systemctl"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {Path(__file__).resolve()} "$@"\n')
    program.chmod(0o755)
    (directory / "state").mkdir(exist_ok=True)
    return {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        STATE: str(directory / "state"),
        ROOT: str(root),
    }


def calls(directory: Path) -> list[str]:
    """Every call so far that changes something."""
    path = directory / "state" / "calls"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [" ".join(words) for words in lines if words[0] not in ("is-active", "show")]


class Elsewhere:
    """Answers for one unit that something else runs: `restart` does it, `pid` gives the process."""

    def __init__(
        self, directory: Path, unit: str, *, restart: Callable[[], None], pid: Callable[[], int]
    ) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                verb = self.rfile.readline().decode().strip()
                if verb == "restart":
                    restart()
                self.wfile.write(str(pid()).encode())

        self._path = directory / "state" / unit
        self._server = socketserver.ThreadingUnixStreamServer(str(self._path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink()
        self._thread.join()


class Unit:
    """One unit: its file, and the process that runs it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._state = Path(os.environ[STATE])
        self._pidfile = self._state / f"{name}.pid"
        self._elsewhere = self._state / name

    @property
    def pid(self) -> int:
        """The main process; 0 when none runs."""
        if self._elsewhere.is_socket():
            return int(self._ask("pid"))
        try:
            pid = int(self._pidfile.read_text())
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return 0
        return 0 if state in "ZX" else pid

    def stop(self) -> None:
        """SIGTERM, wait, then SIGKILL: as TimeoutStopSec= says."""
        pid = self.pid
        if not pid:
            return
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + 60
        while self.pid == pid:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._pidfile.unlink()

    def restart(self) -> None:
        """Stop what runs, start what the file says now."""
        if self._elsewhere.is_socket():
            self._ask("restart")
            return
        self.stop()
        self.start()

    def start(self) -> None:
        """Start the service, with Type=notify until it is ready; ends this program when it fails."""
        path = _at("/etc/systemd/system") / self.name
        if not path.exists():
            sys.exit(f"Failed to start {self.name}: Unit {self.name} not found.")
        options = _parse(path.read_text())
        address = f"@unlade-fake-systemd-{os.getpid()}"  # abstract: paths of tests are too long for a name
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(address.replace("@", "\0"))
            listener.settimeout(0.1)
            with open(self._state / f"{self.name}.log", "ab") as log:
                process = subprocess.Popen(
                    _sandboxed(options),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={"NOTIFY_SOCKET": address, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                    start_new_session=True,
                )
            self._pidfile.write_text(str(process.pid))
            until = time.monotonic() + 120
            while options["Type"] == ["notify"]:
                try:
                    if b"READY=1" in listener.recv(4096).splitlines():
                        return
                except TimeoutError:
                    if process.poll() is not None or time.monotonic() > until:
                        self._pidfile.unlink()
                        sys.exit(f"Job for {self.name} failed; see {log.name}")

    def _ask(self, verb: str) -> str:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(self._elsewhere))
            asking.sendall(f"{verb}\n".encode())
            return asking.makefile().read()


def _at(path: str) -> Path:
    return Path(os.environ[ROOT], path.lstrip("/"))


def _parse(text: str) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            options.setdefault(key, []).append(value)
    return options


def _sandboxed(options: dict[str, list[str]]) -> list[str]:
    command = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(options["ExecStart"][0])]
    if os.environ[ROOT] != "/":
        return [str(_at(command[0])), *command[1:]]
    kept = [name.removeprefix("CAP_").lower() for name in " ".join(options["CapabilityBoundingSet"]).split()]
    privileges = ["setpriv", "--bounding-set", ",".join(["-all", *(f"+{name}" for name in kept)])]
    privileges += ["--inh-caps=-all"] + (["--no-new-privs"] if options["NoNewPrivileges"] == ["yes"] else [])
    assert options["ProtectSystem"] == ["full"]
    read_only = 'mount --rbind "$d" "$d" && mount -o remount,bind,ro "$d"'
    script = f'for d in /usr /boot /etc; do {read_only}; done; exec "$@"'
    return ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", script, "sh", *privileges, *command]


def main() -> None:
    """systemctl, as far as `unlade node` uses it."""
    words = sys.argv[1:]
    with open(Path(os.environ[STATE]) / "calls", "a") as log:
        log.write(json.dumps(words) + "\n")
    verb, unit = words[0], Unit(words[-1])
    if verb == "restart" or (verb == "try-restart" and unit.pid):
        unit.restart()
    elif verb == "stop":
        unit.stop()
    elif verb == "is-active":
        active = bool(unit.pid)
        print("active" if active else "inactive")
        sys.exit(0 if active else 3)
    elif verb == "show":
        print(unit.pid)
    elif verb not in ("daemon-reload", "try-restart"):
        sys.exit(f"Unknown command verb {verb}.")


if __name__ == "__main__":
    main()
