"""Keys and certificates of one rig: a CA, serving certificates, one client certificate per identity.

Elliptic-curve keys, because a rig starts in seconds. Each identity is a Kubernetes user (common name) with
groups (organisations); that is all RBAC and the Node authorizer look at. Nothing here outlives the rig.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rig.machine import run


@dataclass(frozen=True)
class KeyPair:
    """Paths of a PEM certificate and its private key."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority in a directory; created when the directory is empty."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = KeyPair(directory / "ca.crt", directory / "ca.key")
        if not self.ca.cert.exists():
            directory.mkdir(parents=True, exist_ok=True)
            run(
                *("openssl", "req", "-x509", "-nodes", "-days", "3650", "-subj", "/CN=unlade-rig"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-addext", "keyUsage=critical,keyCertSign,digitalSignature,cRLSign"),
                *("-keyout", str(self.ca.key), "-out", str(self.ca.cert)),
            )

    def signing_key(self, name: str) -> Path:
        """A bare private key, such as the one service account tokens are signed with."""
        path = self.directory / f"{name}.key"
        if not path.exists():
            run("openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", str(path))
        return path

    def issue(
        self, name: str, *, user: str, groups: Iterable[str] = (), hosts: Iterable[str] = ()
    ) -> KeyPair:
        """A certificate for a client (user and groups) and, with `hosts`, for a server under those names."""
        pair = KeyPair(self.directory / f"{name}.crt", self.directory / f"{name}.key")
        if pair.cert.exists():
            return pair
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        names = [("IP:" if host.replace(".", "").isdigit() else "DNS:") + host for host in hosts]
        usage = "clientAuth,serverAuth" if names else "clientAuth"
        extensions = ["-addext", f"extendedKeyUsage={usage}", "-addext", "keyUsage=critical,digitalSignature"]
        if names:
            extensions += ["-addext", "subjectAltName=" + ",".join(names)]
        run(
            *("openssl", "req", "-x509", "-nodes", "-days", "3650", "-subj", subject),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *(
                "-CA",
                str(self.ca.cert),
                "-CAkey",
                str(self.ca.key),
                "-addext",
                "basicConstraints=critical,CA:FALSE",
            ),
            *extensions,
            *("-keyout", str(pair.key), "-out", str(pair.cert)),
        )
        return pair
