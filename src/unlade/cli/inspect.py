"""`unlade inspect`: what a reference is, as the registry has it: manifest, layers, referrers (V12)."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from unlade.cli.completion import stored_references
from unlade.cli.settings import Settings, output_option, pass_settings, shared_options

if TYPE_CHECKING:
    from unlade.model import Deadline, Descriptor, Index, Manifest, Reference
    from unlade.registry import Registry


@click.command(short_help="Show a reference's manifest and layers.")
@click.argument("name", metavar="REF", shell_complete=stored_references)
@click.option(
    "--platform", metavar="OS/ARCH[/VARIANT]", help="Go on to this platform's manifest of an index."
)
@click.option("--referrers", is_flag=True, help="Also list what refers to it.")
@click.option("--artifact-type", metavar="TYPE", help="With --referrers: only of this type.")
@click.option("--config", "show_config", is_flag=True, help="Print the config blob as it is.")
@click.option("--raw", is_flag=True, help="Print the manifest's bytes as they are.")
@click.option("--tags", is_flag=True, help="List the repository's tags instead.")
@click.option("--runtime-handler", "handler", metavar="NAME", help="With --containerd: only this handler's.")
@output_option()
@shared_options
@pass_settings
def inspect(
    settings: Settings,
    *,
    name: str,
    platform: str | None,
    referrers: bool,
    artifact_type: str | None,
    show_config: bool,
    raw: bool,
    tags: bool,
    handler: str | None,
    output: str,
) -> None:
    """Show what REF is. Nothing is stored.

    With --containerd or --store containerd: what the node holds of REF, or of an image ID, for each runtime
    handler; no registry is asked.

    \b
    Examples:
      unlade inspect registry.example.com/team/model:v1
      unlade inspect --platform linux/arm64 -o json alpine:3.20
      unlade inspect --referrers registry.example.com/team/app:v1
      unlade inspect --raw registry.example.com/team/app:v1 | sha256sum
    """
    from unlade.cli.output import emit
    from unlade.cli.request import parse_references
    from unlade.model import Index

    if socket := settings.containerd_socket(asked=True):
        from unlade.cli.node_images import explain

        if platform or referrers or show_config or raw or tags:
            raise click.UsageError("containerd is asked for what it holds: leave the registry's options out")
        explain(settings, socket, name, handler, output)
        return
    if handler is not None:
        raise click.UsageError("a registry knows no runtime handlers: --runtime-handler needs --containerd")
    [reference] = parse_references([name])
    deadline = settings.deadline()
    with settings.registry([reference]) as registry:
        if tags:
            names = list(registry.tags(reference, deadline=deadline))
            emit({"repository": reference.name, "tags": names}, output, ("TAG",), [(tag,) for tag in names])
            return
        descriptor, body, document = _resolve(registry, reference, platform, deadline)
        if raw:
            _write_bytes(body)
            return
        if show_config:
            if isinstance(document, Index):
                raise click.UsageError("an index has no config: choose one of its manifests with --platform")
            _write_bytes(_config(registry, reference, document, deadline))
            return
        found = (
            registry.referrers(reference, descriptor.digest, artifact_type=artifact_type, deadline=deadline)
            if referrers
            else []
        )
    data: dict[str, Any] = {
        "reference": str(reference),
        "name": str(reference.with_digest(descriptor.digest)),
        **descriptor.to_json(),
        "manifest": json.loads(body),
    }
    if referrers:
        data["referrers"] = [one.to_json() for one in found]
    emit(data, output, ("KIND", "MEDIA TYPE", "SIZE", "DIGEST", "NAME"), _rows(descriptor, document, found))


def _resolve(
    registry: Registry, reference: Reference, platform: str | None, deadline: Deadline
) -> tuple[Descriptor, bytes, Manifest | Index]:
    from unlade.model import Index, Platform, decode_manifest
    from unlade.planning import select

    answer = registry.resolve(reference, deadline=deadline)
    document = decode_manifest(answer.raw, content_type=answer.content_type)
    if platform is None or not isinstance(document, Index):
        return answer.descriptor, answer.raw, document
    chosen = select(document, Platform.parse(platform))
    body = registry.manifest(reference, chosen, deadline=deadline)
    return chosen, body, decode_manifest(body, content_type=chosen.media_type or None)


def _config(registry: Registry, reference: Reference, document: Manifest, deadline: Deadline) -> bytes:
    from unlade.model import MAX_MANIFEST_BYTES
    from unlade.transfer import Fetcher

    return Fetcher(registry).read(reference, document.config, limit=MAX_MANIFEST_BYTES, deadline=deadline)


def _rows(
    descriptor: Descriptor, document: Manifest | Index, referrers: list[Descriptor]
) -> list[tuple[str, ...]]:
    from unlade.model import Index

    kind = "index" if isinstance(document, Index) else "manifest"
    rows = [_row(kind, descriptor, document.artifact_type)]
    if isinstance(document, Index):
        rows += [_row("entry", one, str(one.platform) if one.platform else "") for one in document.manifests]
    else:
        rows.append(_row("config", document.config, ""))
        rows += [_row("layer", one, one.title or "") for one in document.layers]
    if document.subject is not None:
        rows.append(_row("subject", document.subject, ""))
    return rows + [_row("referrer", one, one.artifact_type) for one in referrers]


def _row(kind: str, descriptor: Descriptor, name: str) -> tuple[str, ...]:
    from unlade.cli.output import human

    return kind, descriptor.media_type, human(descriptor.size), str(descriptor.digest), name


def _write_bytes(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
