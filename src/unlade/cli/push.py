"""`unlade push`: a directory or files become an artifact or an image; its digest goes to stdout."""

from __future__ import annotations

from typing import Any, Final

import click

from unlade.cli.settings import Settings, output_option, pass_settings, registry_options

# Deflated blocks are a mebibyte and a few are in flight: freed and asked for again, they would be 40,000 page
# faults for a layer of half a gigabyte.
_BLOCKS: Final = (4 << 20, 32 << 20)


def _pairs(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE")
        pairs[key] = text
    return pairs


@click.command(short_help="Publish a directory or files.")
@click.argument("sources", nargs=-1, required=True, metavar="DIR|FILE...", type=click.Path())
@click.argument("name", metavar="REF")
@click.option("--image", is_flag=True, help="Make an OCI image of one directory, not an artifact.")
@click.option("--artifact-type", metavar="TYPE", help="What the artifact is.")
@click.option(
    "--annotation",
    "annotations",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_pairs,
    help="Annotate the manifest; may be repeated.",
)
@click.option("--subject", metavar="REF", help="What this refers to: makes it a referrer of that.")
@click.option(
    "--compression",
    type=click.Choice(["gzip", "zstd", "none"]),
    default="gzip",
    show_default=True,
    help="How directories are compressed.",
)
@click.option("--level", type=int, help="Compression level: gzip 0 to 9, zstd 1 to 19.")
@click.option(
    "--keep-modes", is_flag=True, help="Keep permission bits as they are, not only the execute bit."
)
@click.option(
    "--platform", metavar="OS/ARCH[/VARIANT]", help="What an image's config names; default linux/amd64."
)
@click.option("--jobs", type=click.IntRange(1, 64), help="Blobs at once.")
@click.option("--dry-run", is_flag=True, help="Pack and print the digest, send nothing.")
@output_option()
@registry_options
@pass_settings
def push(
    settings: Settings,
    *,
    sources: tuple[str, ...],
    name: str,
    artifact_type: str | None,
    subject: str | None,
    platform: str | None,
    jobs: int | None,
    dry_run: bool,
    output: str,
    **options: Any,
) -> None:
    """Publish a directory or files under REF and print `repository@digest`.

    One directory becomes one packed layer: pulling gives back exactly its content, with unlade and with
    oras. Files are sent as they are, titled by their path. Equal content gives an equal digest on every
    machine: owners, times and umask do not count, only the execute bit does (see --keep-modes);
    SOURCE_DATE_EPOCH sets the times. With --image the same tree is an OCI image for crane, skopeo,
    containerd and image volumes. FILE:TYPE gives a file a media type.

    \b
    Examples:
      unlade push ./site registry.example.com/team/site:v1
      unlade push --image ./rootfs registry.example.com/team/data:v1
      unlade push weights.gguf LICENSE registry.example.com/team/model:v1
      unlade push --subject registry.example.com/team/data:v1 --artifact-type application/spdx+json \\
          sbom.json registry.example.com/team/data
    """
    from unlade.cli.request import parse_references
    from unlade.kernel import memory
    from unlade.model import Platform
    from unlade.pack import PushOptions
    from unlade.pack import push as publish
    from unlade.pack.compress import same_everywhere

    [reference] = parse_references([name])
    about = parse_references([subject])[0] if subject else None
    chosen: dict[str, Any] = {"subject": about, **options}
    if artifact_type:
        chosen["artifact_type"] = artifact_type
    if platform:
        chosen["platform"] = Platform.parse(platform)
    if jobs:
        chosen["jobs"] = jobs
    if options["compression"] == "gzip" and not same_everywhere():
        settings.note(
            "warning: zlib-ng is missing here or of another version: digests will differ from those of other "
            "machines (install zlib-ng 1.0, or use --compression none where they must agree)"
        )
    memory.keep_freed(*_BLOCKS)
    progress = settings.progress()
    with settings.registry([reference, *([about] if about else [])]) as registry:
        try:
            pushed = publish(
                sources,
                reference,
                registry=registry,
                options=PushOptions(**chosen),
                dry_run=dry_run,
                deadline=settings.deadline(),
                progress=progress,
            )
        finally:
            progress.close()
    if output == "table":
        print(pushed.reference)
    else:
        from unlade.cli.output import emit

        data = {
            "reference": str(reference),
            "name": str(pushed.reference),
            "digest": str(pushed.manifest.digest),
            "mediaType": pushed.manifest.media_type,
            "layers": [layer.to_json() for layer in pushed.layers],
            "bytesSent": pushed.sent.bytes_sent,
            "blobsSent": pushed.sent.sent,
            "blobsPresent": pushed.sent.present,
            "dryRun": dry_run,
        }
        emit(data, output)
    if dry_run:
        settings.note("nothing was sent")
