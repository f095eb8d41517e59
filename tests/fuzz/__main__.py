"""`python -m tests.fuzz --seconds N [target …]`: every fuzzer, each in a process of its own.

A target is a module `fuzz_NAME` with `CORPUS` (inputs to start from) and `one_input(data)`, which raises for
anything that must not happen. atheris drives it where it is installed (coverage-guided), a seeded loop of
mutations elsewhere. A crash, an input that takes more than ten seconds, or more than 256 MB of memory ends
the target; the input is kept under `artifacts/fuzz/` and the exit status is 1. Inputs worth keeping are in
`tests/fuzz/corpus/NAME/`, read at every start; `--grow` adds what atheris finds to it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """Run the named targets, or all; 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="target")
    parser.add_argument("--seconds", type=float, default=20, help="for each target")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the mutations")
    parser.add_argument("--grow", action="store_true", help="keep new inputs in the corpus")
    parser.add_argument("--engine", choices=["auto", "atheris", "loop"], default="auto")
    options = parser.parse_args()
    known = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.py"))
    unknown = sorted(set(options.targets) - set(known))
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are: {', '.join(known)}")
    failed = []
    for target in options.targets or known:
        command = [sys.executable, "-m", "tests.fuzz.drive", target, str(options.seconds), str(options.seed)]
        command += [options.engine, *(["--grow"] if options.grow else [])]
        print(f"== {target} ({options.seconds:g} s, seed {options.seed})", flush=True)
        # The child watches itself; this is for a child that cannot.
        try:
            status = subprocess.run(
                command, check=False, timeout=options.seconds * 2 + 120, env=os.environ
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
        if status:
            failed.append(target)
            print(f"== {target} FAILED (status {status})", flush=True)
    print("failed: " + ", ".join(failed) if failed else f"{len(options.targets or known)} targets clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
