"""`unlade node install | uninstall | status`: the service as part of a host.

The work is in `unlade.host`; this is the options, the dry run and the report. Options of `node serve` stand
after `--`: they are read by that command itself, so that a wrong one is refused before anything is changed,
and are kept by upgrades that name none. Steps go to stdout as they are done.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unlade.cli.settings import Settings, output_option, pass_settings, quiet_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unlade.host.setup import Version
    from unlade.host.steps import Host, Step

PREFIX = "/opt/unlade"

_prefix = click.option(
    "--prefix", default=PREFIX, show_default=True, metavar="DIR", help="Where versions lie side by side."
)
_root = click.option(
    "--root",
    type=click.Path(file_okay=False, exists=True),
    default="/",
    metavar="DIR",
    help="The tree of an image that is being built, instead of this host; systemd is not called.",
)
_dry_run = click.option("--dry-run", is_flag=True, help="Print every step, do none.")


@click.command(short_help="Put the service in place, or upgrade it.")
@_prefix
@_root
@click.option(
    "--python", default="", metavar="PATH", help="The node's Python; default: the one that runs this."
)
@click.option(
    "--kubelet-config-dir",
    "config_directory",
    metavar="DIR",
    help="Where the kubelet reads drop-ins (--config-dir); default: where the running one does.",
)
@click.option("--kubelet-unit", default="kubelet.service", show_default=True, metavar="UNIT")
@click.option("--no-kubelet", is_flag=True, help="Leave the kubelet's configuration alone.")
@click.option("--rollback", is_flag=True, help="Go back to the version before, with its options.")
@_dry_run
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- SERVE-OPTION...]")
@quiet_options
@pass_settings
def install(
    settings: Settings,
    *,
    prefix: str,
    root: str,
    python: str,
    config_directory: str | None,
    kubelet_unit: str,
    no_kubelet: bool,
    rollback: bool,
    dry_run: bool,
    serve_options: tuple[str, ...],
) -> None:
    """Put this installation in place as the node's image service, or upgrade the one that is there.

    A copy of it that needs no pip goes below the prefix, beside the version that runs; a systemd unit starts
    it before the kubelet, and a drop-in tells the kubelet. A second run changes nothing. A step that fails is
    taken back with all before it. Options for `unlade node serve` stand after `--`; upgrades keep them.

    \b
    Examples:
      unlade node install --dry-run
      unlade node install -- --handler kata=linux/amd64
      unlade node install --root ./image --python /usr/bin/python3.11
      unlade node install --rollback
    """
    from unlade.host import setup
    from unlade.host.bundle import collect

    wanted = setup.Wanted(
        prefix=prefix,
        version=_version(serve_options) if serve_options else None,
        kubelet_unit=kubelet_unit,
        config_directory=config_directory,
        leave_kubelet=no_kubelet,
    )
    if rollback and serve_options:
        raise click.UsageError("--rollback brings the earlier version's own options back")
    host = _host(root)
    with host.alone():
        if rollback:
            steps = setup.rollback(host, wanted, answers=_answers)
        else:
            arguments = (wanted.version or setup.installed(host, prefix).version).arguments
            # Events need the Kubernetes client, which is more than all the rest.
            extras = ["node", "kube"] if _parsed(arguments)["kubeconfig"] else ["node"]
            steps = setup.install(host, wanted, collect(extras, python=python), answers=_answers)
        _carry_out(settings, host, steps, dry_run=dry_run)


@click.command(short_help="Take the service away again.")
@_prefix
@_root
@_dry_run
@quiet_options
@pass_settings
def uninstall(settings: Settings, *, prefix: str, root: str, dry_run: bool) -> None:
    """Take everything away that `install` put in place, and leave pods and containerd's content as they are.

    First the kubelet goes back to containerd, then the service ends.

    \b
    Examples:
      unlade node uninstall --dry-run
      unlade node uninstall
    """
    from unlade.host import setup

    host = _host(root)
    with host.alone():
        _carry_out(settings, host, setup.uninstall(host, prefix), dry_run=dry_run)


@click.command(short_help="What is installed, and whether it works.")
@_prefix
@_root
@output_option()
@quiet_options
def status(*, prefix: str, root: str, output: str) -> int:
    """Say which version is in place, whether its unit runs and its socket answers, and what the kubelet uses.

    Ends with 1 when something is not as it should be.

    \b
    Examples:
      unlade node status
      unlade node status -o json
    """
    from unlade.cli import exits
    from unlade.cli.output import count, emit
    from unlade.host import setup

    host = _host(root)
    data = setup.survey(host, prefix, answers=_answers)
    running = _running(data["state"]) if host.live else None
    data["running"] = running
    if running and data["current"] and not data["current"].startswith(f"{running['version']}-"):
        data["problems"].append(
            f"version {running['version']} runs: systemctl restart {data['unit']['name']}"
        )
    unit, kubelet, socket = data["unit"], data["kubelet"], data["socket"]
    rows = [
        ("version", data["current"] or "-"),
        ("previous", data["previous"] or "-"),
        ("running", f"{running['version']}, {count(running['pulls'], 'pull', 'pulls')}" if running else "-"),
        ("options", " ".join(data["arguments"]) or "-"),
        ("unit", f"{unit.get('active', 'not asked')}, {'enabled' if unit['enabled'] else 'not enabled'}"),
        ("socket", f"{socket['path']}: {_told(socket)}"),
        ("kubelet", f"{kubelet['endpoint']} ({kubelet['source']})" if kubelet.get("running") else "not seen"),
        *(("problem", problem) for problem in data["problems"]),
    ]
    emit(data, output, ("WHAT", "STATE"), rows)
    return exits.FOUND if data["problems"] else 0


def _told(socket: dict[str, Any]) -> str:
    if "answers" not in socket:
        return "not asked"
    return "answers" if socket["answers"] else str(socket["reason"])


def _running(state: str) -> dict[str, Any] | None:
    """What the running service says about itself."""
    from unlade.cri.watching import SOCKET, Unseen, ask

    try:
        now = ask(Path(state) / SOCKET)
    except Unseen:
        return None
    return {"version": now.version, "pid": now.pid, "pulls": len(now.pulls)}


def _host(root: str) -> Host:
    from unlade.errors import InvalidInput
    from unlade.host.steps import Host

    host = Host(Path(os.path.abspath(root)))
    if host.live and os.geteuid() != 0:
        raise InvalidInput(
            "only root can change or see this host's services", next_step="use sudo, or --root"
        )
    return host


def _answers(socket: str) -> str:
    from unlade.cri.probe import unanswered

    return unanswered(socket)


def _parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Options of `node serve`, read by itself; raises click's usage errors."""
    from unlade.cli.node import serve

    return serve.make_context("unlade node serve", list(arguments)).params


def _version(arguments: tuple[str, ...]) -> Version:
    from unlade.host.setup import Version

    told = _parsed(arguments)
    return Version(arguments, told["socket"], told["state"], told["grace"], told["csi"])


def _carry_out(settings: Settings, host: Host, steps: Sequence[Step], *, dry_run: bool) -> None:
    from unlade.host.steps import carry_out

    if dry_run:
        for step in steps:
            print(step.describe())
        settings.note("nothing was changed" if steps else "nothing to do")
    elif not steps:
        settings.note("nothing to do")
    else:
        carry_out(steps, host, print)
