"""hosts.toml and certificate directories, as containerd and Docker read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from unlade.registry import InvalidHosts, RegistryConfig
from unlade.registry.hosts import Host, TLSSettings, hosts_for, parse_hosts
from unlade.registry.origins import Origin


def parse(text: str, registry: str = "docker.io", config: RegistryConfig | None = None) -> tuple[Host, ...]:
    return parse_hosts(
        text.encode(), f"/etc/certs.d/{registry}/hosts.toml", registry, config or RegistryConfig()
    )


def test_without_configuration_there_is_the_registry_itself() -> None:
    (host,) = hosts_for("r.example:5000", RegistryConfig())
    assert (host.origin, host.api, host.registry) == (
        Origin("https", "r.example", 5000),
        "/v2",
        "r.example:5000",
    )
    assert not host.mirror
    assert str(host.url("a/b/tags/list")) == "https://r.example:5000/v2/a/b/tags/list"


def test_docker_io_answers_at_another_name() -> None:
    (host,) = hosts_for("docker.io", RegistryConfig())
    assert (str(host.origin), host.registry, host.mirror) == (
        "https://registry-1.docker.io",
        "docker.io",
        False,
    )


def test_plain_http_for_the_listed_host_only() -> None:
    config = RegistryConfig(plain_http=frozenset({"r.example:5000"}))
    assert hosts_for("r.example:5000", config)[0].origin.scheme == "http"
    assert hosts_for("r.example", config)[0].origin.scheme == "https"


def test_a_whole_file() -> None:
    mirror, second, upstream = parse(
        """
        server = "https://registry-1.docker.io"
        capabilities = ["pull", "resolve", "push"]
        ca = "upstream.crt"

        [host."https://mirror.example:8443/proxy"]
          capabilities = ["pull"]
          ca = ["ca.crt", "/abs/other.crt"]
          client = [["c.crt", "c.key"], ["both.pem", ""]]
          skip_verify = true
          dial_timeout = "1m30.5s"
          [host."https://mirror.example:8443/proxy".header]
            x-one = "1"
            x-many = ["a", "b"]

        [host."http://plain.example/v2/cache"]
          override_path = true
        """
    )
    base = "/etc/certs.d/docker.io"
    assert mirror.origin == Origin("https", "mirror.example", 8443)
    assert mirror.api == "/proxy/v2"
    assert mirror.registry == "mirror.example:8443"
    assert mirror.mirror
    assert mirror.capabilities == frozenset({"pull"})
    assert mirror.tls == TLSSettings(
        (f"{base}/ca.crt", "/abs/other.crt"),
        ((f"{base}/c.crt", f"{base}/c.key"), (f"{base}/both.pem", None)),
        True,
    )
    assert mirror.dial_timeout == 90.5
    assert mirror.headers == (("x-one", "1"), ("x-many", "a, b"))
    # An administrator's http:// is the allowlist for that host.
    assert (str(second.origin), second.api) == ("http://plain.example", "/v2/cache")
    assert second.capabilities == frozenset({"pull", "resolve", "push"})
    assert (upstream.registry, upstream.mirror) == ("docker.io", False)
    assert upstream.tls.ca_files == (f"{base}/upstream.crt",)


def test_without_a_server_the_upstream_stays_last() -> None:
    hosts = parse('[host."https://m.example"]', "r.example")
    assert [str(host.origin) for host in hosts] == ["https://m.example", "https://r.example"]


def test_the_upstream_among_the_hosts_keeps_its_credentials() -> None:
    hosts = parse('server = "https://other.example"\n[host."https://registry-1.docker.io"]')
    assert [(host.registry, host.mirror) for host in hosts] == [("docker.io", False), ("other.example", True)]


@pytest.mark.parametrize(
    ("url", "api"),
    [
        ("https://m", "/v2"),
        ("https://m/", "/v2"),
        ("https://m/v2", "/v2"),
        ("https://m/v2/", "/v2"),
        ("https://m/a", "/a/v2"),
        ("m.example:5000", "/v2"),
    ],
)
def test_the_path_of_the_api(url: str, api: str) -> None:
    assert parse(f'[host."{url}"]')[0].api == api


def test_a_host_without_a_scheme_is_tls_unless_listed() -> None:
    config = RegistryConfig(plain_http=frozenset({"p.example:5000"}))
    hosts = parse('[host."m.example:5000"]\n[host."p.example:5000"]', config=config)
    assert [host.origin.scheme for host in hosts[:2]] == ["https", "http"]


def test_the_callers_settings_reach_every_host() -> None:
    config = RegistryConfig(ca_files=("/ca.pem",), insecure_skip_tls_verify=frozenset({"m.example"}))
    mirror, upstream = parse('[host."https://m.example"]\nca="x.crt"', "r.example", config)
    assert mirror.tls == TLSSettings(("/ca.pem", "/etc/certs.d/r.example/x.crt"), (), True)
    assert upstream.tls == TLSSettings(("/ca.pem",), (), False)


@pytest.mark.parametrize(
    "text",
    [
        "server = ",
        "server = 1",
        "host = 1",
        '[host]\n"https://m" = 1',
        '[host."ftp://m"]',
        '[host."https://u@m"]',
        '[host."https://"]',
        '[host."https://m"]\ncapabilities = ["fly"]',
        '[host."https://m"]\ncapabilities = 1',
        '[host."https://m"]\nca = 1',
        '[host."https://m"]\nca = [1]',
        '[host."https://m"]\nclient = 1',
        '[host."https://m"]\nclient = [["a","b","c"]]',
        '[host."https://m"]\nskip_verify = "yes"',
        '[host."https://m"]\noverride_path = 1',
        '[host."https://m"]\nheader = 1',
        '[host."https://m".header]\nx = 1',
        '[host."https://m".header]\nx = "a\\r\\nb"',
        '[host."https://m".header]\n"x y" = "a"',
        '[host."https://m"]\ndial_timeout = 5',
        '[host."https://m"]\ndial_timeout = "soon"',
        '[host."https://m"]\ndial_timeout = "0s"',
        '[host."https://m"]\ndial_timeout = "9999h"',
        "\x00",
    ],
)
def test_a_file_that_cannot_be_used_names_itself(text: str) -> None:
    with pytest.raises(InvalidHosts, match=r"hosts\.toml"):
        parse(text)


def test_unknown_keys_are_ignored_as_containerd_does() -> None:
    assert len(parse('future = 1\n[host."https://m"]\nrewrite = {}\n')) == 2


@pytest.mark.parametrize("name", ["r.example:5000", "r.example_5000_", "_default"])
def test_directory_names(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "hosts.toml").write_text('[host."https://m.example"]')
    config = RegistryConfig(certs_dirs=(str(tmp_path / "missing"), str(tmp_path)))
    assert [str(host.origin) for host in hosts_for("r.example:5000", config)] == [
        "https://m.example",
        "https://r.example:5000",
    ]


def test_a_registrys_own_directory_goes_before_the_default(tmp_path: Path) -> None:
    for name in ("r.example", "_default"):
        (tmp_path / name).mkdir()
    (tmp_path / "_default" / "hosts.toml").write_text('[host."https://m.example"]')
    config = RegistryConfig(certs_dirs=(str(tmp_path),))
    assert len(hosts_for("r.example", config)) == 1
    assert len(hosts_for("s.example", config)) == 2


def test_the_default_comes_after_every_directorys_own(tmp_path: Path) -> None:
    for name in ("first/_default", "second/r.example"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "hosts.toml").write_text(f'[host."https://{name.partition("/")[0]}.example"]')
    config = RegistryConfig(certs_dirs=(str(tmp_path / "first"), str(tmp_path / "second")))
    assert str(hosts_for("r.example", config)[0].origin) == "https://second.example"
    assert str(hosts_for("s.example", config)[0].origin) == "https://first.example"


@pytest.mark.parametrize("named", ["docker.io", "registry-1.docker.io", "*"])
def test_verification_is_turned_off_by_either_name(named: str) -> None:
    (host,) = hosts_for("docker.io", RegistryConfig(insecure_skip_tls_verify=frozenset({named})))
    assert host.tls.skip_verify


def test_dockers_certificates(tmp_path: Path) -> None:
    directory = tmp_path / "r.example:5000"
    directory.mkdir()
    for name in ("ca.crt", "other.crt", "client.cert", "client.key", "readme.txt"):
        (directory / name).touch()
    (host,) = hosts_for("r.example:5000", RegistryConfig(certs_dirs=(str(tmp_path),)))
    assert host.tls == TLSSettings(
        (str(directory / "ca.crt"), str(directory / "other.crt")),
        ((str(directory / "client.cert"), str(directory / "client.key")),),
        False,
    )
    (directory / "client.key").unlink()
    with pytest.raises(InvalidHosts, match=r"client\.cert"):
        hosts_for("r.example:5000", RegistryConfig(certs_dirs=(str(tmp_path),)))


def test_a_file_of_a_megabyte_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.example").mkdir()
    (tmp_path / "r.example" / "hosts.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(InvalidHosts):
        hosts_for("r.example", RegistryConfig(certs_dirs=(str(tmp_path),)))
