"""`unlade version`: the version, and with `-o json` what a bug report should name."""

from __future__ import annotations

import platform
import sys

import click

from unlade.cli.settings import output_option, quiet_options


@click.command(short_help="Print the version.")
@output_option()
@quiet_options
def version(output: str) -> None:
    """Print the version.

    \b
    Examples:
      unlade version
      unlade version -o json
    """
    from importlib.metadata import version as installed

    number = installed("unlade")
    if output == "table":
        print(f"unlade {number}")
        return
    from unlade.cli.output import emit

    data = {
        "version": number,
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "system": platform.platform(),
        "executable": sys.executable,
    }
    emit(data, output)
