"""`python -m rig`: build the engines, start and stop rigs, open a shell in one.

The builder (`build`, `which`) needs nothing but the standard library, so it runs before the project's
environment exists; the other commands import what they need when they are called.
"""

from __future__ import annotations

import argparse
import sys

from rig import engines


def _build(arguments: argparse.Namespace) -> int:
    for engine in engines.select(arguments.engine):
        if not engine.built:
            print(f"building {engine.name} {engine.version} …", file=sys.stderr, flush=True)
        for _, seconds in engines.build([engine.name]):
            state = "already built" if seconds is None else f"built in {seconds:.0f} s"
            print(f"{engine.name} {engine.version}: {state}, {engine.output}", file=sys.stderr, flush=True)
    return 0


def _which(arguments: argparse.Namespace) -> int:
    print(engines.binary(arguments.name))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m rig", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    build = commands.add_parser("build", help="build engines into the cache (all, or those named)")
    build.add_argument("engine", nargs="*", help="an engine or one of its commands")
    build.set_defaults(run=_build)

    which = commands.add_parser("which", help="print the path of a built command")
    which.add_argument("name")
    which.set_defaults(run=_which)

    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except engines.EngineError as error:
        print(f"rig: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
