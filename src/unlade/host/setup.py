"""Install, upgrade, roll back, uninstall: the steps of each, worked out from what is there.

Versions lie side by side below the prefix; `current` names the one that runs and `previous` the one before.
Both are links, replaced by rename. An install that finds everything as it should be has no steps. The order
is what keeps pods undisturbed (V21): the service answers before the kubelet is told of it, and the kubelet
is back at containerd before the service ends. containerd's content is never touched.

`install.json` below the prefix remembers what was installed with which options, for upgrades and for the way
back; without it, nothing is taken away.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from unlade.errors import InvalidInput
from unlade.host import kubelet, units
from unlade.host.bundle import Bundle
from unlade.host.errors import HostError
from unlade.host.steps import (
    AddBundle,
    Await,
    Host,
    Remove,
    RemoveEmpty,
    Step,
    Systemctl,
    TryBundle,
    Write,
)

PREFIX: Final = "/opt/unlade"
RECORD: Final = "install.json"
UNIT_PATH: Final = str(units.UNIT_DIRECTORY / units.UNIT)


class Version(msgspec.Struct, frozen=True):
    """One version that is in place, and the options of `node serve` it was installed with."""

    arguments: tuple[str, ...] = ()
    socket: str = "/run/unlade/image.sock"
    state: str = "/run/unlade"
    grace: float = 30.0
    mounts: bool = False  # --csi: it mounts for the kubelet


class Record(msgspec.Struct, frozen=True, rename="camel"):
    """What `install.json` says."""

    versions: dict[str, Version] = {}
    drop_in: str = ""
    kubelet_unit: str = "kubelet.service"


_RECORD = msgspec.json.Decoder(Record)


@dataclass(frozen=True)
class Installed:
    """What is below a prefix: names of the versions, and the record."""

    prefix: str
    current: str = ""
    previous: str = ""
    record: Record = field(default_factory=Record)

    @property
    def version(self) -> Version:
        """The options of the version that runs."""
        return self.record.versions.get(self.current, Version())


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What an administrator asks for; None: as it was."""

    prefix: str = PREFIX
    version: Version | None = None
    kubelet_unit: str = "kubelet.service"
    config_directory: str | None = None
    leave_kubelet: bool = False


def installed(host: Host, prefix: str = PREFIX) -> Installed:
    """What is there now; raises HostError when the record cannot be read."""
    path = host.at(f"{prefix}/{RECORD}")
    try:
        record = _RECORD.decode(path.read_bytes())
    except FileNotFoundError:
        record = Record()
    except msgspec.DecodeError as error:
        raise HostError(f"{path} cannot be read: {error}", next_step="restore or remove it") from error
    return Installed(
        prefix, _target(host.at(f"{prefix}/current")), _target(host.at(f"{prefix}/previous")), record
    )


def install(host: Host, wanted: Wanted, bundle: Bundle, *, answers: Callable[[str], str]) -> list[Step]:
    """The steps that put a bundle in place, or an upgrade; none when it is there already.

    `answers` gives the reason why a socket does not answer, empty when it does.
    """
    before = installed(host, wanted.prefix)
    version = wanted.version or before.version
    name = bundle.name
    directory = f"{wanted.prefix}/{name}"
    steps: list[Step] = []
    if not host.at(directory).is_dir():
        steps.append(AddBundle(bundle, directory))
        if host.live:
            steps.append(TryBundle(directory))
    previous = before.previous if before.current == name else before.current
    return steps + _switch(host, wanted, before, name, version, previous, answers)


def rollback(host: Host, wanted: Wanted, *, answers: Callable[[str], str]) -> list[Step]:
    """The steps back to the version before, with its options."""
    before = installed(host, wanted.prefix)
    if not before.previous or not host.at(f"{wanted.prefix}/{before.previous}").is_dir():
        raise InvalidInput(
            f"there is no version before {before.current or 'the first'} in {wanted.prefix}",
            next_step="`unlade node status` says what is installed",
        )
    version = before.record.versions.get(before.previous, Version())
    return _switch(host, wanted, before, before.previous, version, before.current, answers)


def uninstall(host: Host, prefix: str = PREFIX) -> list[Step]:
    """The steps that take everything away: the kubelet goes back to containerd before the service ends."""
    there = installed(host, prefix)
    unit = there.record.kubelet_unit
    steps: list[Step] = []
    if there.record.drop_in:
        drop_in = Write(there.record.drop_in, None)
        if drop_in.needed(host):
            steps.append(drop_in)
            if host.live:
                steps.append(Systemctl(("try-restart", unit)))
    if host.live:
        _refuse_if_still_told(host, there, unit)
    links = [Write(str(path), None) for path in units.wants()]
    service = Write(UNIT_PATH, None)
    if host.live and service.needed(host):
        steps.append(Systemctl(("stop", units.UNIT)))
    changed: list[Step] = [step for step in (*links, service) if step.needed(host)]
    steps += changed
    if changed:
        steps.append(RemoveEmpty(str(units.UNIT_DIRECTORY / "kubelet.service.wants")))
    if host.live and changed:
        steps.append(Systemctl(("daemon-reload",)))
    if not there.current and not there.record.versions:
        return steps  # not ours: no record of what lies below the prefix
    version = there.version
    leftovers = [version.socket, *(f"{version.state}/{name}" for name in ("locks", "owners", "pulls.sock"))]
    steps += [Remove(path) for path in leftovers if host.live and host.at(path).exists()]
    names = sorted({*there.record.versions, there.current, there.previous} - {""})
    ours = ["current", "previous", ".incoming", *names, RECORD]
    steps += [Remove(f"{prefix}/{name}") for name in ours if _is_there(host.at(f"{prefix}/{name}"))]
    steps.append(RemoveEmpty(prefix))
    if host.live:
        steps.append(RemoveEmpty(version.state))
    return steps


def _switch(
    host: Host,
    wanted: Wanted,
    before: Installed,
    name: str,
    version: Version,
    previous: str,
    answers: Callable[[str], str],
) -> list[Step]:
    """Make a version that is in place the one that runs."""
    prefix = wanted.prefix
    drop_in = _drop_in(host, wanted, before)
    kept = {one for one in (name, previous) if one}
    versions = {**before.record.versions, name: version}
    record = Record(
        {one: versions[one] for one in sorted(kept) if one in versions}, drop_in, wanted.kubelet_unit
    )
    text = units.service(
        f"{prefix}/current/bin/unlade", version.arguments, grace=version.grace, mounts=version.mounts
    )
    unit = Write(UNIT_PATH, text)
    links = [Write(str(path), f"../{units.UNIT}", link=True) for path in units.wants()]
    previously = Write(f"{prefix}/previous", previous or None, link=bool(previous))
    current = Write(f"{prefix}/current", name, link=True)
    remembered = Write(f"{prefix}/{RECORD}", json.dumps(msgspec.to_builtins(record), indent=2) + "\n")
    restart = current.needed(host) or unit.needed(host) or not host.active(units.UNIT)
    files = (remembered, unit, *links, previously, current)
    steps: list[Step] = [step for step in files if step.needed(host)]
    if host.live:
        if unit.needed(host) or any(link.needed(host) for link in links):
            steps.append(Systemctl(("daemon-reload",)))
        if restart:
            steps.append(Systemctl(("restart", units.UNIT)))
            steps.append(Await(f"{version.socket} answers", lambda: answers(version.socket)))
    if drop_in:
        told = Write(drop_in, units.drop_in(version.socket))
        if told.needed(host):
            steps.append(told)
            if host.live:
                steps.append(Systemctl(("try-restart", wanted.kubelet_unit)))
    older = sorted(set(before.record.versions) - kept)
    return steps + [Remove(f"{prefix}/{one}") for one in older]


def _drop_in(host: Host, wanted: Wanted, before: Installed) -> str:
    """Where the kubelet reads our drop-in; empty when it is left alone. Raises when it reads none."""
    if wanted.leave_kubelet:
        return before.record.drop_in
    argv = kubelet_command(host, wanted.kubelet_unit)
    reads = kubelet.flag(argv, "config-dir")
    directory = wanted.config_directory or reads
    if before.record.drop_in and not directory:
        return before.record.drop_in
    directory = directory or units.CONFIG_DIRECTORY
    if kubelet.flag(argv, "image-service-endpoint"):
        raise InvalidInput(
            "the kubelet's flag --image-service-endpoint wins over every file",
            next_step="take the flag out of its unit, or install with --no-kubelet and name our socket in it",
        )
    if argv and reads.rstrip("/") != directory.rstrip("/"):
        now = f"reads drop-ins from {reads}" if reads else "was not told to read drop-ins"
        raise InvalidInput(
            f"the kubelet {now}, not from {directory}",
            next_step=f"start it with --config-dir={directory} (KUBELET_EXTRA_ARGS in /etc/default/kubelet), "
            "or install with --no-kubelet and set imageServiceEndpoint yourself",
        )
    return f"{directory.rstrip('/')}/{units.DROP_IN}"


def _refuse_if_still_told(host: Host, there: Installed, unit: str) -> None:
    """Whoever told the kubelet otherwise than by our drop-in must tell it so again."""
    argv = kubelet_command(host, unit)
    used = kubelet.endpoint(argv, without=there.record.drop_in)
    if used.socket == there.version.socket:
        raise InvalidInput(
            f"{used.source} makes the kubelet use {used.socket}: it would not start again",
            next_step="take imageServiceEndpoint out there, restart the kubelet, then uninstall",
        )


def kubelet_command(host: Host, unit: str) -> list[str]:
    """The running kubelet's command line; empty when none runs or the host does not."""
    if not host.live:
        return []
    pid = host.systemctl("show", "--property=MainPID", "--value", unit, check=False)
    return kubelet.command_line(int(pid)) if pid.isdecimal() and int(pid) else []


def survey(host: Host, prefix: str, *, answers: Callable[[str], str]) -> dict[str, Any]:
    """What `unlade node status` tells: bundle, unit, socket, kubelet; no `problems` when all is well."""
    there = installed(host, prefix)
    version = there.version
    problems: list[str] = []
    if not there.current:
        problems.append(f"nothing is installed in {prefix}")
    elif not host.at(f"{prefix}/{there.current}/bin/unlade").exists():
        problems.append(f"{prefix}/{there.current} is not whole")
    data: dict[str, Any] = {
        "prefix": prefix,
        "current": there.current or None,
        "previous": there.previous or None,
        "arguments": list(version.arguments),
        "state": version.state,
        "unit": {"name": units.UNIT, "path": UNIT_PATH, "installed": host.at(UNIT_PATH).exists()},
        "socket": {"path": version.socket},
        "kubelet": {"dropIn": there.record.drop_in or None},
    }
    data["unit"]["enabled"] = all(_is_there(host.at(str(path))) for path in units.wants())
    if host.live:
        data["unit"]["active"] = host.systemctl("is-active", units.UNIT, check=False) or "unknown"
        pid = host.systemctl("show", "--property=MainPID", "--value", units.UNIT, check=False)
        data["unit"]["pid"] = int(pid) if pid.isdecimal() and int(pid) else None
        if data["unit"]["active"] != "active":
            problems.append(f"{units.UNIT} is {data['unit']['active']}")
        reason = answers(version.socket)
        data["socket"] |= {"answers": not reason, "reason": reason or None}
        if reason:
            problems.append(f"{version.socket}: {reason}")
        argv = kubelet_command(host, there.record.kubelet_unit)
        used = kubelet.endpoint(argv)
        ours = used.socket == version.socket
        data["kubelet"] |= {
            "running": bool(argv),
            "endpoint": used.address or None,
            "source": used.source if argv else None,
            "ours": ours,
        }
        if argv and not ours:
            problems.append(f"the kubelet uses {used.address or 'containerd'} ({used.source})")
    data["problems"] = problems
    return data


def _target(path: Path) -> str:
    return str(path.readlink()) if path.is_symlink() else ""


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()
