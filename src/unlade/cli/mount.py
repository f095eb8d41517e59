"""`unlade mount` and `unlade unmount`: content as a read-only file system, shared with every other mount of
it (V8).
"""

from __future__ import annotations

import os
from typing import Any

import click

from unlade.cli.completion import stored_references
from unlade.cli.request import jobs_option, make_request, parse_references, request_options
from unlade.cli.settings import Settings, output_option, pass_settings, shared_options, store_options


@click.command(short_help="Mount references read-only at a directory.")
@click.argument("names", nargs=-1, required=True, metavar="REF...", shell_complete=stored_references)
@click.argument("directory", metavar="DIR", type=click.Path())
@request_options
@click.option(
    "--sub-path", default="", metavar="PATH", help="Mount only this directory or file of the content."
)
@click.option("--exec", "executable", is_flag=True, help="Allow programs to be run from the mount.")
@click.option("--context", default="", metavar="LABEL", help="SELinux label of the mount.")
@click.option(
    "--pull",
    "policy",
    type=click.Choice(["always", "missing", "never"]),
    help="When to ask the registry; default: always for :latest, else when missing.",
)
@click.option("--keep-blobs", is_flag=True, help="Keep the blobs in the store as well.")
@jobs_option
@output_option()
@shared_options
@pass_settings
def mount(
    settings: Settings,
    *,
    names: tuple[str, ...],
    directory: str,
    sub_path: str,
    executable: bool,
    context: str,
    policy: str | None,
    keep_blobs: bool,
    jobs: int,
    output: str,
    **options: Any,
) -> None:
    """Mount the content of REF read-only at DIR, which must exist. Needs root, on Linux.

    The mount is `ro,nosuid,nodev`, and `noexec` unless --exec is given. Layers are unpacked once and shared
    by every mount of them; what is mounted is never garbage-collected. Several REFs are merged in order.

    \b
    Examples:
      unlade mount registry.example.com/team/model:v1 /mnt/model
      unlade mount --exec alpine:3.20 /mnt/alpine
      unlade mount --sub-path etc --pull never alpine:3.20 /mnt/etc
    """
    from unlade.delivery import Engine, Mounted
    from unlade.mount import MountOptions

    references = parse_references(names)
    how = MountOptions(executable=executable, context=context)
    request = make_request(
        references, Mounted(directory, how), pull=policy, sub_path=sub_path, keep_blobs=keep_blobs, **options
    )
    progress = settings.progress()
    with (
        settings.store() as store,
        settings.registry(references) as registry,
        Engine(registry, store, jobs=jobs) as engine,
    ):
        try:
            delivered = engine.deliver(request, deadline=settings.deadline(), progress=progress)
        finally:
            progress.close()
    names = tuple(str(one.reference.with_digest(one.digest)) for one in delivered.resolved)
    if output == "table":
        for name in names:
            print(name)
        settings.note(f"mounted at {delivered.path}")
        return
    from unlade.cli.output import emit

    data = {
        "names": list(names),
        "path": delivered.path,
        "tree": str(delivered.tree) if delivered.tree else None,
        "bytes": delivered.size,
        "entries": delivered.entries,
        "cached": delivered.cached,
    }
    emit(data, output)


@click.command(short_help="Take a mount away.")
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--lazy", is_flag=True, help="Even when it is in use: it goes when its last user does.")
@store_options
@pass_settings
def unmount(settings: Settings, *, directory: str, lazy: bool) -> None:
    """Unmount what `unlade mount` mounted at DIR. Its content stays in the store until `unlade gc`.

    \b
    Examples:
      unlade unmount /mnt/model
    """
    from unlade.errors import MountError
    from unlade.mount import unmount as take_away

    path = os.path.abspath(directory)
    with settings.store() as store:
        if not any(record.mountpoint == os.fsencode(path) for record in store.mounts.all()):
            raise MountError(
                f"{directory} was not mounted from the store {store.path}",
                next_step="name the store with --store, or use umount for what others have mounted",
            )
        take_away(path, lazy=lazy)
        store.mounts.remove(os.fsencode(path))
    settings.note(f"unmounted {directory}")
