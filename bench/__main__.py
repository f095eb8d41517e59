"""`python -m bench`: run the works round by round, contenders forwards then backwards, and report."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from bench import measure, report, works
from rig.engines import binary
from tests.interop.real_registry import RealRegistry


def main() -> int:
    """Run and report; the exit status says whether every contender did its work and all trees were equal."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--rounds", type=int, help="default 7, quick 3")
    parser.add_argument("--out", type=Path, default=Path("artifacts/bench"))
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 7)
    tools = works.Tools(
        str(binary("crane")),
        shutil.which("skopeo"),
        shutil.which("umoci"),
        str(Path(sys.executable).with_name("unlade")),
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="unlade-bench-") as scratch:
        home = Path(scratch)
        (home / "registry").mkdir()
        with RealRegistry(binary("registry"), home / "registry") as registry:
            host = registry.host
            quick = options.quick
            for work in (
                works.image(host, tools, quick=quick, layers=3, name="image-3-layers"),
                works.image(host, tools, quick=quick, layers=12, name="image-12-layers"),
                works.blob(host, tools, home, quick=quick),
                works.bundle(host, tools, home),
            ):
                rows += report.summary(work, run(work, home, rounds))
                print(report.table(rows[-len(work.contenders) :]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    print("\n" + report.table(rows))
    return 0


def run(work: works.Work, home: Path, rounds: int) -> dict[str, list[measure.Cost]]:
    """Interleave the contenders (ABBA), and compare every result with ours after each round."""
    costs: dict[str, list[measure.Cost]] = defaultdict(list)
    for number in range(rounds):
        order = work.contenders if number % 2 == 0 else work.contenders[::-1]
        places = {}
        for contender in order:
            place = home / f"run-{contender.name.replace(' ', '-')}"
            place.mkdir()
            places[contender.name] = place
            costs[contender.name].append(
                measure.run(contender.command, str(place), durable=not contender.syncs)
            )
        ours = places["unlade"] / work.contenders[0].result
        for contender in work.contenders[1:]:
            theirs = places[contender.name] / contender.result
            if not works.same_tree(ours, theirs):
                raise measure.Failed(f"{work.name}: {contender.name} and unlade made different trees")
        for place in places.values():
            shutil.rmtree(place)
    return costs


if __name__ == "__main__":
    sys.exit(main())
