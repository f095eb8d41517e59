"""The store's commands where the store is a node's containerd: the same words, another backend (R4, R7).

`images`, `rmi`, `gc`, `inspect` and `pull` come here when --containerd, UNLADE_CONTAINERD or `--store
containerd` says so; the work is in `unlade.cri.node`. A line is one image for one runtime handler (and one
set of a pod's options): what the kubelet lists once by ID stands here once for each handler that it was
pulled for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from unlade.cli.output import count, emit, human
from unlade.cli.settings import Settings

if TYPE_CHECKING:
    from unlade.containerd.inventory import Inventory
    from unlade.cri.node import Shown

_COLUMNS = ("REFERENCE", "HANDLER", "PLATFORM", "DIGEST", "OWN", "SHARED", "KEPT AS", "MOUNTS")


def show(settings: Settings, socket: str, names: tuple[str, ...], handler: str | None, output: str) -> None:
    """`unlade images`."""
    with settings.node(socket) as node:
        if handler is not None:
            handler = node.handlers.resolve(handler).name
        found, inventory = node.list()
        if names:
            chosen = {id(one.holding) for name in names for one in found if one.is_called(name)}
            found = [one for one in found if id(one.holding) in chosen]
        found = [one for one in found if handler is None or one.holding.handler == handler]
    found = sorted(found, key=lambda one: (one.references, one.holding.handler, one.holding.options))
    rows = [_row(one) for one in found]
    data = {"images": [_data(one, inventory) for one in found], "totalBytes": inventory.total}
    emit(data, output, _COLUMNS, rows)
    settings.note(f"{count(len(found), 'record', 'records')}, {human(inventory.total)} in {socket}")


def remove(
    settings: Settings, socket: str, names: tuple[str, ...], handler: str | None, *, dry_run: bool
) -> None:
    """`unlade rmi`."""
    freed = 0
    with settings.node(socket) as node:
        chosen = {one.holding.id: one for name in names for one in node.select(name, handler)}
        gone = [(one, handler) for one in chosen.values()]
        _, before = node.list()
        for one, only in gone:
            if not dry_run:
                node.remove(one, only)
            shown = ", ".join(one.references) or one.holding.id
            print(shown + (f" ({only})" if only else ""))
        if not dry_run:
            freed = before.total - node.list()[1].total
    settings.note("nothing was removed" if dry_run else f"freed {human(max(0, freed))}")


def tidy(settings: Settings, socket: str, output: str, *, dry_run: bool) -> None:
    """`unlade gc`."""
    with settings.node(socket) as node:
        found = node.collect(dry_run=dry_run)
    removed = [*found.leases, *found.images, *found.names]
    data = {
        "leases": len(found.leases),
        "images": len(found.images),
        "names": len(found.names),
        "removed": removed,
        "dryRun": dry_run,
    }
    if removed or output != "table":
        emit(data, output, ("REMOVED",), [(name,) for name in removed])
    verb = "would end" if dry_run else "ended"
    settings.note(
        f"{verb} {count(len(found.leases), 'lease', 'leases')} of dead processes, "
        f"{count(len(found.images) + len(found.names), 'record', 'records')} that were not whole"
    )


def explain(settings: Settings, socket: str, name: str, handler: str | None, output: str) -> None:
    """`unlade inspect`."""
    with settings.node(socket) as node:
        found = node.select(name, handler)
        _, inventory = node.list()
    rows: list[tuple[str, ...]] = []
    data: list[dict[str, Any]] = []
    for one in found:
        facts = _data(one, inventory)
        facts["components"] = [
            {"kind": part.kind, "digest": part.digest, "size": part.size} for part in one.holding.components
        ]
        data.append(facts)
        what = f"{one.holding.handler or '-'} {facts['platform'] or ''}".strip()
        rows.append(("image", one.holding.family, human(facts["bytes"]), one.holding.id, what))
        rows += [("name", "", "", "", name) for name in one.references]
        rows += [(part.kind, "", human(part.size), part.digest, "") for part in one.holding.components]
    emit({"images": data}, output, ("KIND", "FAMILY", "SIZE", "DIGEST", "NAME"), rows)


def fetch(
    settings: Settings,
    socket: str,
    name: str,
    jobs: int,
    output: str,
    *,
    platform: str | None,
    handler: str,
    unpack: Any,
    only: tuple[str, ...],
    as_file: tuple[str, ...],
    referrer: str,
    referrer_from: str | None,
    artifact_type: str,
    annotations: tuple[str, ...],
) -> None:
    """`unlade pull REF`."""
    from unlade.cli.connect import credentials
    from unlade.cli.request import key_value, parse_references
    from unlade.model import Platform

    [reference] = parse_references([name])
    with settings.registry([reference]) as registry, settings.node(socket, registry) as node:
        from unlade.containerd import PullOptions

        options = PullOptions(
            unpack=unpack,
            only=only,
            as_file=as_file,
            artifact_type=artifact_type,
            annotations=dict(key_value(text) for text in annotations),
            referrer=referrer,
            referrer_from=parse_references([referrer_from])[0].name if referrer_from else "",
        )
        progress = settings.progress()
        try:
            made = node.pull(
                reference,
                handler=handler,
                platform=Platform.parse(platform) if platform else None,
                options=options,
                credentials=credentials(settings, frozenset({reference.registry})),
                deadline=settings.deadline(),
                progress=progress,
                jobs=jobs,
            )
        finally:
            progress.close()
    pinned = str(reference.with_digest(made.manifest))
    if output == "table":
        print(pinned)
        settings.note(f"{'already there' if made.cached else made.family} for {made.handler} in {socket}")
        return
    data = {
        "reference": str(reference),
        "name": pinned,
        "id": made.id,
        "digest": str(made.manifest),
        "index": made.index or None,
        "platform": made.platform or None,
        "handler": made.handler,
        "family": made.family,
        "cached": made.cached,
    }
    emit({"references": [data], "path": socket}, output)


def _data(one: Shown, inventory: Inventory) -> dict[str, Any]:
    holding = one.holding
    newest = max(holding.tuples, key=lambda known: known.at, default=None)
    return {
        "reference": next(iter(one.references), None),
        "references": list(one.references),
        "handler": holding.handler,
        "options": holding.options or None,
        "id": holding.id,
        "digest": newest.manifest if newest else None,
        "index": (newest.index or None) if newest else None,
        "platform": (newest.platform or None) if newest else None,
        "family": holding.family,
        "tree": holding.tree or None,
        "snapshotters": list(holding.snapshotters),
        "bytes": inventory.sizes[holding.id],
        "ownBytes": holding.unique,
        "sharedBytes": holding.shared,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(holding.created)),
    }


def _row(one: Shown) -> tuple[str, ...]:
    holding = one.holding
    newest = max(holding.tuples, key=lambda known: known.at, default=None)
    tags = [name for name in one.references if "@" not in name] or list(one.references[:1])
    digest = newest.manifest if newest and newest.manifest else holding.id
    return (
        ",".join(tags) or holding.id,
        (holding.handler or "-") + (f" [{holding.options}]" if holding.options else ""),
        (newest.platform if newest else "") or "-",
        digest.partition(":")[2][:12],
        human(holding.unique),
        human(holding.shared),
        "+".join(holding.snapshotters) or "-",
        "-",
    )
