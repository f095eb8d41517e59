"""`unlade plan`: what a reference would become, before a byte of content is fetched where the format allows
(V16).
"""

from __future__ import annotations

from typing import Any

import click

from unlade.cli.completion import stored_references
from unlade.cli.request import make_request, parse_references, request_options
from unlade.cli.settings import Settings, output_option, pass_settings, registry_options


@click.command(short_help="Show what a reference would become.")
@click.argument("names", nargs=-1, required=True, metavar="REF...", shell_complete=stored_references)
@request_options
@output_option()
@registry_options
@pass_settings
def plan(settings: Settings, *, names: tuple[str, ...], output: str, **options: Any) -> None:
    """List each file that REF would become, its size, its layer and the rule that puts it there.

    Nothing is written, and no content is fetched beyond what tells an archive from a file. A path that ends
    in `/` is an archive whose names are known only when it is unpacked. Several REFs show their merge.

    \b
    Examples:
      unlade plan registry.example.com/team/model:v1
      unlade plan -o json ghcr.io/team/chart:1.2.3
      unlade plan --unpack never registry.example.com/team/site:v1
    """
    from unlade.cli.output import emit, human
    from unlade.delivery import AsTree, Engine

    references = parse_references(names)
    request = make_request(references, AsTree(), pull="always", **options)
    with settings.registry(references) as registry, Engine(registry) as engine:
        planned, found = engine.plan(request, deadline=settings.deadline())
    rows = list(planned.files())
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
    settings.note(f"to fetch: {human(planned.fetch_size())}")
