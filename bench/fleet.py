"""`python -m bench.fleet`: 100, 1,000 and 10,000 nodes pull one 10 GB model and 50 packages, simulated.

A fluid model of what limits a fleet: links and request rates shared fairly. Each node first pulls its
packages (requests), then the model (bytes). What a pull asks for comes from docs/costs.json, which `python -m
bench.costs` measures; what a network gives is assumed here and can be changed on the command line. The same
seed gives the same figures. Three ways:

- the origin alone: every node asks it for everything;
- mirrors named by `hosts.toml`, cold, everybody at once. A distribution registry as pull-through cache keeps
  what it fetches, and while it fetches a blob it passes further requests for it on to the origin (its
  proxyblobstore.go); the first one alone is kept;
- the same mirrors after one pull through each.

Not modelled: failures and retries, TCP's start, a mirror's disk, other tenants. Writes docs/fleet.json,
docs/fleet.svg and the table in docs/scale.md.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from bench import plot, table
from bench.costs import OUT as COSTS
from bench.tools import ROOT

NODES: Final = (100, 1_000, 10_000)
WAYS: Final = ("origin alone", "mirrors, cold", "mirrors, warmed")


@dataclass(frozen=True)
class Network:
    """What is assumed of links and servers. Bytes and requests a second, seconds."""

    node: float = 10e9 / 8  # a node's link
    origin: float = 40e9 / 8  # what the origin sends, all nodes together
    origin_requests: float = 5_000.0
    mirror: float = 25e9 / 8
    mirror_requests: float = 2_000.0
    nodes_per_mirror: int = 250
    ramp: float = 30.0  # pods are started within this time
    round_trip: float = 0.01


@dataclass(frozen=True)
class Load:
    """What every node pulls, and what that asks for (docs/costs.json)."""

    model: float = 10e9
    packages: int = 50
    package: float = 100e3
    package_requests: float = 3
    model_requests: float = 3
    # What reaches the origin of a pull by tag through a warm mirror, which asks whether the tag still means
    # the same: counted by tests/interop/test_fleet.py.
    through_mirror: float = 2
    packages_per_second: float = 40.0  # one core of a node
    node_bytes: float = 1e9  # a second: hashing and writing on a node


@dataclass
class Pool:
    """A capacity shared fairly by flows, each with a limit of its own (max-min); a flow of one size.

    Flows of one limit always get the same rate, so a flow is done when its class' running total has grown by
    its size: a heap of those totals, whatever the number of flows.
    """

    capacity: float
    now: float = 0.0
    busiest: float = 0.0
    carried: float = 0.0
    _totals: dict[float, float] = field(default_factory=dict)
    _heaps: dict[float, list[tuple[float, int, float]]] = field(default_factory=dict)

    def add(self, at: float, flow: int, size: float, limit: float) -> None:
        """A flow begins."""
        self.advance(at)
        heap = self._heaps.setdefault(limit, [])
        heapq.heappush(heap, (self._totals.setdefault(limit, 0.0) + size, flow, size))

    def next(self) -> float:
        """When the next flow ends, if nothing else happens."""
        rates = self._rates()
        ends = [
            self.now + (heap[0][0] - self._totals[limit]) / rates[limit]
            for limit, heap in self._heaps.items()
            if heap
        ]
        return min(ends, default=math.inf)

    def pop(self) -> int:
        """End the flow that ends next; time moves there."""
        rates = self._rates()
        at, limit = min(
            (self.now + (heap[0][0] - self._totals[limit]) / rates[limit], limit)
            for limit, heap in self._heaps.items()
            if heap
        )
        self.advance(at)
        _, flow, size = heapq.heappop(self._heaps[limit])
        self.carried += size
        return flow

    def advance(self, to: float) -> None:
        """Let time pass."""
        rates = self._rates()
        for limit, rate in rates.items():
            self._totals[limit] += rate * (to - self.now)
        self.busiest = max(self.busiest, sum(rate * len(self._heaps[limit]) for limit, rate in rates.items()))
        self.now = to

    def _rates(self) -> dict[float, float]:
        """Fill up from below: who cannot use an equal share leaves the rest to the others."""
        left, flows = self.capacity, sum(len(heap) for heap in self._heaps.values())
        rates = {}
        for limit in sorted(limit for limit, heap in self._heaps.items() if heap):
            rates[limit] = min(limit, left / flows)
            left -= rates[limit] * len(self._heaps[limit])
            flows -= len(self._heaps[limit])
        return rates


def simulate(way: str, nodes: int, network: Network, load: Load, seed: int) -> dict[str, float]:
    """Time to the last pod, what the origin sent, requests a second at the origin and at a mirror."""
    rng = random.Random(f"{seed} {nodes}")
    starts = sorted((rng.uniform(0, network.ramp), node) for node in range(nodes))
    mirrored = way != "origin alone"
    mirrors = -(-nodes // network.nodes_per_mirror) if mirrored else 0
    packages, asked = _packages(starts, mirrors, network, load)
    ready, origin_bytes = _models(packages, mirrors, network, load, warmed=way == "mirrors, warmed")
    ready.sort()
    if mirrored:  # each mirror fetches each package once
        origin_bytes += mirrors * load.packages * load.package
    else:
        origin_bytes += nodes * load.packages * load.package
    return {
        "first pod s": round(ready[0], 1),
        "median pod s": round(ready[len(ready) // 2], 1),
        "last pod s": round(ready[-1], 1),
        "origin GB": round(origin_bytes / 1e9, 1),
        "origin requests": round(asked["origin"]),
        "origin requests/s": round(asked["origin peak"], 1),
        "mirror requests/s": round(asked["mirror peak"], 1),
        "mirrors": mirrors,
    }


def _packages(
    starts: list[tuple[float, int]], mirrors: int, network: Network, load: Load
) -> tuple[list[tuple[float, int]], dict[str, float]]:
    """When each node has its packages: as requests through whoever serves them."""
    requests = load.packages * load.package_requests + load.model_requests
    at_origin = requests if not mirrors else (load.packages + 1) * load.through_mirror
    # One node alone: as fast as it works, or as fast as answers come.
    own = 1 / (1 / (load.packages_per_second * load.package_requests) + network.round_trip)
    done: list[tuple[float, int]] = []
    peaks = []
    groups = max(mirrors, 1)
    for group in range(groups):
        # A request through a mirror waits for the origin's answer about the tag, when it has to be asked.
        capacity = network.mirror_requests if mirrors else network.origin_requests
        if mirrors:
            capacity = min(capacity, network.origin_requests / groups * requests / max(at_origin, 1e-9))
        pool = Pool(capacity)
        mine = [start for start in starts if start[1] % groups == group]
        _run(pool, mine, requests, own, done)
        peaks.append(pool.busiest)
    served = sum(peaks)
    return sorted(done), {
        "origin": at_origin * len(starts),
        "origin peak": served * at_origin / requests,
        "mirror peak": max(peaks) if mirrors else 0.0,
    }


def _run(
    pool: Pool, starts: list[tuple[float, int]], size: float, limit: float, done: list[tuple[float, int]]
) -> None:
    waiting = list(reversed(starts))
    while waiting or pool.next() < math.inf:
        if waiting and waiting[-1][0] <= pool.next():
            at, node = waiting.pop()
            pool.add(at, node, size, limit)
        else:
            node = pool.pop()
            done.append((pool.now, node))


def _models(
    starts: list[tuple[float, int]], mirrors: int, network: Network, load: Load, *, warmed: bool
) -> tuple[list[float], float]:
    """When each node has the model, and what the origin sent for it."""
    limit = min(network.node, load.node_bytes)
    origin = Pool(network.origin)
    pools = [Pool(network.mirror) for _ in range(mirrors)]
    filled = [warmed] * mirrors
    fills: dict[int, int] = {}  # node → the mirror that keeps what it fetches
    ready: list[float] = []
    waiting = list(reversed(starts))
    if warmed:
        origin.carried = mirrors * load.model
    while True:
        ends = [(pool.next(), index) for index, pool in enumerate([origin, *pools])]
        end, index = min(ends)
        if waiting and waiting[-1][0] <= end:
            at, node = waiting.pop()
            mirror = node % mirrors if mirrors else -1
            if mirrors and filled[mirror]:
                pools[mirror].add(at, node, load.model, limit)
                continue
            if mirrors and mirror not in fills.values():
                fills[node] = mirror
            origin.add(at, node, load.model, limit)
        elif end < math.inf:
            node = [origin, *pools][index].pop()
            ready.append(end)
            if index == 0 and node in fills:
                filled[fills[node]] = True
        else:
            return ready, origin.carried


def load_of(costs: Mapping[str, Any]) -> Load:
    """The measured part."""
    package, model = costs["registry"]["package"]["cold"], costs["registry"]["model"]["cold"]
    raw = costs["node"]["raw"]
    return Load(
        package_requests=package["requests"],
        model_requests=model["requests"],
        packages_per_second=1 / costs["node"]["packages"]["cpu s each"],
        # A blob is hashed and written by about one core: its CPU seconds per GB are what a node can take in.
        node_bytes=1e9 / raw["cpu s/GB"],
    )


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/scale.md."""
    lines = [
        "| nodes | way | first pod | median | last pod | origin sends | requests to the origin | at most |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['nodes']:,} | {row['way']} | {_time(row['first pod s'])} | {_time(row['median pod s'])} |"
        f" {_time(row['last pod s'])} | {row['origin GB']:,.0f} GB | {row['origin requests']:,} |"
        f" {row['origin requests/s']:,.0f}/s |"
        for row in rows
    ]
    return "\n".join(lines)


def _point(row: Mapping[str, Any], key: str) -> tuple[float, float]:
    return float(row["nodes"]), float(row[key])


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def main() -> None:
    """Simulate, plot, and put the table into the document."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    for name, value in asdict(Network()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    network = Network(**{name: getattr(options, name) for name in asdict(Network())})
    load = load_of(json.loads(COSTS.read_text()))
    rows = [
        {"nodes": nodes, "way": way, **simulate(way, nodes, network, load, options.seed)}
        for nodes in NODES
        for way in WAYS
    ]
    document = {"seed": options.seed, "network": asdict(network), "load": asdict(load), "rows": rows}
    (ROOT / "docs" / "fleet.json").write_text(json.dumps(document, indent=1) + "\n")
    panels = [
        (title, {way: [_point(row, key) for row in rows if row["way"] == way] for way in WAYS})
        for title, key in (
            ("seconds to the last pod", "last pod s"),
            ("GB sent by the origin", "origin GB"),
            ("requests/s at the origin, at most", "origin requests/s"),
        )
    ]
    (ROOT / "docs" / "fleet.svg").write_text(
        plot.lines(panels, "nodes", "One 10 GB model and 50 packages on every node")
    )
    table.put(ROOT / "docs" / "scale.md", "fleet", markdown(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
