"""`python -m rig`: build the engines, start and stop rigs, open a shell in one.

The builder (`build`, `which`) needs nothing but the standard library, so it runs before the project's
environment exists; the other commands import what they need when they are called.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from rig import RigError, engines, images

DEFAULT_NAME = "default"


def _build(arguments: argparse.Namespace) -> int:
    wanted = [name for name in arguments.engine if name != "images"]
    for engine in engines.select(wanted) if wanted or not arguments.engine else ():
        if not engine.built:
            _say(f"building {engine.name} {engine.version} …")
        for _, seconds in engines.build([engine.name]):
            state = "already built" if seconds is None else f"built in {seconds:.0f} s"
            _say(f"{engine.name} {engine.version}: {state}, {engine.output}")
    if not arguments.engine or "images" in arguments.engine:
        for image in images.IMAGES.values():
            began = time.monotonic()
            path = image.layer()
            _say(f"image {image.name}: {path} ({time.monotonic() - began:.1f} s)")
    return 0


def _which(arguments: argparse.Namespace) -> int:
    print(engines.binary(arguments.name))
    return 0


def _up(arguments: argparse.Namespace) -> int:
    from rig import state
    from rig.cluster import Rig
    from rig.settings import Settings

    found = state.load(arguments.name)
    if found is not None and found.ready and all(process.alive for process in found.processes.values()):
        _say(f"rig {arguments.name} runs already")
    else:
        if found is not None:
            _say(f"rig {arguments.name} is incomplete and is started anew")
            with state.lock():
                found.remove()
        began = time.monotonic()
        Rig.up(arguments.name, Settings(nodes=arguments.nodes), owned=False)
        _say(f"rig {arguments.name} is up after {time.monotonic() - began:.1f} s")
    print(describe(arguments.name))
    return 0


def _down(arguments: argparse.Namespace) -> int:
    from rig import state

    with state.lock():
        removed = state.sweep()
        for found in state.every():
            if arguments.all or found.name == arguments.name:
                found.remove()
                removed.append(found.name)
    _say(f"removed: {', '.join(removed)}" if removed else "no rig to remove")
    return 0


def _list(_: argparse.Namespace) -> int:
    from rig import state

    for found in state.every():
        running = sum(process.alive for process in found.processes.values())
        owner = f"owner {found.owner.pid}" if found.owner else "no owner"
        owner += " (gone)" if found.abandoned else ""
        print(f"{found.name}\t{found.address(2)}\t{running}/{len(found.processes)} processes\t{owner}")
    return 0


def _shell(arguments: argparse.Namespace) -> int:
    from rig.cluster import Rig

    rig = Rig.attach(arguments.name)
    _say(describe(arguments.name))
    env = {
        **os.environ,
        "KUBECONFIG": str(rig.kubeconfig),
        "CONTAINERD_ADDRESS": str(rig.node.containerd_socket),
        "CONTAINERD_NAMESPACE": "k8s.io",
        "REGISTRY": rig.registry.address,
        "PATH": ":".join([*(str(e.output / "bin") for e in engines.ENGINES.values()), os.environ["PATH"]]),
        "PS1": f"(rig {rig.name}) \\w \\$ ",
    }
    shell = os.environ.get("SHELL", "/bin/sh")
    command = [shell, "-c", arguments.run_command] if arguments.run_command else [shell]
    os.execvpe(shell, command, env)


def describe(name: str) -> str:
    """What runs where, in one line per thing a user would ask for."""
    from rig.cluster import USERS, Rig

    rig = Rig.attach(name)
    user, password = next(iter(USERS.items()))
    nodes = ", ".join(f"{node.name} {node.address} ({node.containerd_socket})" for node in rig.nodes)
    return (
        f"rig {name}: API server {rig.control_plane.server}; registry {rig.registry.address} (plain), "
        f"{rig.private_registry.address} (TLS, {user}:{password}, CA {rig.authority.ca.cert}); "
        f"nodes {nodes}; logs {rig.logs}\nexport KUBECONFIG={rig.kubeconfig}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m rig", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    build = commands.add_parser("build", help="build engines and images into the cache (all, or those named)")
    build.add_argument("engine", nargs="*", help="an engine, one of its commands, or `images`")
    build.set_defaults(run=_build)

    which = commands.add_parser("which", help="print the path of a built command")
    which.add_argument("name")
    which.set_defaults(run=_which)

    up = commands.add_parser("up", help="start a rig that stays until `down`")
    up.add_argument("name", nargs="?", default=DEFAULT_NAME)
    up.add_argument("--nodes", type=int, default=1)
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="remove a rig, and those whose owner is gone")
    down.add_argument("name", nargs="?", default=DEFAULT_NAME)
    down.add_argument("--all", action="store_true", help="every rig on this machine, in use or not")
    down.set_defaults(run=_down)

    listing = commands.add_parser("list", help="the rigs on this machine")
    listing.set_defaults(run=_list)

    shell = commands.add_parser("shell", help="a shell with KUBECONFIG set and the engines on PATH")
    shell.add_argument("name", nargs="?", default=DEFAULT_NAME)
    shell.add_argument(
        "-c", dest="run_command", metavar="COMMAND", help="run this instead of an interactive shell"
    )
    shell.set_defaults(run=_shell)

    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except RigError as error:
        _say(f"rig: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
