"""Which host to ask: mirrors in their order, upstream last, and a short memory of the ones that failed.

Owns the reading of hosts.toml through `hosts` (again after a while, so that an administrator's change needs
no restart) and the rule of moving on: any failure of a mirror leads to the next host, with the upstream's
error, if it comes to that, raised at the end and the mirrors' failures named in it. A mirror that could not
be reached is passed over for a while. The upstream is always asked in the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from unlade.errors import IntegrityError, RegistryError
from unlade.model import InvalidManifest
from unlade.registry.config import RegistryConfig
from unlade.registry.errors import InvalidHosts, NotFound, Unauthorized
from unlade.registry.hosts import PUSH, Host, hosts_for
from unlade.registry.origins import Origin

T = TypeVar("T")

# How long a reading of hosts.toml is used.
_KEEP_SECONDS: Final = 30.0


class Routes:
    """Hosts by registry; thread-safe."""

    def __init__(self, config: RegistryConfig) -> None:
        self._config = config
        self._known: dict[str, tuple[float, tuple[Host, ...]]] = {}
        self._shunned: dict[Origin, float] = {}
        self._lock = threading.Lock()

    def hosts(self, registry: str) -> tuple[Host, ...]:
        """Every host of a registry, upstream last; raises InvalidHosts."""
        now = time.monotonic()
        with self._lock:
            known = self._known.get(registry)
        if known is not None and known[0] > now:
            return known[1]
        hosts = hosts_for(registry, self._config)
        with self._lock:
            self._known[registry] = (now + _KEEP_SECONDS, hosts)
        return hosts

    def writer(self, registry: str) -> Host:
        """The host to push to: the first that may."""
        for host in self.hosts(registry):
            if PUSH in host.capabilities:
                return host
        raise InvalidHosts(
            f"no host of {registry} accepts pushes", next_step='give one the capability "push" in hosts.toml'
        )

    def first_of(self, registry: str, capability: str, ask: Callable[[Host, int | None], T]) -> T:
        """The first host's success. `ask` takes a host and how often to try it (None: as configured)."""
        hosts = [host for host in self.hosts(registry) if capability in host.capabilities]
        if not hosts:
            raise InvalidHosts(
                f"no host of {registry} may {capability}", next_step="correct the capabilities in hosts.toml"
            )
        now = time.monotonic()
        with self._lock:
            shunned = {origin for origin, until in self._shunned.items() if until > now}
        asked = [host for host in hosts[:-1] if host.origin not in shunned] + hosts[-1:]
        failed: list[str] = []
        for host in asked[:-1]:
            try:
                return ask(host, 1)
            except (RegistryError, IntegrityError, InvalidManifest) as error:
                failed.append(f"{host.origin}: {error}")
                if not isinstance(error, (NotFound, Unauthorized)):
                    self.shun(host)
        try:
            return ask(asked[-1], None)
        except (RegistryError, IntegrityError) as error:
            if failed:
                error.message += f" (mirrors before it: {'; '.join(failed)})"
            raise

    def shun(self, host: Host) -> None:
        """Pass over a mirror for a while; an upstream is never passed over."""
        with self._lock:
            self._shunned[host.origin] = time.monotonic() + self._config.mirror_penalty
