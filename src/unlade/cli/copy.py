"""`unlade copy`: between registries and OCI layouts, without unpacking; digests stay what they are."""

from __future__ import annotations

import click

from unlade.cli.settings import Settings, output_option, pass_settings, registry_options


@click.command(short_help="Copy between registries and OCI layouts.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DEST")
@click.option(
    "--referrers", is_flag=True, help="Also copy what refers to it: signatures, SBOMs, attestations."
)
@click.option(
    "--platform", metavar="OS/ARCH[/VARIANT]", help="Only this platform of an index; default: all of it."
)
@click.option("--jobs", type=click.IntRange(1, 64), default=4, show_default=True, help="Blobs at once.")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, copy nothing.")
@output_option()
@registry_options
@pass_settings
def copy(
    settings: Settings,
    *,
    source: str,
    target: str,
    referrers: bool,
    platform: str | None,
    jobs: int,
    dry_run: bool,
    output: str,
) -> None:
    """Copy SRC to DEST and print `repository@digest`.

    Either side is a reference, or `oci:DIR[:NAME]`, an OCI image layout. An index is copied whole unless
    --platform is given. Within one registry blobs are mounted, not sent; what DEST has is skipped. A DEST
    without a tag keeps the source's.

    \b
    Examples:
      unlade copy registry.example.com/team/app:v1 mirror.example.com/team/app
      unlade copy --referrers ghcr.io/team/app:v1 registry.example.com/team/app:v1
      unlade copy registry.example.com/team/app:v1 oci:./layout:v1
      unlade copy oci:./layout:v1 registry.example.com/team/app:v2
    """
    from unlade.cli.output import emit, human
    from unlade.cli.request import parse_references
    from unlade.model import Platform
    from unlade.transfer.copy import copy as copy_content
    from unlade.transfer.image_layout import is_layout, parse_end

    references = parse_references([text for text in (source, target) if not is_layout(text)])
    progress = settings.progress()
    with settings.registry(references) as registry:
        try:
            copied = copy_content(
                parse_end(source, registry),
                parse_end(target, registry),
                platform=Platform.parse(platform) if platform else None,
                referrers=referrers,
                jobs=jobs,
                dry_run=dry_run,
                deadline=settings.deadline(),
                progress=progress,
            )
        finally:
            progress.close()
    if output == "table":
        print(copied.name)
    else:
        data = {
            "name": copied.name,
            "digest": str(copied.manifest.digest),
            "mediaType": copied.manifest.media_type,
            "manifests": copied.manifests,
            "referrers": copied.referrers,
            "bytesSent": copied.sent.bytes_sent,
            "blobsSent": copied.sent.sent,
            "blobsMounted": copied.sent.mounted,
            "blobsPresent": copied.sent.present,
            "dryRun": dry_run,
        }
        emit(data, output)
    sent = copied.sent
    what = f"{copied.manifests} manifests, {copied.referrers} referrers"
    if dry_run:
        settings.note(f"would copy {what}; nothing was changed")
    else:
        settings.note(
            f"{what}; blobs: {sent.sent} sent ({human(sent.bytes_sent)}), {sent.mounted} mounted, "
            f"{sent.present} already there"
        )
