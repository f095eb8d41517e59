"""The run's own registry: the CNCF distribution, on the loopback or behind a 1 Gb/s link.

The link is a veth pair into a network namespace whose end is held to the rate by a token bucket (TBF);
registry and link end with the block. Content is in a directory of the caller's, read by both.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rig.engines import binary

_START_SECONDS: Final = 30.0
# From the range for benchmarks of networks (RFC 2544), which is nobody's: no route of the machine is hidden
# while the link stands. One net a process, so that two runs do not meet.
_NET: Final = f"198.18.{os.getpid() % 256}"
_OURS, _THEIRS = f"{_NET}.1", f"{_NET}.2"


@dataclass(frozen=True)
class Serving:
    """A registry that listens: its host:port, its log, and the process."""

    host: str
    log: Path
    pid: int

    def requests(self, pattern: str = "") -> list[str]:
        """`METHOD path` of each request so far whose path matches."""
        found = re.findall(r'"([A-Z]+) (/v2/\S*) HTTP/[\d.]+" 2\d\d', self.log.read_text())
        return [f"{method} {path}" for method, path in found if re.search(pattern, path)]


@contextmanager
def serving(
    content: Path, work: Path, *, megabits: int = 0, proxy: str = "", address: str = "", namespace: str = ""
) -> Iterator[Serving]:
    """A registry over `content`; its configuration and log go to `work`.

    `megabits` puts it behind a link of that rate; `proxy` makes it a pull-through cache of that registry;
    `address` and `namespace` place it in a network that the caller made.
    """
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if megabits:
            namespace = stack.enter_context(link(megabits))
            address = _THEIRS
        address = address or "127.0.0.1"
        port = _free_port()
        log = work / "registry.log"
        config = work / "config.yml"
        config.write_text(
            "version: 0.1\nlog:\n  level: warn\n  accesslog:\n    disabled: false\n"
            f"storage:\n  filesystem:\n    rootdirectory: {content}\n  delete:\n    enabled: true\n"
            f"http:\n  addr: {address}:{port}\n  relativeurls: true\n"
            + (f"proxy:\n  remoteurl: {proxy}\n" if proxy else "")
        )
        inside = ["nsenter", f"--net=/run/netns/{namespace}", "--"] if namespace else []
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        environment["OTEL_TRACES_EXPORTER"] = "none"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*inside, str(binary("registry")), "serve", str(config)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        _wait(address, port, process, log, inside)
        yield Serving(
            f"{address}:{port}" if address != "127.0.0.1" else f"localhost:{port}", log, process.pid
        )


@contextmanager
def link(megabits: int) -> Iterator[str]:
    """A network namespace reached over a link of that rate; gives its name. Needs root."""
    name = f"unlade-bench-{os.getpid()}"
    near, far = f"ub{os.getpid()}", f"uf{os.getpid()}"
    with ExitStack() as stack:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("addr", "add", f"{_OURS}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", name, "addr", "add", f"{_THEIRS}/30", "dev", far)
        _ip("-n", name, "link", "set", far, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        throttle(name, far, megabits)
        yield name


def throttle(namespace: str, device: str, megabits: int) -> None:
    """Hold what leaves by a device to a rate; the burst is 2 ms of it, or one packet of 64 KB."""
    burst = max(65536, megabits * 1000 // 8 * 2)
    rate = ["rate", f"{megabits}mbit", "burst", str(burst), "latency", "50ms"]
    command = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate]
    subprocess.run(command, check=True, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(address: str, port: int, process: subprocess.Popen[bytes], log: Path, inside: list[str]) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if inside:
            # The caller may have no route to it: asked from where it is.
            probe = ["curl", "-fs", "-o", "/dev/null", f"http://{address}:{port}/v2/"]
            if subprocess.run([*inside, *probe], check=False).returncode == 0:
                return
        else:
            try:
                connection = http.client.HTTPConnection(address, port, timeout=5)
                connection.request("GET", "/v2/")
                connection.getresponse().read()
                connection.close()
                return
            except OSError:
                pass
        time.sleep(0.02)
    raise RuntimeError(f"the registry did not start: {log.read_text()[-2000:]}")
