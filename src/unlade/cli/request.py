"""Options of every command that asks for content, and the request they make.

`pull`, `plan` and `mount` ask the same question of the library, so they share their options: what differs
is only the destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from unlade.cli.settings import Command, accepting

if TYPE_CHECKING:
    from unlade.delivery import Destination, Request
    from unlade.model import Reference

_OPTIONS: Final = (
    click.option(
        "--platform", metavar="OS/ARCH[/VARIANT]", help="Choose from an index; default: this machine."
    ),
    click.option(
        "--runtime-handler", "handler", default="", metavar="NAME", help="The record's runtime handler."
    ),
    click.option(
        "--unpack",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="Whether an artifact's archives are unpacked.",
    ),
    click.option("--only", multiple=True, metavar="GLOB", help="Only these paths; may be repeated."),
    click.option(
        "--as-file",
        multiple=True,
        metavar="[INDEX=]NAME",
        help="A name for a layer that has none; may be repeated.",
    ),
    click.option(
        "--referrer", default="", metavar="TYPE", help="Deliver what refers to REF and has this type."
    ),
    click.option(
        "--referrer-from", metavar="REPOSITORY", help="Look for the referrer in another repository."
    ),
    click.option(
        "--artifact-type", default="", metavar="TYPE", help="Choose from an index by artifact type."
    ),
    click.option(
        "--annotation",
        "annotations",
        multiple=True,
        metavar="KEY=VALUE",
        help="Choose from an index by annotation; may be repeated.",
    ),
)


def _default_jobs() -> int:
    # Imported when a command runs: help needs no engine.
    from unlade.delivery.engine import DEFAULT_JOBS

    return DEFAULT_JOBS


jobs_option: Final = click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=_default_jobs,
    show_default="by the number of cores",
    help="Layers at once.",
)


def request_options(function: Command) -> Command:
    """Accept the options that say what content is meant."""
    return accepting(function, _OPTIONS)


def parse_references(texts: Sequence[str]) -> tuple[Reference, ...]:
    """References as people write them; `oci://` is accepted because Helm and kpt users write it."""
    from unlade.model import Reference

    return tuple(Reference.parse(text.removeprefix("oci://")) for text in texts)


def make_request(
    references: tuple[Reference, ...],
    destination: Destination,
    *,
    platform: str | None,
    handler: str,
    unpack: str,
    only: tuple[str, ...],
    as_file: tuple[str, ...],
    referrer: str,
    referrer_from: str | None,
    artifact_type: str,
    annotations: tuple[str, ...],
    **more: Any,
) -> Request:
    """The request that the options describe."""
    from unlade.delivery import Request
    from unlade.model import Platform

    return Request(
        references=references,
        destination=destination,
        platform=Platform.parse(platform) if platform else None,
        handler=handler,
        unpack=unpack,  # type: ignore[arg-type]  # click has checked the choice
        only=only,
        as_file=as_file,
        referrer=referrer,
        referrer_from=parse_references([referrer_from])[0] if referrer_from else None,
        artifact_type=artifact_type,
        annotations=dict(key_value(text) for text in annotations),
        **more,
    )


def key_value(text: str) -> tuple[str, str]:
    """KEY=VALUE, as --annotation takes it."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.UsageError(f"--annotation {text!r} is not KEY=VALUE")
    return key, value
