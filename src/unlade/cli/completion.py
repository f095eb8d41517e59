"""`unlade completion SHELL`: what a shell evaluates to complete commands, options and references."""

from __future__ import annotations

import json
import os

import click
from click.shell_completion import CompletionItem, get_completion_class

from unlade.cli.settings import Settings, quiet_options


@click.command(short_help="Print a shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@quiet_options
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a completion script for SHELL.

    \b
    Examples:
      eval "$(unlade completion bash)"
      unlade completion zsh > ~/.zfunc/_unlade
      unlade completion fish > ~/.config/fish/completions/unlade.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"click cannot complete for {shell}")
    root = ctx.find_root().command
    print(kind(root, {}, "unlade", "_UNLADE_COMPLETE").source())


def stored_references(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """References in the store that start as typed; from index.json alone, as every key press asks."""
    settings = ctx.ensure_object(Settings)
    try:
        with open(os.path.join(settings.store_directory(), "index.json"), "rb") as file:
            entries = json.load(file).get("manifests", [])
    except (OSError, ValueError, AttributeError):
        return []
    names = {
        entry.get("annotations", {}).get("org.opencontainers.image.ref.name", "")
        for entry in entries
        if isinstance(entry, dict)
    }
    return [CompletionItem(name) for name in sorted(names) if name and name.startswith(incomplete)]
