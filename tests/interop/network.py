"""A network of namespaces: hosts on one switch, each behind a link of its own rate. Needs root.

The switch is a bridge in a namespace too, so that nothing of the machine's own network is touched. Addresses
are from 198.51.100.0/24 (RFC 5737), which is nobody's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.registry import throttle


@dataclass(frozen=True)
class Host:
    """A namespace on the network and its address."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Words to be run there."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", "--", *words]


@contextmanager
def network(rates: Mapping[str, int]) -> Iterator[dict[str, Host]]:
    """Hosts by name, each with so many megabits a second in each direction."""
    prefix = f"unlade-fleet-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts: dict[str, Host] = {}
    with ExitStack() as stack:
        _add(stack, switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, (name, megabits) in enumerate(rates.items(), 1):
            namespace, port = f"{prefix}-{name}", f"p{number}"
            _add(stack, namespace)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            address = f"198.51.100.{number}"
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            throttle(switch, port, megabits)
            throttle(namespace, "eth0", megabits)
            hosts[name] = Host(namespace, address)
        yield hosts


def _add(stack: ExitStack, namespace: str) -> None:
    _ip("netns", "add", namespace)
    stack.callback(_ip, "netns", "delete", namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
