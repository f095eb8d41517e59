"""`unlade gc` and `unlade fsck`: free what nothing needs, and find what time has damaged."""

from __future__ import annotations

import click

from unlade.cli import exits
from unlade.cli.settings import Settings, output_option, pass_settings, store_options


@click.command(short_help="Delete what nothing in the store refers to.")
@click.option(
    "--keep-recent",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Spare what is younger than this.",
)
@click.option("--dry-run", is_flag=True, help="List what would be deleted, delete nothing.")
@output_option()
@store_options
@pass_settings
def gc(settings: Settings, *, keep_recent: float, dry_run: bool, output: str) -> None:
    """Delete blobs and trees that no record, lease or mount needs; safe while others pull.

    With --containerd: end what dead processes left there, and have containerd collect. No image is removed.

    \b
    Examples:
      unlade gc --dry-run
      unlade gc --keep-recent 86400
    """
    from unlade.cli.output import emit, human
    from unlade.mount.table import read_table
    from unlade.store import collect

    if socket := settings.containerd_socket():
        from unlade.cli.node_images import tidy

        if keep_recent:
            raise click.UsageError("containerd decides by itself what is recent: leave --keep-recent out")
        tidy(settings, socket, output, dry_run=dry_run)
        return
    with settings.store() as store:
        report = collect(
            store,
            keep_recent=keep_recent,
            mounted=[entry.path for entry in read_table()],
            dry_run=dry_run,
            deadline=settings.deadline(),
        )
    data = {
        "blobs": report.blobs,
        "trees": report.trees,
        "bytes": report.bytes,
        "leases": report.leases,
        "mounts": report.mounts,
        "partials": report.partials,
        "strays": report.strays,
        "removed": report.removed,
        "dryRun": dry_run,
    }
    if report.removed or output != "table":
        emit(data, output, ("REMOVED",), [(name,) for name in report.removed])
    verb = "would free" if dry_run else "freed"
    settings.note(f"{verb} {human(report.bytes)}: {report.blobs} blobs, {report.trees} trees")


@click.command(short_help="Check every byte and record of the store.")
@click.option(
    "--repair", is_flag=True, help="Quarantine what is damaged, so that the next pull brings it anew."
)
@output_option()
@store_options
@pass_settings
def fsck(settings: Settings, *, repair: bool, output: str) -> int:
    """Hash every blob, compare every tree with its file list, and check the records.

    With --containerd, of what the node's images need there; --repair removes what is damaged.

    Exit code 1 when something is wrong, 0 when nothing is.

    \b
    Examples:
      unlade fsck
      unlade fsck --repair
    """
    from unlade.cli.output import count, emit
    from unlade.tree import fsck as check

    if socket := settings.containerd_socket():
        with settings.node(socket) as node:
            problems = node.fsck(repair=repair, deadline=settings.deadline())
    else:
        with settings.store() as store:
            problems = check(store, repair=repair, deadline=settings.deadline())
    data = [
        {"kind": one.kind, "subject": one.subject, "detail": one.detail, "repaired": one.repaired}
        for one in problems
    ]
    rows = [(one.kind, one.subject, one.detail, "yes" if one.repaired else "no") for one in problems]
    if rows or output != "table":
        emit({"problems": data}, output, ("PROBLEM", "SUBJECT", "DETAIL", "REPAIRED"), rows)
    settings.note(count(len(problems), "problem", "problems") if problems else "no problems")
    return exits.FOUND if problems else 0
