"""`unlade pkg …`: kpt's package workflow over OCI registries and git.

Translates options to the packages room and outcomes to text. Progress and warnings go to stderr; stdout has
results only: a diff, a tree, `repository@digest`, or the decisions of an update as a table, JSON or YAML.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from unlade.cli import exits
from unlade.cli.settings import Settings, output_option, pass_settings, shared_options

if TYPE_CHECKING:
    from unlade.packages.decisions import Decision, OnConflict
    from unlade.packages.diffing import DiffType, FileDiff
    from unlade.packages.fetching import Got
    from unlade.packages.kptfile import Strategy
    from unlade.packages.location import Location
    from unlade.packages.publishing import Published
    from unlade.packages.sources import Sources
    from unlade.packages.update import Update

# Spelled out here so that `--help` imports no room; a test compares them with the rooms' own.
STRATEGIES = ("resource-merge", "fast-forward", "force-delete-replace", "copy-merge")
ON_CONFLICT = ("kpt", "upstream", "local", "fail", "markers")
DIFF_TYPES = ("local", "remote", "combined", "3way")
# A file that shows fewer decisions than this needs no pager and no search.
_SHOWN_WARNINGS = 20


@click.group(short_help="Configuration packages over OCI, compatible with kpt.")
def pkg() -> None:
    """Configuration packages over OCI registries and git, compatible with kpt.

    A package is a directory with a Kptfile. Locations: oci://HOST/REPO[//SUB][:TAG|@sha256:…], or
    REPO.git[/SUB][@REF] for git.

    \b
    Examples:
      unlade pkg push blueprint@v1 --origin oci://registry.example.com/team/blueprint
      unlade pkg get oci://registry.example.com/team/blueprint:v1 my-app
      unlade pkg update my-app@v2 --dry-run
    """


@contextmanager
def _sources(settings: Settings, hosts: Iterable[str]) -> Iterator[Sources]:
    from unlade.errors import StoreError
    from unlade.packages.sources import Sources

    progress = settings.progress()
    try:
        store = settings.store()
    except (StoreError, OSError) as error:
        settings.note(f"warning: no local copy of merge bases is kept: {error}")
        store = None
    with settings.registry(hosts=hosts) as registry:
        try:
            with Sources(registry, store, deadline=settings.deadline(), progress=progress) as sources:
                yield sources
        finally:
            progress.close()


def _hosts(*locations: Location) -> list[str]:
    from unlade.packages.kptfile import OciUpstream

    return [location.reference.registry for location in locations if isinstance(location, OciUpstream)]


def _package_hosts(path: str) -> list[str]:
    """The registries that the Kptfiles below a directory name."""
    from unlade.packages.kptfile import OciUpstream
    from unlade.packages.registries import upstreams_below

    return [found.reference.registry for found in upstreams_below(path) if isinstance(found, OciUpstream)]


def _warn_links(settings: Settings, links: Iterable[str]) -> None:
    for link in links:
        settings.note(f"warning: the symbolic link {link} was left out")


def _got(settings: Settings, got: Got, output: str) -> None:
    from unlade.cli.output import emit

    _warn_links(settings, got.links)
    settings.note(f"Fetched {got.packages} package(s), {got.files} files.")
    if output == "table":
        print(got.path)
        return
    data = {
        "path": got.path,
        "packages": got.packages,
        "files": got.files,
        "upstream": str(got.upstream),
        "lock": _lock(got.lock),
        "linksLeftOut": list(got.links),
    }
    emit(data, output)


def _lock(lock: Any) -> str:
    commit = getattr(lock, "commit", "")
    return f"{lock.repo}@{commit}" if commit else str(lock)


@pkg.command(short_help="Fetch a package as a new one downstream of it.")
@click.argument("location", metavar="LOCATION")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path())
@click.option("--strategy", type=click.Choice(STRATEGIES), default="resource-merge", show_default=True)
@click.option(
    "--kpt-compat/--no-kpt-compat",
    "compat",
    default=None,
    help="Keep oci facts in annotations, so that kpt reads the Kptfile [.unlade.toml: packages.kpt-compat].",
)
@output_option()
@shared_options
@pass_settings
def get(
    settings: Settings,
    *,
    location: str,
    directory: str | None,
    strategy: Strategy,
    compat: bool | None,
    output: str,
) -> None:
    """Fetch LOCATION into DIR and record it as the upstream.

    DIR defaults to the last part of LOCATION; inside an existing DIR a directory of that name is made. The
    Kptfile gets upstream and lock, every resource its identity mark.

    \b
    Examples:
      unlade pkg get oci://registry.example.com/team/blueprint:v1 my-app
      unlade pkg get oci://registry.example.com/team/blueprint//bucket:v1 my-app/bucket
      unlade pkg get https://git.example.com/blueprints.git/gke@main
    """
    from unlade.packages.fetching import get as fetch
    from unlade.packages.location import parse_remote
    from unlade.packages.project import kpt_compat

    parsed = parse_remote(location)
    chosen = kpt_compat(directory or ".") if compat is None else compat
    with _sources(settings, _hosts(parsed)) as sources:
        got = fetch(parsed, directory, sources, strategy=strategy, compat=chosen)
    _got(settings, got, output)


@pkg.command(short_help="Fetch a package as it is, to edit and push back.")
@click.argument("location", metavar="LOCATION")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path())
@output_option()
@shared_options
@pass_settings
def pull(settings: Settings, *, location: str, directory: str | None, output: str) -> None:
    """Fetch LOCATION into DIR unchanged, and remember it as the origin for `pkg push`."""
    from unlade.packages.fetching import pull as fetch
    from unlade.packages.location import parse_remote

    parsed = parse_remote(location)
    with _sources(settings, _hosts(parsed)) as sources:
        got = fetch(parsed, directory, sources)
    _got(settings, got, output)


def _published(settings: Settings, done: Published, output: str, *, dry_run: bool) -> None:
    from unlade.cli.output import emit

    if output == "table":
        print(done.name)
    else:
        emit(
            {
                "name": done.name,
                "tagged": done.tagged,
                "bytesSent": done.bytes_sent,
                "unchanged": done.unchanged,
                "dryRun": dry_run,
            },
            output,
        )
    if dry_run:
        settings.note("nothing was sent")
    elif done.unchanged:
        settings.note(f"{done.tagged} already has this content")


@pkg.command(short_help="Publish a package as an image.")
@click.argument("package", metavar="[DIR][@VERSION]", default=".")
@click.option(
    "--origin", "--image", "origin", default="", metavar="oci://HOST/REPO[:TAG]", help="Where to push."
)
@click.option("--increment", "bump", is_flag=True, help="Add one to the version's last number first.")
@click.option("--force", is_flag=True, help="Move a tag that exists with other content.")
@click.option("--dry-run", is_flag=True, help="Print the digest, send nothing.")
@output_option()
@shared_options
@pass_settings
def push(
    settings: Settings, *, package: str, origin: str, bump: bool, force: bool, dry_run: bool, output: str
) -> None:
    """Publish the package in DIR and print `repository@digest`.

    Without --origin it goes where it was pulled from or pushed to last; without VERSION, to that tag. Equal
    content gives an equal digest on every machine.

    \b
    Examples:
      unlade pkg push blueprint@v1 --origin oci://registry.example.com/team/blueprint
      unlade pkg push blueprint --increment
    """
    from unlade.packages.location import parse_oci, split_version
    from unlade.packages.publishing import push as publish
    from unlade.packages.registries import origin_of

    directory, version = split_version(package)
    named = origin or origin_of(directory)
    hosts = _hosts(parse_oci(named)) if named else []
    with _sources(settings, hosts) as sources:
        done = publish(
            directory, sources, version=version, origin=origin, bump=bump, force=force, dry_run=dry_run
        )
    _published(settings, done, output, dry_run=dry_run)


@pkg.command(short_help="Copy a package between registries and directories.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DEST")
@click.option("--force", is_flag=True, help="Move a tag that exists with other content.")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, copy nothing.")
@output_option()
@shared_options
@pass_settings
def copy(settings: Settings, *, source: str, target: str, force: bool, dry_run: bool, output: str) -> None:
    """Put an unchanged copy of SRC at DEST. SRC is a directory, an image or a git location; DEST a directory
    or an image. Between registries nothing is unpacked.

    \b
    Examples:
      unlade pkg copy oci://dev.example.com/pkg/app:v25 oci://prod.example.com/pkg/app:v25
      unlade pkg copy https://git.example.com/blueprints.git/gke@main oci://registry.example.com/pkg/gke:v1
    """
    from unlade.packages.location import parse_location
    from unlade.packages.publishing import copy as copy_package

    parsed = parse_location(source), parse_location(target)
    with _sources(settings, _hosts(*parsed)) as sources:
        done = copy_package(*parsed, sources, force=force, dry_run=dry_run)
    _published(settings, done, output, dry_run=dry_run)


@pkg.command(short_help="Merge upstream's changes into a package.")
@click.argument("package", metavar="[DIR][@VERSION]", default=".")
@click.option("--strategy", type=click.Choice(STRATEGIES), help="Default: the one in the Kptfile.")
@click.option(
    "--on-conflict",
    "policy",
    type=click.Choice(ON_CONFLICT),
    default="kpt",
    show_default=True,
    help="What to do where both sides changed: kpt's outcome with a warning, one side, stop, or markers.",
)
@click.option("--dry-run", is_flag=True, help="Show every decision, change nothing.")
@output_option()
@shared_options
@pass_settings
def update(
    settings: Settings,
    *,
    package: str,
    strategy: Strategy | None,
    policy: OnConflict,
    dry_run: bool,
    output: str,
) -> int:
    """Update the package in DIR to VERSION: a tag, a digest (@sha256:…), a branch or a commit.

    Without VERSION the same tag or branch is looked at again. The update is written in one step or not at
    all. With -o json or yaml every decision is listed: which side each field came from, and each conflict
    with both values.

    \b
    Exit codes: 0 updated; 1 conflict markers were written; 11 --on-conflict fail and there was one.
    """
    from unlade.cli.output import emit
    from unlade.packages.location import split_version
    from unlade.packages.update import Conflicts
    from unlade.packages.update import update as update_package

    directory, version = split_version(package)
    # Absolute before the directory is replaced: afterwards "." would be the old one.
    directory = os.path.abspath(directory)
    inside = os.path.commonpath([directory, os.getcwd()]) == directory
    with _sources(settings, _package_hosts(directory)) as sources:
        try:
            outcome = update_package(
                directory, sources, version=version, strategy=strategy, policy=policy, dry_run=dry_run
            )
        except Conflicts as error:
            if output != "table":
                rows = [_row(decision) for decision in error.decisions]
                emit({"conflicts": len(rows), "decisions": rows, "dryRun": dry_run}, output)
            raise
    _warn_links(settings, outcome.links)
    _updated(settings, outcome, output, dry_run=dry_run)
    if inside and not dry_run and len(outcome.changed) > 1:
        settings.note("note: this directory was replaced; run `cd .` to enter the new one")
    return exits.FOUND if policy == "markers" and outcome.conflicts and not dry_run else 0


def _row(decision: Decision) -> dict[str, Any]:
    return {
        "where": decision.where,
        "path": decision.path,
        "taken": decision.taken,
        "conflict": decision.conflict,
        "reason": decision.reason,
        "base": decision.base,
        "local": decision.local,
        "upstream": decision.upstream,
    }


def _updated(settings: Settings, outcome: Update, output: str, *, dry_run: bool) -> None:
    from unlade.cli.output import emit, print_table

    if output != "table":
        data = {
            "packages": [
                {
                    "directory": package.directory or ".",
                    "strategy": package.strategy,
                    "upstream": str(package.upstream),
                    "from": _lock(package.old_lock) if package.old_lock else None,
                    "to": _lock(package.new_lock),
                }
                for package in outcome.packages
            ],
            "changedFiles": outcome.changed,
            "conflicts": len(outcome.conflicts),
            "decisions": [_row(decision) for decision in outcome.decisions],
            "dryRun": dry_run,
        }
        emit(data, output)
    elif dry_run:
        rows = [
            (
                "conflict" if decision.conflict else "",
                decision.taken,
                decision.where,
                decision.path,
                _values(decision),
            )
            for decision in outcome.decisions
        ]
        print_table(("", "TAKEN", "WHERE", "FIELD", "BASE | LOCAL | UPSTREAM"), rows)
    if output == "table" and not dry_run:
        for decision in outcome.conflicts[:_SHOWN_WARNINGS]:
            settings.note(f"warning: conflict: {decision}")
        left = len(outcome.conflicts) - _SHOWN_WARNINGS
        if left > 0:
            settings.note(f"warning: {left} more conflicts; -o json lists all of them")
    verb = "Would update" if dry_run else "Updated"
    settings.note(f"{verb} {len(outcome.packages)} package(s), {len(outcome.changed)} files.")


def _values(decision: Decision) -> str:
    values = (decision.base, decision.local, decision.upstream)
    if values == (None, None, None):
        return decision.reason
    return " | ".join("-" if value is None else _cut(value) for value in values)


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"


@pkg.command(short_help="Show how a package and its upstream differ.")
@click.argument("package", metavar="[DIR][@VERSION]", default=".")
@click.option(
    "--diff-type",
    "kind",
    type=click.Choice(DIFF_TYPES),
    help="local: lock to local; remote: lock to VERSION; combined: VERSION to local (default with VERSION); "
    "3way: lock to local, then lock to VERSION.",
)
@click.option("--exit-code", is_flag=True, help="Exit 1 when there are differences.")
@click.option("--color", type=click.Choice(("auto", "always", "never")), default="auto", show_default=True)
@output_option("text", "json", "yaml", default="text")
@shared_options
@pass_settings
def diff(
    settings: Settings, *, package: str, kind: DiffType | None, exit_code: bool, color: str, output: str
) -> int:
    """Show differences as a unified diff; in colour and through a pager on a terminal.

    The base is what the Kptfile's lock says, so a tag that has moved shows no differences of its own.

    \b
    Exit codes: 0; with --exit-code 1 when there are differences, as in git diff.
    """
    from unlade.cli.output import emit
    from unlade.packages.diffing import compare, sides
    from unlade.packages.location import split_version

    directory, version = split_version(package)
    kind = kind or ("combined" if version else "local")
    with _sources(settings, _package_hosts(directory)) as sources:
        found = sides(directory, sources, version=version, kind=kind)
    pairs = [(found[0], other) for other in found[1:]]
    diffs = [change for old, new in pairs for change in compare(old, new)]
    if output != "text":
        emit(
            [
                {"path": d.path, "old": d.old_name, "new": d.new_name, "diff": "\n".join(d.lines())}
                for d in diffs
            ],
            output,
        )
    else:
        _show(diffs, color)
    return exits.FOUND if exit_code and diffs else 0


def _show(diffs: list[FileDiff], color: str) -> None:
    from unlade.cli.output import printable

    terminal = sys.stdout.isatty()
    painted = color == "always" or (color == "auto" and terminal and not os.environ.get("NO_COLOR"))
    lines = (_paint(printable(line), painted) for change in diffs for line in change.lines())
    if terminal:
        click.echo_via_pager((line + "\n" for line in lines), color=painted)
        return
    for line in lines:
        print(line)


def _paint(line: str, painted: bool) -> str:
    if not painted:
        return line
    if line.startswith(("+++", "---")):
        return f"\x1b[1m{line}\x1b[0m"
    code = {"+": "32", "-": "31", "@": "36"}.get(line[:1])
    return f"\x1b[{code}m{line}\x1b[0m" if code else line


@pkg.command(short_help="Show the packages and resources below a directory.")
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path())
def tree(directory: str) -> None:
    """Draw DIR's packages, files and resources as a tree."""
    from unlade.cli.output import printable
    from unlade.packages.listing import tree as draw

    for line in draw(directory).lines():
        print(printable(line))


@pkg.command(short_help="Begin a package in a directory.")
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path())
@click.option("--description", default="", help="One sentence about the package.")
@click.option("--keywords", default="", metavar="A,B", help="Words to find it by.")
@click.option("--site", default="", metavar="URL", help="Its page.")
@pass_settings
def init(settings: Settings, *, directory: str, description: str, keywords: str, site: str) -> None:
    """Write a Kptfile, README.md and package-context.yaml into DIR; existing files are kept."""
    from unlade.packages.listing import init as begin

    words = tuple(word.strip() for word in keywords.split(",") if word.strip())
    for path in begin(directory, description=description, keywords=words, site=site):
        settings.note(f"writing {path}")
