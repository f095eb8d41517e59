"""hosts.toml: whatever stands in it, hosts or a typed error that names the file."""

from __future__ import annotations

from typing import Final

from unlade.registry.config import RegistryConfig
from unlade.registry.errors import InvalidHosts
from unlade.registry.hosts import parse_hosts

CORPUS: Final = [
    b'server = "https://registry-1.docker.io"\n[host."https://mirror:8443"]\ncapabilities = ["pull"]\n',
    b'[host."https://m"]\nca = ["a.crt"]\nclient = [["a.crt","a.key"],["b.pem",""]]\nskip_verify = true\n',
    b'[host."http://m/v2/x"]\noverride_path = true\ndial_timeout = "1m30s"\nheader = {x = ["a"]}',
    b'ca = "x"\n[host."m:5000"]\n',
    b'host = {"https://m" = {capabilities = ["resolve","push"]}}',
]
_CONFIG: Final = RegistryConfig()


def one_input(data: bytes) -> None:
    """Parse; what was accepted must hold the invariants that the rest of the room relies on."""
    try:
        hosts = parse_hosts(data, "/etc/certs.d/r.example/hosts.toml", "r.example", _CONFIG)
    except InvalidHosts as error:
        assert "hosts.toml" in str(error)
        return
    assert hosts
    for host in hosts:
        assert host.origin.scheme in ("http", "https")
        assert host.api.startswith("/") or host.api == ""
        assert (host.registry == "r.example") is (host.origin.authority == "r.example")
        for name, value in host.headers:
            assert "\n" not in name + value
            assert "\r" not in name + value
        assert host.dial_timeout is None or 0 < host.dial_timeout <= 3600
