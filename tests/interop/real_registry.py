"""The distribution registry, as its users run it: a process of its own on a free port of the loopback.

Plain, or with TLS and htpasswd. Content is in a directory that ends with the test. What it logs is kept,
because interop tests ask it which requests it saw (was a blob mounted or sent?).
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.fakes.tls import Authority

# A cold binary on a loaded machine of two cores takes a few seconds to listen.
_START_SECONDS: Final = 30.0
USER: Final = "alice"
PASSWORD: Final = "open:sesame/&?"


@dataclass(frozen=True)
class Access:
    """One line of the access log."""

    method: str
    path: str
    status: int


class RealRegistry:
    """`with RealRegistry(binary, directory) as registry: registry.host`; `secure` adds TLS and htpasswd.

    `auth` is another auth section for its configuration, such as one with a token server.
    """

    def __init__(self, binary: Path, directory: Path, *, secure: bool = False, auth: str = "") -> None:
        self.directory = directory
        self.secure = secure
        self._auth = auth
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory / "registry.log"
        self.host = ""
        self.ca_file = ""
        self.user, self.password = USER, PASSWORD

    def reference(self, repository: str, tag: str = "v1") -> str:
        """`host:port/repository:tag`."""
        return f"{self.host}/{repository}:{tag}"

    def requests(self) -> list[Access]:
        """Every request so far, in order."""
        found = re.findall(r'"([A-Z]+) (/v2/\S*) HTTP/[\d.]+" (\d+)', self._log.read_text())
        return [Access(method, path, int(status)) for method, path, status in found]

    def sent_blobs(self) -> int:
        """How many blob uploads were completed by sending bytes, not by mounting."""
        return sum(1 for one in self.requests() if one.method == "PUT" and "/blobs/uploads/" in one.path)

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(5):
            # Another process may take the port between our asking and the registry's binding it.
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            self.host = f"localhost:{port}"
            self._start(port)
            if self._listens(port):
                return self
            self._stop()
        raise RuntimeError(f"the registry did not start: {self._log.read_text()[-2000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self, port: int) -> None:
        config = self.directory / "config.yml"
        tls, auth = "", self._auth
        if self.secure:
            authority = Authority(str(self.directory))
            pair = authority.issue("localhost", "127.0.0.1")
            self.ca_file = authority.ca
            passwords = self.directory / "htpasswd"
            line = subprocess.run(
                ["htpasswd", "-nbB", USER, PASSWORD], capture_output=True, check=True, text=True
            )
            passwords.write_text(line.stdout.strip() + "\n")
            tls = f"\n  tls:\n    certificate: {pair.cert}\n    key: {pair.key}"
            auth = f"\nauth:\n  htpasswd:\n    realm: interop\n    path: {passwords}"
        config.write_text(
            "version: 0.1\n"
            "log:\n  level: warn\n  accesslog:\n    disabled: false\n"
            f"storage:\n  filesystem:\n    rootdirectory: {self.directory}/content\n"
            "  delete:\n    enabled: true\n  tag:\n    concurrencylimit: 4\n"
            # Manifests with foreign layers must name an address; only this one, which is nobody's, is let in.
            "validation:\n  manifests:\n    urls:\n      allow:\n        - ^https://layers\\.example\\.invalid/\n"
            f"http:\n  addr: 127.0.0.1:{port}\n  relativeurls: true{tls}{auth}\n"
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        # Without a collector the registry would complain about one every few seconds.
        environment["OTEL_TRACES_EXPORTER"] = "none"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self._binary, "serve", config], stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def _listens(self, port: int) -> bool:
        assert self._process is not None
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                try:
                    connection.request("GET", "/v2/")
                    connection.getresponse().read()
                    return True
                finally:
                    connection.close()
            except OSError:
                time.sleep(0.02)
        return False

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
