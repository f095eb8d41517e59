"""`unlade plan`: what a reference would become, before a byte of content is fetched where the format allows
(V16).
"""

from __future__ import annotations

from typing import Any, Final

import click

from unlade.cli.completion import stored_references
from unlade.cli.request import make_request, parse_references, request_options
from unlade.cli.settings import Settings, output_option, pass_settings, registry_options

# Read without being asked: a second on a slow link, and most charts, packages and configurations fit.
AUTO_BYTES: Final = 32 << 20


@click.command(short_help="Show what a reference would become.")
@click.argument("names", nargs=-1, required=True, metavar="REF...", shell_complete=stored_references)
@request_options
@click.option(
    "--files",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Read archives to list what is inside; auto: up to 32 MiB of them.",
)
@output_option()
@registry_options
@pass_settings
def plan(settings: Settings, *, names: tuple[str, ...], files: str, output: str, **options: Any) -> None:
    """List each file that REF would become, its size, its layer and the rule that puts it there.

    Nothing is written. Where manifests say it all, no content is fetched; archives up to 32 MiB are read for
    the names inside, and a larger one is shown as a path that ends in `/` unless --files always is given.
    Several REFs show their merge.

    \b
    Examples:
      unlade plan registry.example.com/team/model:v1
      unlade plan -o json ghcr.io/team/chart:1.2.3
      unlade plan --files always alpine:3.20
      unlade plan --unpack never registry.example.com/team/site:v1
    """
    from unlade.cli.output import emit, human
    from unlade.delivery import AsTree, Engine
    from unlade.delivery.contents import expand

    references = parse_references(names)
    request = make_request(references, AsTree(), pull="always", **options)
    deadline = settings.deadline()
    unopened = 0
    with settings.registry(references) as registry, Engine(registry) as engine:
        planned, found = engine.plan(request, deadline=deadline)
        if files == "never":
            rows = list(planned.files())
        else:
            budget = AUTO_BYTES if files == "auto" else None
            where = [one.reference for one in found]
            rows, unopened = expand(planned, where, registry, budget=budget, deadline=deadline)
    skipped = [step for step in planned.steps if step.action == "skip"]
    data = {
        "references": [
            {
                "reference": str(one.reference),
                "digest": str(one.descriptor.digest),
                "family": source.family,
                "kind": source.kind,
            }
            for one, source in zip(found, planned.sources, strict=True)
        ],
        "fetchBytes": planned.fetch_size(),
        "files": [
            {
                "path": row.path,
                "size": row.size,
                "layer": str(row.layer),
                "rule": row.rule,
                "reference": row.reference,
            }
            for row in rows
        ],
        "skipped": [
            {"layer": str(step.layer.digest), "mediaType": step.layer.media_type, "rule": step.rule}
            for step in skipped
        ],
        "notes": list(planned.notes),
    }
    table = [(row.path, human(row.size), row.layer.hex[:12], row.rule) for row in rows]
    emit(data, output, ("PATH", "SIZE", "LAYER", "RULE"), table)
    for one, source in zip(found, planned.sources, strict=True):
        settings.note(f"{one.reference.with_digest(one.descriptor.digest)}: {source.family} ({source.kind})")
    for step in skipped:
        settings.note(f"skipped {step.layer.digest.hex[:12]} {step.layer.media_type}: {step.rule}")
    for note in planned.notes:
        settings.note(f"note: {note}")
    if unopened:
        settings.note(f"{human(unopened)} of archives were not read: --files always lists what is inside")
    settings.note(f"to fetch: {human(planned.fetch_size())}")
