"""Options that mean the same everywhere, and the objects they turn into.

Each may stand before or after the command's name: both places write into the one `Settings` of the run. The
registry client and the store are made on demand, so that a command which needs neither imports neither.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from unlade.cli.progress import Watcher
    from unlade.cri.node import Node
    from unlade.model import Deadline, Reference
    from unlade.registry import Registry
    from unlade.store import DirStore

PLAIN_HTTP_ENV: Final = "UNLADE_PLAIN_HTTP"
REALMS_ENV: Final = "UNLADE_TOKEN_REALMS"
STORE_ENV: Final = "UNLADE_STORE"
CONTAINERD_ENV: Final = "UNLADE_CONTAINERD"
CONTAINERD_STATE_ENV: Final = "UNLADE_CONTAINERD_STATE"
# `--store containerd`: what the node's containerd holds, instead of a directory.
CONTAINERD: Final = "containerd"
CONTAINERD_SOCKET: Final = "/run/containerd/containerd.sock"
CONTAINERD_STATE: Final = "/run/unlade"
SYSTEM_STORE: Final = "/var/lib/unlade"
# Commands of containerd's users find their certificates and mirrors without another option.
CERTS_DIRS: Final = ("/etc/unlade/certs.d", "/etc/containerd/certs.d", "/etc/docker/certs.d")

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass
class Settings:
    """What the shared options said; None and False where nothing was said."""

    store_path: str | None = None
    containerd: str | None = None
    containerd_state: str | None = None
    plain_http: bool = False
    insecure_skip_tls_verify: bool = False
    ca_file: str | None = None
    certs_dir: str | None = None
    creds: str | None = None
    timeout: float | None = None
    quiet: bool = False
    debug: bool = False
    _deadline: Deadline | None = None

    def deadline(self) -> Deadline:
        """The moment by which the whole command must end; one for the command, cancelled by a signal."""
        from unlade.model import Deadline

        if self._deadline is None:
            self._deadline = Deadline.never() if self.timeout is None else Deadline.after(self.timeout)
        return self._deadline

    def cancel(self) -> None:
        """End what runs on other threads at its next step; they cannot be interrupted otherwise."""
        if self._deadline is not None:
            self._deadline.cancel()

    def store(self) -> DirStore:
        """The store: --store, else UNLADE_STORE, else the user's own; made where it is missing."""
        from unlade.errors import InvalidInput
        from unlade.store import DirStore

        directory = self.store_directory()
        if directory == CONTAINERD:
            raise InvalidInput(
                "this command works in a directory of its own, not in containerd",
                next_step="name a directory with --store",
            )
        return DirStore(directory)

    def containerd_socket(self, *, asked: bool = False) -> str | None:
        """Where containerd listens when it is the store that is meant; None for a directory.

        `asked`: only when an option of this command says so, whatever the environment does.
        """
        if self.containerd:
            return self.containerd
        named = os.environ.get(CONTAINERD_ENV)
        if self.store_path or asked:
            return (named or CONTAINERD_SOCKET) if self.store_path == CONTAINERD else None
        return named or (CONTAINERD_SOCKET if os.environ.get(STORE_ENV) == CONTAINERD else None)

    def node(self, socket: str, registry: Registry | None = None) -> Node:
        """What a node's containerd holds; a registry client for pulls."""
        from pathlib import Path

        from unlade.errors import InvalidInput

        try:
            from unlade.cri.node import Node
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in {"grpc", "google"}:
                raise
            raise InvalidInput(
                f"containerd needs {error.name}, which is not installed",
                next_step="pip install 'unlade[node]'",
            ) from error
        state = self.containerd_state or os.environ.get(CONTAINERD_STATE_ENV) or CONTAINERD_STATE
        return Node(socket, state=Path(state), registry=registry)

    def store_directory(self) -> str:
        """Where the store is, whether it exists or not."""
        named = self.store_path or os.environ.get(STORE_ENV)
        if named:
            return named
        if os.geteuid() == 0:
            return SYSTEM_STORE
        data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
        return os.path.join(data, "unlade")

    def registry(self, references: Iterable[Reference] = (), *, hosts: Iterable[str] = ()) -> Registry:
        """A client for these references; --plain-http and the like apply to their registries only."""
        from unlade.cli.connect import connect

        named = frozenset(hosts) | {reference.registry for reference in references}
        return connect(self, named)

    def progress(self) -> Watcher:
        """How to show progress: bars on a terminal, lines elsewhere, nothing with --quiet."""
        from unlade.cli.progress import make_progress

        return make_progress(quiet=self.quiet)

    def note(self, text: str) -> None:
        """Say something on stderr, unless --quiet."""
        if not self.quiet:
            print(text, file=sys.stderr)

    def plain_hosts(self, named: frozenset[str]) -> frozenset[str]:
        """Registries without TLS: UNLADE_PLAIN_HTTP's, and with --plain-http those this command names."""
        hosts = listed_hosts(PLAIN_HTTP_ENV)
        return hosts | named if self.plain_http else hosts


def listed_hosts(variable: str) -> frozenset[str]:
    """Hosts that a variable of the environment lists, separated by commas."""
    return frozenset(host.strip() for host in os.environ.get(variable, "").split(",") if host.strip())


def pass_settings(function: Command) -> Command:
    """Give a command the run's Settings as its first argument (it exists even without the root command)."""
    return click.make_pass_decorator(Settings, ensure=True)(function)  # type: ignore[return-value]


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    # Only what was said: an option absent after the command must not undo the same one before it.
    source = ctx.get_parameter_source(param.name or "")
    if source not in (None, click.core.ParameterSource.DEFAULT) and value is not None:
        setattr(ctx.ensure_object(Settings), param.name or "", value)


_OPTIONS: Final = (
    click.option(
        "--store",
        "store_path",
        metavar="DIR",
        type=click.Path(),
        help=f"The store [{STORE_ENV}; else the user's data directory, {SYSTEM_STORE} for root].",
    ),
    click.option(
        "--containerd",
        metavar="SOCKET",
        type=click.Path(),
        help=f"Work on what this containerd holds [{CONTAINERD_ENV}; --store {CONTAINERD}].",
    ),
    click.option(
        "--containerd-state",
        metavar="DIR",
        type=click.Path(),
        help=f"Locks shared with the node's service [{CONTAINERD_STATE_ENV}; {CONTAINERD_STATE}].",
    ),
    click.option(
        "--plain-http",
        is_flag=True,
        help=f"The registries named here have no TLS (also {PLAIN_HTTP_ENV}=host:port,…).",
    ),
    click.option("--insecure-skip-tls-verify", is_flag=True, help="Accept any certificate. Only for a test."),
    click.option(
        "--ca-file", type=click.Path(), metavar="FILE", help="Certificates to trust beside the system's."
    ),
    click.option(
        "--certs-dir",
        type=click.Path(),
        metavar="DIR",
        help="Certificates and mirrors (hosts.toml) by host, as containerd reads them.",
    ),
    click.option("--creds", metavar="USER:PASSWORD", help="Credentials for this command only."),
    click.option(
        "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Give up then."
    ),
    click.option("-q", "--quiet", is_flag=True, help="No progress and no notes on stderr."),
    click.option("--debug", is_flag=True, help="Show the traceback of an error."),
)


def shared_options(function: Command) -> Command:
    """Accept the options that mean the same everywhere; their values go to Settings."""
    return _declare(function, shown=frozenset({"store_path", "plain_http", "creds"}))


def registry_options(function: Command) -> Command:
    """The same for a command without a store: help shows what concerns registries."""
    return _declare(function, shown=frozenset({"plain_http", "creds"}))


def store_options(function: Command) -> Command:
    """The same for a command without a registry."""
    return _declare(function, shown=frozenset({"store_path", "containerd"}))


def quiet_options(function: Command) -> Command:
    """The same for a command that needs neither; accepted everywhere, so that wrappers need not choose."""
    return _declare(function, shown=frozenset())


def root_options(function: Command) -> Command:
    """The same for the root command, whose help shows all of them, once."""
    return _declare(function, shown=frozenset(Settings.__dataclass_fields__))


def accepting(function: Command, options: Sequence[Callable[[Any], Any]]) -> Command:
    """The function with these options declared, in the order in which help shows them."""
    decorated: Any = function
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def _declare(function: Command, *, shown: frozenset[str]) -> Command:
    decorated: Any = accepting(function, _OPTIONS)
    # Click keeps declared options here until the command is made of them.
    params: list[click.Option] = decorated.__click_params__
    for param in params:
        if param.name in Settings.__dataclass_fields__:
            param.expose_value = False
            param.callback = _remember
            param.hidden = param.name not in shown
    return decorated  # type: ignore[no-any-return]


def output_option(*formats: str, default: str = "table") -> Callable[[Command], Command]:
    """`-o`: always the format of what goes to stdout."""
    choices = formats or ("table", "json", "yaml")
    return click.option(
        "-o",
        "--output",
        "output",
        type=click.Choice(choices),
        default=default,
        show_default=True,
        help="Format of the result.",
    )
