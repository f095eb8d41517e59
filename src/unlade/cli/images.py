"""`unlade images` and `unlade rmi`: records of the store by reference and runtime handler (R4, R7)."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from unlade.cli.completion import stored_references
from unlade.cli.settings import Settings, output_option, pass_settings, store_options

if TYPE_CHECKING:
    from unlade.store import DirStore, ImageRecord


@click.command(short_help="List what the store holds.")
@click.argument("names", nargs=-1, metavar="[REF...]", shell_complete=stored_references)
@click.option("--runtime-handler", "handler", metavar="NAME", help="Only records of this handler.")
@output_option()
@store_options
@pass_settings
def images(settings: Settings, *, names: tuple[str, ...], handler: str | None, output: str) -> None:
    """List the store's records: reference, handler, platform, digest, sizes and mounts.

    OWN bytes would be freed with the record; SHARED bytes are kept by others too. The total on stderr counts
    every byte once. With --containerd, what the node's kubelet sees, a line for each runtime handler.

    \b
    Examples:
      unlade images
      unlade images --store containerd
      unlade images --runtime-handler kata -o json
    """
    from unlade.cli.output import count, emit, human
    from unlade.cli.request import parse_references

    if socket := settings.containerd_socket():
        from unlade.cli.node_images import show

        show(settings, socket, names, handler, output)
        return
    wanted = {str(reference) for reference in parse_references(names)}
    with settings.store() as store:
        records = [
            record
            for record in store.images.all()
            if (not wanted or record.reference in wanted) and (handler is None or record.handler == handler)
        ]
        sizes = store.images.sizes()
        total = store.images.total_size()
        mounts = _mounts(store)
    data, rows = [], []
    for record in records:
        size = sizes[record.reference, record.handler]
        where = mounts.get(str(record.tree), [])
        data.append(
            {
                "reference": record.reference,
                "handler": record.handler,
                "digest": str(record.manifest.digest),
                "index": str(record.index.digest) if record.index else None,
                "platform": str(record.platform) if record.platform else None,
                "tree": str(record.tree) if record.tree else None,
                "blobs": record.content,
                "ownBytes": size.unique,
                "sharedBytes": size.shared,
                "created": _time(record.created),
                "used": _time(record.used),
                "mounts": where,
            }
        )
        rows.append(
            (
                record.reference,
                record.handler or "-",
                str(record.platform or "-"),
                record.manifest.digest.hex[:12],
                human(size.unique),
                human(size.shared),
                _kept(record),
                ",".join(where) or "-",
            )
        )
    columns = ("REFERENCE", "HANDLER", "PLATFORM", "DIGEST", "OWN", "SHARED", "KEPT AS", "MOUNTS")
    emit({"images": data, "totalBytes": total}, output, columns, rows)
    settings.note(
        f"{count(len(records), 'record', 'records')}, {human(total)} in {settings.store_directory()}"
    )


@click.command(short_help="Remove references from the store.")
@click.argument("names", nargs=-1, required=True, metavar="REF...", shell_complete=stored_references)
@click.option(
    "--runtime-handler", "handler", metavar="NAME", help="Only this handler's record; default: all."
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, remove nothing.")
@store_options
@pass_settings
def rmi(settings: Settings, *, names: tuple[str, ...], handler: str | None, dry_run: bool) -> None:
    """Remove records from the store and free what nothing else needs. What is mounted stays.

    Without --runtime-handler every handler's record of REF goes; with it, only that one. REF may also be the
    digest of a manifest or index (`sha256:...`): then every record of it; in containerd, an image ID too.

    \b
    Examples:
      unlade rmi registry.example.com/team/model:v1
      unlade rmi --runtime-handler kata alpine:3.20
      unlade rmi --dry-run sha256:4bcff63911fcb4448bd4fdacec207030997caf25e9bea4045fa6c8c44de311d1
    """
    from unlade.cli.output import human
    from unlade.store import NotInStore, remove_image

    if socket := settings.containerd_socket():
        from unlade.cli.node_images import remove

        remove(settings, socket, names, handler, dry_run=dry_run)
        return
    freed = 0
    with settings.store() as store:
        chosen: dict[tuple[str, str], ImageRecord] = {}
        for name in names:
            found = [one for one in _records(store, name) if handler is None or one.handler == handler]
            if not found:
                raise NotInStore(
                    f"{name} is not in the store {store.path}", next_step="`unlade images` lists what is"
                )
            chosen |= {(one.reference, one.handler): one for one in found}
        for record in chosen.values():
            if not dry_run:
                _, report = remove_image(
                    store, record.reference, record.handler, deadline=settings.deadline()
                )
                freed += report.bytes
            print(record.reference + (f" ({record.handler})" if record.handler else ""))
    settings.note("nothing was removed" if dry_run else f"freed {human(freed)}")


def _records(store: DirStore, name: str) -> list[ImageRecord]:
    from unlade.cli.request import parse_references
    from unlade.model import Digest

    if name.startswith(("sha256:", "sha512:")):
        return store.images.with_digest(Digest.parse(name))
    reference = str(parse_references([name])[0])
    return [record for record in store.images.all() if record.reference == reference]


def _mounts(store: DirStore) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for record in store.mounts.all():
        found.setdefault(str(record.tree), []).append(os.fsdecode(record.mountpoint))
    return found


def _kept(record: ImageRecord) -> str:
    parts = (["blobs"] if record.content else []) + (["tree"] if record.tree else [])
    return "+".join(parts) or "-"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
