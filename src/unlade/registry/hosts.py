"""Where a registry's requests really go: upstream and mirrors, by containerd's hosts.toml.

Owns the reading of certs.d directories: `hosts.toml` (server, host tables, capabilities, ca, client,
skip_verify, header, override_path, dial_timeout) and, where there is none, Docker's `*.crt` / `*.cert` +
`*.key`. The file is the administrator's: a host written there with `http://` counts as allowlisted for
plain HTTP. Order in the file is the order of trying; the upstream (`server`, or the registry itself) comes
last. `session` calls `hosts_for`. Unknown keys are ignored, as containerd does: a misspelt `ca` or
`skip_verify` only makes us trust less.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from unlade.registry.config import RegistryConfig
from unlade.registry.durations import parse_duration
from unlade.registry.errors import BadResponse, InvalidHosts
from unlade.registry.origins import Origin, Url, is_plain_allowed, parse_url

PULL: Final = "pull"
RESOLVE: Final = "resolve"
PUSH: Final = "push"
_ALL: Final = frozenset({PULL, RESOLVE, PUSH})
# docker.io is a name for people; its API answers here.
_API_HOSTS: Final = {"docker.io": "registry-1.docker.io"}
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
_HEADER_VALUE: Final = re.compile(r"[\t -~]*", re.ASCII)
# A hosts.toml is written by hand; anything larger is not one.
_MAX_FILE: Final = 1 << 20


class TLSSettings(msgspec.Struct, frozen=True):
    """What to trust and what to show; hashable, because connections are pooled by it."""

    ca_files: tuple[str, ...] = ()
    client_certs: tuple[tuple[str, str | None], ...] = ()
    skip_verify: bool = False


class Host(msgspec.Struct, frozen=True):
    """One place that answers for a registry."""

    origin: Origin
    api: str  # the path of the API, usually /v2
    registry: str  # whose credentials are looked up
    tls: TLSSettings = TLSSettings()
    capabilities: frozenset[str] = _ALL
    headers: tuple[tuple[str, str], ...] = ()
    dial_timeout: float | None = None
    mirror: bool = False

    def url(self, path: str) -> Url:
        """The URL of a path below the API's root."""
        return Url(self.origin, f"{self.api}/{path}")


def hosts_for(registry: str, config: RegistryConfig) -> tuple[Host, ...]:
    """Mirrors first, upstream last; raises InvalidHosts. Reads files."""
    for directory in _candidates(registry, config.certs_dirs):
        path = os.path.join(directory, "hosts.toml")
        if os.path.isfile(path):
            return _read_hosts_file(path, registry, config)
        if os.path.isdir(directory):
            return (_upstream(registry, config, _docker_certs(directory)),)
    return (_upstream(registry, config, TLSSettings()),)


def _candidates(registry: str, roots: tuple[str, ...]) -> Iterator[str]:
    """Directories in containerd's order: `host_port_` (no colon, for picky file systems), then `host:port`.

    `_default` comes after every root's own entry for the registry.
    """
    host, colon, port = registry.rpartition(":")
    own = [f"{host}_{port}_"] if colon and host else []
    for names in ((*own, registry), ("_default",)):
        for root in roots:
            for name in names:
                yield os.path.join(root, name)


def _upstream(registry: str, config: RegistryConfig, tls: TLSSettings) -> Host:
    authority = _API_HOSTS.get(registry, registry)
    scheme = "http" if registry in config.plain_http or authority in config.plain_http else "https"
    origin = parse_url(f"{scheme}://{authority}").origin
    return Host(origin, "/v2", registry, _with_config(tls, origin, config, registry))


def _with_config(tls: TLSSettings, origin: Origin, config: RegistryConfig, registry: str) -> TLSSettings:
    # By the host's own name, or by the registry's where that answers at another (docker.io).
    skip = not config.insecure_skip_tls_verify.isdisjoint({"*", origin.authority, registry})
    return TLSSettings((*config.ca_files, *tls.ca_files), tls.client_certs, tls.skip_verify or skip)


def _docker_certs(directory: str) -> TLSSettings:
    """Docker's layout: every *.crt is a CA, every *.cert a client certificate with its *.key."""
    clients = []
    for cert in sorted(glob.glob(os.path.join(glob.escape(directory), "*.cert"))):
        key = cert.removesuffix(".cert") + ".key"
        if not os.path.isfile(key):
            raise InvalidHosts(f"{cert} has no key beside it", next_step=f"put the key at {key}")
        clients.append((cert, key))
    return TLSSettings(
        tuple(sorted(glob.glob(os.path.join(glob.escape(directory), "*.crt")))), tuple(clients)
    )


def _read_hosts_file(path: str, registry: str, config: RegistryConfig) -> tuple[Host, ...]:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise InvalidHosts(
            f"{path} cannot be read: {error.strerror}", next_step="check its permissions"
        ) from error
    return parse_hosts(data, path, registry, config)


def parse_hosts(data: bytes, path: str, registry: str, config: RegistryConfig) -> tuple[Host, ...]:
    """The hosts that a hosts.toml names; `path` is for messages and for relative certificate files."""
    import tomllib

    if len(data) > _MAX_FILE:
        raise InvalidHosts(
            f"{path} is larger than {_MAX_FILE} bytes", next_step="it should be a short TOML file"
        )
    try:
        document = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidHosts(f"{path} is not TOML: {error}", next_step="correct the file") from error
    tables = document.get("host", {})
    if not isinstance(tables, dict):
        raise InvalidHosts(f"{path}: host is not a table", next_step='write [host."https://…"]')
    default = _upstream(registry, config, TLSSettings())
    server = document.get("server") or str(default.origin)
    if not isinstance(server, str):
        raise InvalidHosts(f"{path}: server is not a string", next_step="write a URL")
    hosts = [_host(url, table, path, default, config) for url, table in tables.items()]
    # What stands at the top of the file is about the server.
    hosts.append(_host(server, document, path, default, config))
    return tuple(hosts)


def _host(url_text: str, table: Any, path: str, default: Host, config: RegistryConfig) -> Host:
    if not isinstance(table, dict):
        raise InvalidHosts(f"{path}: host {url_text!r} is not a table", next_step="correct the file")
    written_scheme = "://" in url_text
    try:
        url = parse_url(url_text if written_scheme else f"https://{url_text}")
    except BadResponse as error:
        raise InvalidHosts(
            f"{path}: {url_text!r} is not a URL", next_step="write https://HOST[:PORT]"
        ) from error
    origin = url.origin
    if not written_scheme and is_plain_allowed(Origin("http", origin.host, origin.port), config.plain_http):
        origin = Origin("http", origin.host, origin.port)
    own_path = url.target.partition("?")[0].rstrip("/")
    override = _typed(table, "override_path", bool, False, path)
    api = own_path if override or own_path.endswith("/v2") else f"{own_path}/v2"
    base = os.path.dirname(path)
    tls = TLSSettings(
        tuple(_file(base, name) for name in _strings(table.get("ca", ()), "ca", path)),
        _clients(table.get("client", ()), base, path),
        _typed(table, "skip_verify", bool, False, path),
    )
    capabilities = frozenset(_strings(table.get("capabilities", sorted(_ALL)), "capabilities", path))
    if capabilities - _ALL:
        raise InvalidHosts(
            f"{path}: unknown capability {min(capabilities - _ALL)!r}", next_step="use pull, resolve and push"
        )
    mirror = origin.authority != default.origin.authority
    # A mirror has credentials of its own: the registry's never go there.
    registry = origin.authority if mirror else default.registry
    return Host(
        origin,
        api,
        registry,
        _with_config(tls, origin, config, registry),
        capabilities,
        _headers(table.get("header", {}), path),
        _duration(table.get("dial_timeout"), path),
        mirror,
    )


def _file(base: str, name: str) -> str:
    return name if os.path.isabs(name) else os.path.join(base, name)


def _typed(table: dict[str, Any], key: str, kind: type[bool], default: bool, path: str) -> bool:
    value = table.get(key, default)
    if not isinstance(value, kind):
        raise InvalidHosts(f"{path}: {key} is not true or false", next_step="correct the file")
    return value


def _strings(value: Any, key: str, path: str) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(one, str) for one in values):
        raise InvalidHosts(
            f"{path}: {key} is neither a string nor a list of strings", next_step="correct the file"
        )
    return tuple(values)


def _clients(value: Any, base: str, path: str) -> tuple[tuple[str, str | None], ...]:
    """`"pem"`, `["pem", …]` or `[["cert", "key"], …]`; a single file holds both certificate and key."""
    entries = (value,) if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)):
        raise InvalidHosts(f"{path}: client is neither a string nor a list", next_step="correct the file")
    clients: list[tuple[str, str | None]] = []
    for entry in entries:
        pair = _strings(entry, "client", path)
        if not 1 <= len(pair) <= 2:
            raise InvalidHosts(f"{path}: a client entry is one file or a pair", next_step="correct the file")
        key = _file(base, pair[1]) if len(pair) == 2 and pair[1] else None
        clients.append((_file(base, pair[0]), key))
    return tuple(clients)


def _headers(value: Any, path: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise InvalidHosts(f"{path}: header is not a table", next_step="correct the file")
    headers = []
    for name, given in value.items():
        text = ", ".join(_strings(given, f"header {name}", path))
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(text):
            raise InvalidHosts(
                f"{path}: header {name[:80]!r} has forbidden characters", next_step="correct the file"
            )
        headers.append((name, text))
    return tuple(headers)


def _duration(value: Any, path: str) -> float | None:
    if value is None:
        return None
    seconds = parse_duration(value) if isinstance(value, str) else None
    if seconds is None:
        raise InvalidHosts(f"{path}: dial_timeout {value!r} is not a duration", next_step='write it as "3s"')
    if not 0 < seconds <= 3600:
        raise InvalidHosts(
            f"{path}: dial_timeout {value!r} is out of range", next_step="use seconds to minutes"
        )
    return seconds
