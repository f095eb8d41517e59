"""`unlade login` and `unlade logout`: credentials where Docker keeps its own, so that all share them."""

from __future__ import annotations

import sys

import click

from unlade.cli.settings import Settings, pass_settings, quiet_options, registry_options


@click.command(short_help="Store credentials for a registry.")
@click.argument("host", metavar="HOST")
@click.option("-u", "--username", metavar="USER", help="Asked for when not given.")
@click.option("--password-stdin", is_flag=True, help="Read the password from stdin.")
@click.option(
    "--authfile", type=click.Path(), metavar="FILE", help="Where to store; default: Docker's config."
)
@registry_options
@pass_settings
def login(
    settings: Settings, *, host: str, username: str | None, password_stdin: bool, authfile: str | None
) -> None:
    """Check credentials with the registry at HOST and store them where Docker's are.

    A credential helper that Docker's configuration names is used. The password is never an argument: other
    users could read it. It is asked for, or read from stdin.

    \b
    Examples:
      unlade login registry.example.com
      echo "$TOKEN" | unlade login -u ci --password-stdin registry.example.com
    """
    from unlade.cli.connect import registry_config
    from unlade.registry import Credential, Registry, StaticCredentials, store_credential

    host = _host(host)
    if settings.creds is not None:
        raise click.UsageError("--creds is for one command; login wants --username and a password")
    if username is None:
        if password_stdin:
            raise click.UsageError("--password-stdin needs --username")
        username = click.prompt("Username", err=True)
    if password_stdin:
        password = sys.stdin.readline().rstrip("\r\n")
    else:
        password = click.prompt("Password", hide_input=True, err=True)
    if not password:
        raise click.UsageError("the password is empty")
    credential = Credential(username=username, password=password)
    config = registry_config(settings, frozenset({host}))
    with Registry(config, StaticCredentials({host: credential})) as registry:
        registry.check_login(host, credential, deadline=settings.deadline())
    where = store_credential(host, credential, path=authfile)
    print(f"logged in to {host}; stored in {where}")


@click.command(short_help="Forget a registry's credentials.")
@click.argument("host", metavar="HOST")
@click.option(
    "--authfile", type=click.Path(), metavar="FILE", help="Where they are; default: Docker's config."
)
@quiet_options
@pass_settings
def logout(settings: Settings, *, host: str, authfile: str | None) -> None:
    """Forget the credentials for HOST; succeeds when there are none.

    \b
    Examples:
      unlade logout registry.example.com
    """
    from unlade.registry import erase_credential

    del settings
    host = _host(host)
    known = erase_credential(host, path=authfile)
    print(f"logged out of {host}" if known else f"not logged in to {host}")


def _host(text: str) -> str:
    """A registry's host as references spell it; a scheme or path that people paste is refused with a hint."""
    from unlade.model import Reference

    bare = text.removeprefix("https://").removeprefix("http://").rstrip("/")
    return (
        Reference.parse(f"{bare}/x").registry if "/" not in bare and bare else Reference.parse(text).registry
    )
