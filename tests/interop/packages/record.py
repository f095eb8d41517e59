"""Record kpt's outcomes of the generated cases: `python -m tests.interop.packages.record`.

The recording stands in for kpt where it is not installed. It holds kpt's own files for every seed, so a
failing case can be looked at without kpt; the generator's version of each case is kept as a hash, so a
recording that no longer fits the generator is noticed and not compared.
"""

import gzip
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.interop.packages import kpt
from tests.interop.packages.generator import Case, case

RECORDING = Path(__file__).with_name("kpt-outcomes.jsonl.gz")
SEEDS = range(2300)
# Larger bundles are slower per case: kpt's merge is quadratic in the resources of a package.
BUNDLE = 100


def fingerprint(made: Case) -> str:
    """A hash of a case's three sides."""
    text = json.dumps([made.base, made.local, made.upstream], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load() -> dict[int, tuple[str, kpt.Files]]:
    """Seed to the case's fingerprint and kpt's files."""
    with gzip.open(RECORDING, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {row["seed"]: (row["case"], row["files"]) for row in rows}


def run(seeds: range) -> dict[int, tuple[str, kpt.Files]]:
    """kpt's outcomes of these seeds, in bundles."""
    found: dict[int, tuple[str, kpt.Files]] = {}
    for start in range(0, len(seeds), BUNDLE):
        cases = [case(seed) for seed in seeds[start : start + BUNDLE]]
        work = Path(tempfile.mkdtemp(prefix="unlade-kpt-"))
        try:
            outcome = kpt.update_with_kpt(work, cases)
        finally:
            shutil.rmtree(work)
        print(f"{cases[-1].seed + 1} of {seeds[-1] + 1}", file=sys.stderr, flush=True)
        found.update({made.seed: (fingerprint(made), outcome[made.seed]) for made in cases})
    return found


def main() -> None:
    if kpt.available() is None:
        sys.exit("kpt is not on PATH: nothing was recorded")
    rows = [
        json.dumps({"seed": seed, "case": mark, "files": files}, sort_keys=True)
        for seed, (mark, files) in sorted(run(SEEDS).items())
    ]
    with RECORDING.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as out:
        out.write(("\n".join(rows) + "\n").encode())
    print(f"{len(rows)} outcomes in {RECORDING}")


if __name__ == "__main__":
    main()
