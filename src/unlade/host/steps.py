"""Steps that change a host: each says what it does, does it, and can take it back.

A plan is a list of steps that are needed; a dry run prints it. `carry_out` does them in order, and when one
fails takes the earlier ones back, so that a failed install or upgrade leaves the node as it was: files first,
then systemd is told, then what ran before runs again. Files and links are replaced by rename, so nobody
reads half of one. With a root directory other than `/` (image builds) no program of the host is called.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

from unlade.errors import UnladeError
from unlade.host.bundle import Bundle
from unlade.host.errors import HostError
from unlade.host.units import UNIT
from unlade.kernel import failpoints

# A start of ours waits for containerd for up to a minute; a kubelet ends within its own 90 s.
_SYSTEMCTL_SECONDS: Final = 240.0


@dataclass(frozen=True)
class Host:
    """A host's root directory, and systemd if it runs there."""

    root: Path = Path("/")

    @property
    def live(self) -> bool:
        """Whether this is the running host, not the tree of an image."""
        return self.root == Path("/")

    def at(self, path: str | PurePosixPath) -> Path:
        """A path of the host, below the root directory."""
        return self.root / str(path).lstrip("/")

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Call systemctl; its output. Raises HostError when it fails."""
        command = f"systemctl {' '.join(arguments)}"
        try:
            done = subprocess.run(
                ["systemctl", *arguments],
                capture_output=True,
                text=True,
                timeout=_SYSTEMCTL_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HostError(
                f"{command}: {error}", next_step="the node needs systemd; for an image's tree use --root"
            ) from error
        if check and done.returncode:
            raise HostError(
                f"{command} failed: {done.stderr.strip() or done.stdout.strip() or done.returncode}",
                next_step=f"see `journalctl -u {arguments[-1]}`",
            )
        return done.stdout.strip()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other install or uninstall of this host runs meanwhile; raises HostError when one does."""
        # A lock of the root directory itself leaves nothing behind.
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise HostError(
                f"another install or uninstall of {self.root} is under way", next_step="wait for it to end"
            ) from error
        finally:
            os.close(fd)

    def active(self, unit: str) -> bool:
        """Whether a unit runs."""
        return self.live and self.systemctl("is-active", unit, check=False) == "active"


class Step(Protocol):
    """One change; `do` may fail half-way, `undo` works then too."""

    def describe(self) -> str:
        """What it does, as a line of a dry run."""
        ...

    def do(self, host: Host) -> None:
        """Do it."""
        ...

    def undo(self, host: Host) -> None:
        """Take it back."""
        ...


@dataclass
class AddBundle:
    """Copy this installation into a directory of its own."""

    bundle: Bundle
    directory: str

    def describe(self) -> str:
        return f"copy this installation to {self.directory}"

    def do(self, host: Host) -> None:
        target = host.at(self.directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.bundle.write(target)

    def undo(self, host: Host) -> None:
        shutil.rmtree(host.at(self.directory), ignore_errors=True)


@dataclass
class TryBundle:
    """See that a bundle starts at all, before anything depends on it."""

    directory: str

    def describe(self) -> str:
        return f"try {self.directory}/bin/unlade"

    def do(self, host: Host) -> None:
        program = host.at(f"{self.directory}/bin/unlade")
        try:
            done = subprocess.run(
                [str(program), "node", "serve", "--help"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                env={},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HostError(
                f"{program} does not start: {error}", next_step="name the node's Python with --python"
            ) from error
        if done.returncode:
            raise HostError(
                f"{program} does not start: {done.stderr.strip()}",
                next_step="name the node's Python with --python",
            )

    def undo(self, host: Host) -> None:
        """It changed nothing."""


@dataclass
class Write:
    """Write a file, or make a link (`link`), in place of what is there; None removes it."""

    path: str
    content: str | None
    link: bool = False
    mode: int = 0o644
    _before: tuple[str, bool, int] | None = field(default=None, init=False)
    _begun: bool = field(default=False, init=False)
    _made: list[Path] = field(default_factory=list, init=False)

    def describe(self) -> str:
        if self.content is None:
            return f"remove {self.path}"
        return f"link {self.path} to {self.content}" if self.link else f"write {self.path}"

    def needed(self, host: Host) -> bool:
        """Whether it would change something."""
        found = _look(host.at(self.path))
        return (found[:2] if found else None) != (
            (self.content, self.link) if self.content is not None else None
        )

    def do(self, host: Host) -> None:
        path = host.at(self.path)
        self._before, self._begun = _look(path), True
        missing = path.parent
        while not missing.exists():
            self._made.append(missing)
            missing = missing.parent
        _put(path, self.content, link=self.link, mode=self.mode)

    def undo(self, host: Host) -> None:
        if not self._begun:
            return
        content, link, mode = self._before or (None, False, 0)
        _put(host.at(self.path), content, link=link, mode=mode)
        for directory in self._made:
            with suppress(OSError):  # somebody else put something into it
                directory.rmdir()


@dataclass
class Remove:
    """Remove a file, or a directory with all below it: the last steps, which are not taken back."""

    path: str

    def describe(self) -> str:
        return f"remove {self.path}"

    def do(self, host: Host) -> None:
        path = host.at(self.path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def undo(self, host: Host) -> None:
        """What is gone is gone; it was needed by nothing."""


@dataclass
class RemoveEmpty:
    """Remove a directory if nothing is left in it."""

    path: str

    def describe(self) -> str:
        return f"remove {self.path} if it is empty"

    def do(self, host: Host) -> None:
        with suppress(OSError):
            host.at(self.path).rmdir()

    def undo(self, host: Host) -> None:
        """It was empty."""


@dataclass
class Systemctl:
    """Tell systemd something; what a unit did before is known when it has to be taken back."""

    arguments: tuple[str, ...]
    was_active: bool | None = field(default=None, init=False)

    def describe(self) -> str:
        return f"systemctl {' '.join(self.arguments)}"

    def do(self, host: Host) -> None:
        if self.unit:
            self.was_active = host.active(self.unit)
        host.systemctl(*self.arguments)

    def undo(self, host: Host) -> None:
        """See `carry_out`: files come first."""

    @property
    def unit(self) -> str:
        """The unit it is about; empty for systemd itself."""
        return self.arguments[-1] if len(self.arguments) > 1 else ""


@dataclass
class Await:
    """Wait until something holds; `check` gives the reason why not yet, empty when it does."""

    what: str
    check: Callable[[], str]

    def describe(self) -> str:
        return f"see that {self.what}"

    def do(self, host: Host) -> None:  # noqa: ARG002 - a step like the others
        if reason := self.check():
            raise HostError(f"not so: {self.what}: {reason}", next_step="see the journal of its unit")

    def undo(self, host: Host) -> None:
        """It changed nothing."""


def carry_out(steps: Sequence[Step], host: Host, tell: Callable[[str], None]) -> None:
    """Do all steps in order. When one fails, what was done is taken back and HostError says why."""
    done: list[Step] = []
    for step in steps:
        tell(step.describe())
        done.append(step)
        try:
            step.do(host)
            failpoints.reach("host.step.done")
        except BaseException as error:  # an interrupt, too, must not leave half of it
            failures = _take_back(done, host, tell)
            if not isinstance(error, UnladeError | OSError):
                raise
            after = "; and taking it back: " + "; ".join(failures) if failures else ""
            raise HostError(
                f"{step.describe()}: {error}{after}",
                next_step=getattr(error, "next_step", "")
                or ("" if after else "everything is as it was; put right what it says, then try again"),
            ) from error


def _take_back(done: Sequence[Step], host: Host, tell: Callable[[str], None]) -> list[str]:
    """Restore, as far as it goes; what did not."""
    failures: list[str] = []

    def attempt(what: str, do: Callable[[], object]) -> None:
        tell(f"taking back: {what}")
        try:
            do()
        except (UnladeError, OSError) as error:
            failures.append(str(error))

    told = [step for step in done if isinstance(step, Systemctl)]
    units = {step.unit: step.was_active for step in reversed(told) if step.was_active is not None}
    for unit, was_active in units.items():
        if not was_active:
            attempt(f"systemctl stop {unit}", partial(host.systemctl, "stop", unit))
    for step in reversed(done):
        if not isinstance(step, Systemctl | Await | TryBundle):
            attempt(step.describe(), partial(step.undo, host))
    if told:
        attempt("systemctl daemon-reload", partial(host.systemctl, "daemon-reload"))
    # Ours before the kubelet, which needs it.
    for unit in sorted(units, key=lambda unit: unit != UNIT):
        if units[unit]:
            attempt(f"systemctl restart {unit}", partial(host.systemctl, "restart", unit))
    return failures


def _look(path: Path) -> tuple[str, bool, int] | None:
    """What is at a path: text or target, whether it is a link, its mode."""
    if path.is_symlink():
        return os.readlink(path), True, 0o644
    try:
        return path.read_text(), False, path.stat().st_mode & 0o777
    except FileNotFoundError:
        return None


def _put(path: Path, content: str | None, *, link: bool, mode: int) -> None:
    """Replace what is at a path by rename, durable when this returns; None removes it."""
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One name, which the next install replaces; neither systemd nor the kubelet reads it.
        fresh = path.with_name(f".{path.name}.new")
        fresh.unlink(missing_ok=True)
        if link:
            fresh.symlink_to(content)
        else:
            with open(fresh, "x") as stream:
                stream.write(content)
                stream.flush()
                os.fchmod(stream.fileno(), mode)
                os.fsync(stream.fileno())
        failpoints.reach("host.file.written")
        os.rename(fresh, path)
    with suppress(FileNotFoundError):
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
