"""The one URL parser: what it accepts, what it refuses, and the rules about where to go next."""

from __future__ import annotations

import pytest

from unlade.errors import RegistryError
from unlade.registry import BadResponse
from unlade.registry.config import RegistryConfig
from unlade.registry.errors import PlainHTTPRefused, UnsafeRedirect, UntrustedRealm
from unlade.registry.origins import Origin, check_next, is_plain_allowed, parse_url
from unlade.registry.realms import check_realm


@pytest.mark.parametrize(
    ("text", "origin", "target"),
    [
        ("https://r.example", Origin("https", "r.example", 443), "/"),
        ("https://R.Example:443/a?b=c#d", Origin("https", "r.example", 443), "/a?b=c"),
        ("http://127.0.0.1:5000/v2/", Origin("http", "127.0.0.1", 5000), "/v2/"),
        ("https://[::1]:5000/", Origin("https", "::1", 5000), "/"),
        ("https://my_registry.local/x", Origin("https", "my_registry.local", 443), "/x"),
        ("https://1password.example.1a/x", Origin("https", "1password.example.1a", 443), "/x"),
    ],
)
def test_urls(text: str, origin: Origin, target: str) -> None:
    url = parse_url(text)
    assert (url.origin, url.target) == (origin, target)


def test_a_relative_url_stays_on_its_base() -> None:
    base = parse_url("https://r.example/v2/a/blobs/uploads/")
    assert (
        str(parse_url("/v2/a/blobs/uploads/1?x=y", base=base)) == "https://r.example/v2/a/blobs/uploads/1?x=y"
    )
    assert str(parse_url("?n=2", base=base)) == "https://r.example/v2/a/blobs/uploads/?n=2"
    assert parse_url("//evil.example/x", base=base).origin.host == "evil.example"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "r.example/x",
        "ftp://r.example/",
        "https://",
        "https://a b/",
        "https://a\tb/",
        "https://a\r\nHost: b/",
        "https://u@r.example/",
        "https://u:p@r.example/",
        "https://r.example:port/",
        "https://r.example:-1/",
        "https://[::1/",
        "https://[zz]/",
        "https://[::ffff:1word]/x",
        "https://0x7f000001/",
        "https://0177.0.0.1/",
        "https://127.1/",
        "https://2130706433/",
        "https://1.2.3.4.5/",
        "https://a..b/",
        "https://-a.b/",
        "https://bücher.example/",
        "https://r.example/ü",
        "https://a\\b/",
    ],
)
def test_what_is_no_url(text: str) -> None:
    with pytest.raises(BadResponse):
        parse_url(text)


def test_a_relative_url_that_cannot_be_joined() -> None:
    with pytest.raises(BadResponse):
        parse_url("https://[::ffff:1word]/x", base=parse_url("https://r.example/"))


def test_messages_show_no_query() -> None:
    assert parse_url("https://cdn.example/a?X-Sig=secret").redacted == "https://cdn.example/a?…"


@pytest.mark.parametrize(
    ("listed", "url", "allowed"),
    [
        ("a:5000", "http://a:5000", True),
        ("a:5000", "http://a:5001", False),
        ("a", "http://a", True),
        ("a", "http://a:80", True),
        ("a:80", "http://a", True),
        ("a", "http://a:5000", False),
        ("a", "http://b.a", False),
        ("[::1]:5000", "http://[::1]:5000", True),
    ],
)
def test_plain_http_is_allowed_exactly(listed: str, url: str, allowed: bool) -> None:
    assert is_plain_allowed(parse_url(url).origin, frozenset({listed})) is allowed


@pytest.mark.parametrize(
    ("here", "there", "error"),
    [
        ("https://a", "https://a/x", None),
        ("https://a", "https://b/x", None),
        ("https://a", "https://10.0.0.1/x", None),
        ("https://a", "http://a/x", UnsafeRedirect),
        ("https://a", "http://plain:5000/x", UnsafeRedirect),
        ("http://plain:5000", "http://plain:5000/x", None),
        ("http://plain:5000", "https://b/x", None),
        ("http://plain:5000", "http://b/x", PlainHTTPRefused),
        ("http://plain:5000", "http://plain:5001/x", PlainHTTPRefused),
        ("https://a", "https://169.254.169.254/", UnsafeRedirect),
        ("https://169.254.169.254", "https://169.254.169.254:8443/", None),
    ],
)
def test_where_a_server_may_send_us(here: str, there: str, error: type[RegistryError] | None) -> None:
    plain = frozenset({"plain:5000"})
    if error is None:
        check_next(parse_url(here).origin, parse_url(there), plain)
    else:
        with pytest.raises(error):
            check_next(parse_url(here).origin, parse_url(there), plain)


@pytest.mark.parametrize(
    ("registry", "realm"),
    [
        ("https://registry-1.docker.io", "https://auth.docker.io/token"),
        ("https://quay.io", "https://quay.io/v2/auth"),
        ("https://ghcr.io", "https://ghcr.io/token"),
        ("https://registry.gitlab.com", "https://gitlab.com/jwt/auth"),
        ("https://public.ecr.aws", "https://public.ecr.aws/token/"),
        ("https://mine.azurecr.io", "https://mine.azurecr.io/oauth2/token"),
        ("https://europe-docker.pkg.dev", "https://europe-docker.pkg.dev/v2/token"),
        (
            "https://registry.redhat.io",
            "https://sso.redhat.com/auth/realms/rhcc/protocol/redhat-docker-v2/auth",
        ),
        ("https://nvcr.io", "https://nvcr.io/proxy_auth"),
        ("https://harbor.corp.example:8443", "https://harbor.corp.example:8443/service/token"),
        ("https://registry.corp.example", "https://gitlab.corp.example/jwt/auth"),
    ],
)
def test_realms_of_the_real_world(registry: str, realm: str) -> None:
    assert str(check_realm(realm, parse_url(registry).origin, RegistryConfig())) == realm


def test_a_known_realm_is_known_for_its_registry_only() -> None:
    for registry in ("https://evil.example", "https://docker.io.evil.example"):
        with pytest.raises(UntrustedRealm):
            check_realm("https://auth.docker.io/token", parse_url(registry).origin, RegistryConfig())
    with pytest.raises(UntrustedRealm):
        check_realm(
            "https://auth.docker.io:8443/token", parse_url("https://quay.io").origin, RegistryConfig()
        )
