"""How to reach registries: what an administrator or a caller decides, in one frozen value.

Read by every module of this room; changed by nobody. The defaults are safe: TLS verified, plain HTTP nowhere
(not even on loopback), no mirror files read. `RegistryConfig.system()` adds the places where containerd,
Docker and Podman keep hosts.toml and certificates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

_SYSTEM_CERTS_DIRS: Final = (
    "/etc/containerd/certs.d",
    "/etc/docker/certs.d",
    "~/.config/containers/certs.d",
    "/etc/containers/certs.d",
)


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """Every knob of the client; times in seconds, sizes in bytes."""

    # `host[:port]`, exactly as written in references. Nothing else is ever spoken to without TLS, except a
    # host that an administrator wrote with http:// into hosts.toml.
    plain_http: frozenset[str] = frozenset()
    # `host[:port]` whose certificates are not verified; "*" means every host.
    insecure_skip_tls_verify: frozenset[str] = frozenset()
    # PEM files trusted in addition to the system's.
    ca_files: tuple[str, ...] = ()
    # Directories of per-registry configuration (hosts.toml, or Docker's ca.crt / client.cert), first match
    # wins.
    certs_dirs: tuple[str, ...] = ()
    # Hosts (`host[:port]`) that may serve tokens for any registry, beside the built-in rules (see auth).
    token_realm_allowlist: frozenset[str] = frozenset()
    user_agent: str = "unlade"
    connect_timeout: float = 10.0
    # For the status line and headers to arrive, from the end of the request.
    answer_timeout: float = 60.0
    # A body must bring `min_rate` bytes a second, judged over `rate_window` of waiting time. 1 KiB/s is
    # below any usable link, and above what an attacker may use to hold a worker for days.
    min_rate: int = 1024
    rate_window: float = 30.0
    # Attempts in all for one request; the waits between them are random in 0..min(cap, base * 2**n).
    attempts: int = 4
    backoff: float = 0.25
    backoff_cap: float = 8.0
    # A Retry-After up to this is honoured; a longer one ends the request with RateLimited.
    retry_after_cap: float = 30.0
    # A mirror that failed is passed over for this long, so that a hundred layers do not each wait for it.
    mirror_penalty: float = 30.0
    # Idle connections kept per host: as many as a pull uses at once.
    idle_connections: int = 16
    # Proxies by scheme; None: HTTP_PROXY, HTTPS_PROXY and NO_PROXY of the environment.
    proxies: dict[str, str] | None = field(default=None, hash=False)

    @classmethod
    def system(cls) -> RegistryConfig:
        """The defaults, with this machine's registry configuration directories."""
        dirs = (os.path.expanduser(path) for path in _SYSTEM_CERTS_DIRS)
        return cls(certs_dirs=tuple(path for path in dirs if os.path.isdir(path)))
