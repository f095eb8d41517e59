"""`unlade pull`: references into the store, a directory, or a tar on stdout.

With one argument the store is filled; with more, the last is where the content goes and the others are
merged in order (V17). What was pulled is printed as `repository@digest`, one line per reference, so that
a script can pin it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from unlade.cli.completion import stored_references
from unlade.cli.request import jobs_option, make_request, parse_references, request_options
from unlade.cli.settings import Settings, output_option, pass_settings, shared_options

if TYPE_CHECKING:
    from unlade.cli.progress import Watcher
    from unlade.delivery import Delivered, Destination, Engine, Request
    from unlade.model import Deadline


@click.command(short_help="Fetch references into the store or a directory.")
@click.argument(
    "arguments", nargs=-1, required=True, metavar="REF... [DIR|-]", shell_complete=stored_references
)
@request_options
@click.option(
    "--sub-path", default="", metavar="PATH", help="Deliver only this directory or file of the content."
)
@click.option("--replace", is_flag=True, help="Put the new directory in place of an existing one, at once.")
@click.option(
    "--set-id", "setid", is_flag=True, help="Keep set-id bits and capabilities of an image's files."
)
@click.option("--keep-blobs", is_flag=True, help="Keep the blobs in the store as well.")
@jobs_option
@click.option("--connections", type=click.IntRange(1, 16), default=1, help="Connections per large blob.")
@click.option(
    "--dry-run", is_flag=True, help="Resolve and plan, print what would be pulled, fetch no content."
)
@output_option(default="table")
@shared_options
@pass_settings
def pull(
    settings: Settings,
    *,
    arguments: tuple[str, ...],
    sub_path: str,
    replace: bool,
    setid: bool,
    keep_blobs: bool,
    jobs: int,
    connections: int,
    dry_run: bool,
    output: str,
    **options: Any,
) -> None:
    """Fetch references.

    With one REF its blobs go into the store, an OCI image layout that other tools read; with --containerd, to
    where a pod of --runtime-handler would have it. With a DIR the content is unpacked there, and several REFs
    are merged in order, later ones winning; `-` writes a tar to stdout. DIR must be missing or empty unless
    --replace is given; it appears whole or not at all.

    \b
    Examples:
      unlade pull registry.example.com/team/model:v1
      unlade pull registry.example.com/team/model:v1 ./model
      unlade pull ghcr.io/team/base:v1 ghcr.io/team/overlay:v1 ./merged
      unlade pull --referrer application/spdx+json alpine:3.20 ./sbom
      unlade pull registry.example.com/team/site:v1 - | tar -tv
    """
    from unlade.unpack import WorkerPool

    # Before the rest is imported: meanwhile the process that unpacks gets ready beside this one.
    workers = WorkerPool(jobs)
    click.get_current_context().call_on_close(workers.close)

    from unlade.delivery import Directory, Engine, InStore, TarStream

    socket = settings.containerd_socket()
    if socket and len(arguments) == 1:
        from unlade.cli.node_images import fetch

        if sub_path or replace or setid or keep_blobs or dry_run:
            raise click.UsageError(
                "containerd takes whole references: only --runtime-handler and what to pull"
            )
        fetch(settings, socket, arguments[0], jobs, output, **options)
        return
    names, place = (arguments, None) if len(arguments) == 1 else (arguments[:-1], arguments[-1])
    references = parse_references(names)
    destination: Destination
    if place is None:
        if sub_path or replace:
            raise click.UsageError("--sub-path and --replace need a directory")
        destination = InStore()
    elif place == "-":
        destination = TarStream(_binary_stdout())
    else:
        destination = Directory(place, replace)
    # Whoever says pull wants what the registry has now, whatever the store remembers.
    request = make_request(
        references,
        destination,
        pull="always",
        sub_path=sub_path,
        setid=setid,
        keep_blobs=keep_blobs,
        **options,
    )
    deadline = settings.deadline()
    store = settings.store() if place is None or keep_blobs else None
    with (
        settings.registry(references) as registry,
        Engine(registry, store, connections=connections, jobs=jobs, workers=workers) as engine,
    ):
        try:
            if dry_run:
                plan, found = engine.plan(request, deadline=deadline)
                for one in found:
                    print(one.reference.with_digest(one.descriptor.digest))
                settings.note(f"would fetch {plan.fetch_size()} bytes; nothing was changed")
                return
            progress = settings.progress()
            try:
                if keep_blobs and place is not None:
                    request = _kept(engine, request, deadline, progress)
                delivered = engine.deliver(request, deadline=deadline, progress=progress)
            finally:
                progress.close()
        finally:
            if store is not None:
                store.close()
    _show(settings, delivered, place, output)


def _kept(engine: Engine, request: Request, deadline: Deadline, progress: Watcher) -> Request:
    """Fill the store, and ask for exactly that: the directory is then made from the kept blobs."""
    import msgspec

    from unlade.delivery import InStore

    pinned = []
    for reference in request.references:
        one = msgspec.structs.replace(request, references=(reference,), destination=InStore(), sub_path="")
        [found] = engine.deliver(one, deadline=deadline, progress=progress).resolved
        pinned.append(found.reference.with_digest(found.digest))
    return msgspec.structs.replace(request, references=tuple(pinned), referrer="", referrer_from=None)


def _show(settings: Settings, delivered: Delivered, place: str | None, output: str) -> None:
    from unlade.cli.output import count, emit, human

    names = [str(one.reference.with_digest(one.digest)) for one in delivered.resolved]
    if place == "-":
        for name in names:
            settings.note(name)
        return
    if output == "table":
        for name in names:
            print(name)
        what = (
            "already there"
            if delivered.cached
            else f"{count(delivered.entries, 'entry', 'entries')}, {human(delivered.size)}"
        )
        settings.note(f"{what} in {delivered.path}")
        return
    data = {
        "references": [
            {
                "reference": str(one.reference),
                "name": name,
                "digest": str(one.digest),
                "index": str(one.index) if one.index else None,
                "platform": str(one.platform) if one.platform else None,
            }
            for one, name in zip(delivered.resolved, names, strict=True)
        ],
        "family": delivered.plan.family,
        "path": delivered.path,
        "entries": delivered.entries,
        "bytes": delivered.size,
        "cached": delivered.cached,
    }
    emit(data, output)


def _binary_stdout() -> BinaryIO:
    if sys.stdout.isatty():
        raise click.UsageError("a tar does not belong on a terminal: pipe it, or name a directory")
    return sys.stdout.buffer
