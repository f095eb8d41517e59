"""`python -m bench`: run the works, contenders interleaved, and report: ratios and targets last.

`make bench` is the whole; `make bench QUICK=1` an eighth of the size within five minutes, for a look before
and after a change; `make bench ONLY=image-3,raw` a part. Results: `artifacts/bench/results.json`, and with
`--docs` also the table and plot in docs/ and README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import contenders, content, measure, report, table, tools, works
from bench.registry import serving
from rig.engines import cache

# For a look, (at most, at least): a work's share of the seconds bounds its rounds.
QUICK_ROUNDS, QUICK_SECONDS = (3, 2), 200


def main() -> int:
    """Run and report; the exit status says whether every contender did its work and all trees were equal."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--only", default=os.environ.get("ONLY", ""), help=", ".join(works.names()))
    parser.add_argument(
        "--rounds",
        type=int,
        default=int(os.environ.get("ROUNDS", "0")),
        help="exactly so many, whatever the time; default: 7 or 21 (quick: 3, or 2 where time is short)",
    )
    parser.add_argument("--out", type=Path, default=Path("artifacts/bench"))
    parser.add_argument("--prepare", action="store_true", help="make the content, measure nothing")
    parser.add_argument("--docs", action="store_true", help="put table and plot into the documents")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(works.names())
    if unknown := set(chosen) - set(works.names()):
        parser.error(f"no such work: {', '.join(sorted(unknown))}; there are {', '.join(works.names())}")
    began = time.monotonic()
    place = cache() / "bench"
    place.mkdir(parents=True, exist_ok=True)
    content.forget()
    results = []
    # Not in /tmp, which may be memory: what is measured is a disk.
    with tempfile.TemporaryDirectory(prefix="run-", dir=place) as scratch, ExitStack() as stack:
        home = Path(scratch)
        found = tools.find(home)
        machine = tools.machine(found)
        registry = stack.enter_context(serving(content.storage(), home / "registry"))
        setting = works.Setting(registry, found, home, options.quick)
        if options.prepare:
            for key in chosen:
                make, _ = works.WORKS.get(key) or works.LIMITED[key]
                make(setting)
                print(f"{key}: its content is in {content.storage()}", flush=True)
            return 0
        for key in chosen:
            results.append(run(key, setting, options.rounds))
            print(report.text(results[-1]), flush=True)
    document = {
        "machine": machine,
        "quick": options.quick,
        "seconds": round(time.monotonic() - began),
        "results": results,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    if options.docs:
        table.document(document)
    if machine["missing"]:
        print(f"\nnot here, left out: {', '.join(machine['missing'])}")
    print(f"\n{document['seconds']} s in all; the peer's time divided by ours:\n" + report.verdicts(results))
    return 0


def run(key: str, setting: works.Setting, rounds: int) -> dict[str, Any]:
    """One work, made and run; what is said about it."""
    make, share = works.WORKS.get(key) or works.LIMITED[key]
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(dir=setting.home))
        here = works.Setting(setting.registry, setting.tools, Path(home), setting.quick)
        make(here)  # what is missing in the cache is made at full speed, and not on anybody's clock
        if key in works.LIMITED:
            here = stack.enter_context(works.limited(here, 1000))
        work = make(here)
        if isinstance(work, works.Race):
            if setting.quick and not rounds:
                took = work.run(here.home, *QUICK_ROUNDS, share * QUICK_SECONDS)
            else:
                took = work.run(here.home, rounds or work.rounds)
            return report.race(work, key, took)
        return report.probe(
            work, key, probe(work, here.home, rounds or (1 if setting.quick else work.rounds))
        )


def probe(work: works.Probe, home: Path, rounds: int) -> list[dict[str, float]]:
    """Its figures, once a round."""
    found = []
    measure.spread(home)
    for number in range(rounds):
        place = home / f"probe-{number}"
        place.mkdir()
        found.append(work.figures(place))
        contenders.clear(place)
    return found


if __name__ == "__main__":
    sys.exit(main())
