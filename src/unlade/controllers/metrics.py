"""The numbers a controller process shows: one registry of its own, named `unlade_…`.

Counters are incremented where things happen; what can be read from the parts (cache sizes, queue depth)
is read when it is scraped, so that it cannot drift. A registry per process object, not the library's
global one: tests and a later process with several roles make several.
"""

from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# From one millisecond (a cached answer) to a minute (a throttled burst of thousands).
SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class Metrics:
    """All metrics of one controller process; thread-safe as the library is."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.leader = Gauge(
            "unlade_controller_leader", "1 while this process holds the lease", registry=self.registry
        )
        self.requests = Histogram(
            "unlade_kubernetes_request_seconds",
            "Time to the head of the answer, by verb and status (0: no answer)",
            ["verb", "status"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.claims = Counter(
            "unlade_ephemeral_claims",
            "Claims of ephemeral volumes that were asked of the API server, by result",
            ["result"],
            registry=self.registry,
        )
        self.conflicts = Counter(
            "unlade_ephemeral_conflicts",
            "Runs that found a claim of the right name with another owner",
            registry=self.registry,
        )
        self.runs = Histogram(
            "unlade_controller_run_seconds",
            "Time of one run for one key, by result",
            ["controller", "result"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.waits = Histogram(
            "unlade_controller_wait_seconds",
            "Time that a key waited for a worker",
            ["controller"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.events = Counter(
            "unlade_controller_events",
            "Kubernetes events, by what became of them",
            ["result"],
            registry=self.registry,
        )

    def observe_request(self, verb: str, status: int, seconds: float) -> None:
        """One answer of the API server."""
        self.requests.labels(verb, str(status)).observe(seconds)

    def read_when_scraped(self, read: Callable[[], Iterator[Metric]]) -> Callable[[], None]:
        """Registers a reader of live numbers; the returned function takes it out again."""
        collector = _Reader(read)
        self.registry.register(collector)
        return lambda: self.registry.unregister(collector)

    def text(self) -> bytes:
        """The exposition format that Prometheus scrapes."""
        return generate_latest(self.registry)


class _Reader:
    """Adapts a function to the library's collector interface."""

    def __init__(self, read: Callable[[], Iterator[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        return self._read()

    def describe(self) -> list[Metric]:
        return []  # nothing is read at registration: the parts may not run yet


def gauge(name: str, documentation: str, labels: dict[str, str], value: float) -> Metric:
    """One gauge sample, for `read_when_scraped`."""
    family = GaugeMetricFamily(name, documentation, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counter(name: str, documentation: str, labels: dict[str, str], value: float) -> Metric:
    """One counter sample, for `read_when_scraped`."""
    family = CounterMetricFamily(name, documentation, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
