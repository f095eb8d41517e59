"""The root command: the table of commands, loaded by name when one is called, and the last line of defence.

`COMMANDS` holds each command's one-line help, so that `unlade --help` imports no command at all; a test
compares those lines with the commands' own. A command whose optional dependency is missing says which
extra to install.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Final, NoReturn

import click

from unlade.cli import exits
from unlade.cli.settings import Settings, root_options

# name → (module, attribute, section, one-line help)
COMMANDS: Final[dict[str, tuple[str, str, str, str]]] = {
    "pull": ("unlade.cli.pull", "pull", "Content", "Fetch references into the store or a directory."),
    "push": ("unlade.cli.push", "push", "Content", "Publish a directory or files."),
    "copy": ("unlade.cli.copy", "copy", "Content", "Copy between registries and OCI layouts."),
    "plan": ("unlade.cli.plan", "plan", "Content", "Show what a reference would become."),
    "inspect": ("unlade.cli.inspect", "inspect", "Content", "Show a reference's manifest and layers."),
    "mount": ("unlade.cli.mount", "mount", "Content", "Mount references read-only at a directory."),
    "unmount": ("unlade.cli.mount", "unmount", "Content", "Take a mount away."),
    "pkg": ("unlade.cli.pkg", "pkg", "Packages", "Configuration packages over OCI, compatible with kpt."),
    "login": ("unlade.cli.auth", "login", "Registries", "Store credentials for a registry."),
    "logout": ("unlade.cli.auth", "logout", "Registries", "Forget a registry's credentials."),
    "images": ("unlade.cli.images", "images", "Store", "List what the store holds."),
    "rmi": ("unlade.cli.images", "rmi", "Store", "Remove references from the store."),
    "gc": ("unlade.cli.upkeep", "gc", "Store", "Delete what nothing in the store refers to."),
    "fsck": ("unlade.cli.upkeep", "fsck", "Store", "Check every byte and record of the store."),
    "controller": ("unlade.cli.controller", "controller", "Kubernetes", "Run controllers in a cluster."),
    "node": ("unlade.cli.node", "node", "Kubernetes", "The image service of a Kubernetes node."),
    "top": ("unlade.cli.top", "top", "Kubernetes", "Show the pulls of this node, live."),
    "version": ("unlade.cli.version", "version", "Other", "Print the version."),
    "completion": ("unlade.cli.completion", "completion", "Other", "Print a shell completion script."),
}
# What to install when a command's import fails for want of an optional dependency.
EXTRAS: Final = {"controller": "kube", "node": "node"}
TERMINATED: Final = 128 + signal.SIGTERM


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Every command, in the order in which help shows them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        """Import one command; a missing dependency becomes a hint."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _, _ = COMMANDS[cmd_name]
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise _missing(cmd_name, error) from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The table by section, from COMMANDS alone."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, (_, _, section, text) in COMMANDS.items():
            sections.setdefault(section, []).append((name, text))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)


def _missing(command: str, error: ModuleNotFoundError) -> Exception:
    from unlade.errors import InvalidInput

    extra = EXTRAS.get(command)
    return InvalidInput(
        f"`unlade {command}` needs {error.name}, which is not installed",
        next_step=f"pip install 'unlade[{extra}]'" if extra else "install unlade again, whole",
    )


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Options above may stand before or after a command. Exit codes: see `unlade COMMAND --help` and "
    "docs/cli.md.",
)
@root_options
@click.version_option(package_name="unlade", message="unlade %(version)s")
def cli() -> None:
    """Any content in an OCI registry becomes a directory: verified, safe, shared, garbage-collected.

    \b
    Examples:
      unlade push ./site registry.example.com/team/site:v1
      unlade plan registry.example.com/team/site:v1
      unlade pull registry.example.com/team/site:v1 ./out
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The program: run one command, print an error as `error:` and `next:`, exit as documented."""
    settings = Settings()

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        # Raising unwinds the stack: staging directories and locks go before the process does.
        settings.cancel()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(TERMINATED)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        result = cli.main(args=arguments, prog_name="unlade", standalone_mode=False, obj=settings)
        sys.stdout.flush()
        code = result if isinstance(result, int) else 0
    except click.exceptions.Abort:
        print("error: interrupted", file=sys.stderr)
        code = exits.INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BrokenPipeError:
        # The reader went away (`unlade images | head`): nothing to say and nobody to say it to.
        sys.stdout = None  # the interpreter must not flush it again
        code = 128 + signal.SIGPIPE
    except Exception as error:
        code = exits.report(error, debug=settings.debug)
    sys.exit(code)
