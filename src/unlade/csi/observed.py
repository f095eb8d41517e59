"""The driver's numbers (V20), named like those of the image service so that one dashboard shows both.

A registry of metrics per driver, or one that is handed in when the driver shares its process with the image
service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

# From a mount of what is there to a large model on a slow link; the lower ones are close together because
# a warm publish is promised below ten milliseconds.
_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """All metrics of one driver; thread-safe as the library is."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        if registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
        self.registry = registry
        self.calls = Histogram(
            "unlade_csi_call_seconds",
            "Time of CSI calls, by call and status",
            ["call", "code"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.waits = Histogram(
            "unlade_csi_fetch_wait_seconds",
            "Time that fetches waited for their turn",
            buckets=_SECONDS,
            registry=registry,
        )
        self.publishes = Counter(
            "unlade_csi_publishes",
            "Inline volumes published, by what it took: there (nothing to do), recorded (mounted again after"
            " a restart of the node), cached (content was here), fetched",
            ["result"],
            registry=registry,
        )
        self.fetched = Counter(
            "unlade_csi_fetched_bytes", "Bytes of content that was fetched", registry=registry
        )
        self.errors = Counter(
            "unlade_csi_errors", "Calls that failed, by our error code", ["code"], registry=registry
        )
        self._fetching = Gauge(
            "unlade_csi_fetches_in_flight", "Fetches, running and waiting", ["state"], registry=registry
        )
        self._volumes = Gauge("unlade_csi_volumes", "Inline volumes on record", registry=registry)

    def watch_fetches(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Read the queue whenever somebody looks."""
        self._fetching.labels("running").set_function(running)
        self._fetching.labels("waiting").set_function(waiting)

    def watch_volumes(self, count: Callable[[], int]) -> None:
        """Count the records whenever somebody looks."""
        self._volumes.set_function(count)

    def watch_writable(
        self, count: Callable[[], int], promised: Callable[[], int], available: Callable[[], int]
    ) -> None:
        """Count writable volumes, and what is promised to them, whenever somebody looks; once."""
        for name, meaning, read in (
            ("unlade_csi_writable_volumes", "Writable volumes on this node", count),
            ("unlade_csi_writable_promised_bytes", "Bytes that volumes may still write", promised),
            ("unlade_csi_writable_available_bytes", "Bytes that can still be promised", available),
        ):
            Gauge(name, meaning, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        """The exposition format that Prometheus scrapes."""
        return generate_latest(self.registry)
