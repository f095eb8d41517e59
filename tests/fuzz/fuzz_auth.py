"""Challenges, realms, tokens and other text that a registry puts into headers: typed errors, linear time."""

from __future__ import annotations

from typing import Final

from unlade.errors import UnladeError
from unlade.registry.challenge import parse_challenges
from unlade.registry.config import RegistryConfig
from unlade.registry.credentials import PullSecretCredentials, matching_keys
from unlade.registry.origins import Origin, check_next, parse_url
from unlade.registry.realms import check_realm
from unlade.registry.retry import parse_retry_after

CORPUS: Final = [
    b'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull"',
    b'Basic realm="Registry Realm"',
    b'Bearer realm="http://169.254.169.254/latest",service=x, Basic realm="y"',
    b'Bearer realm="https://gitlab.example.com/jwt/auth",error="insufficient_scope"',
    b"Negotiate abc==",
    b'Bearer realm="a\\"b\\\\c"',
    b'{"auths":{"https://index.docker.io/v1/":{"auth":"dTpw"},"r.io/team":{"identitytoken":"x"}}}',
    b'{"r.io":{"username":"u","password":"p"}}',
    b"https://registry.example.com:5000/v2/?a=b",
    b"https://[::ffff:169.254.169.254]/x",
    b"https://0x7f.1/",
    b"Sun, 06 Nov 1994 08:49:37 GMT",
    b"1000000000",
]
_CONFIG: Final = RegistryConfig(plain_http=frozenset({"plain.example:5000"}))
_REGISTRIES: Final = (
    Origin("https", "registry.example.com", 443),
    Origin("http", "plain.example", 5000),
    Origin("https", "10.0.0.1", 443),
)


def one_input(data: bytes) -> None:
    """What a server may send, through every parser of this room that reads headers or secrets."""
    text = data.decode("latin-1")
    for challenge in parse_challenges(text):
        _realm(challenge.parameters.get("realm", ""))
    _realm(text)
    wait = parse_retry_after(text)
    assert wait is None or wait >= 0
    assert all(key == text for key in matching_keys([text], "registry.example.com", "a/b"))
    try:
        PullSecretCredentials(data).lookup("registry.example.com", "a/b")
    except UnladeError as error:
        assert error.__cause__ is None  # a cause could quote the secret


def _realm(unsafe_text: str) -> None:
    for registry in _REGISTRIES:
        try:
            url = check_realm(unsafe_text, registry, _CONFIG)
        except UnladeError:
            continue
        origin = url.origin
        # What was accepted must hold the rules, however it was written.
        assert origin.scheme == "https" or origin.authority == "plain.example:5000"
        assert origin.host == registry.host or not origin.is_metadata
        assert str(parse_url(str(url))) == str(url)
    try:
        following = parse_url(unsafe_text, base=parse_url("https://registry.example.com/v2/"))
        check_next(_REGISTRIES[0], following, _CONFIG.plain_http)
    except UnladeError:
        return
    assert following.origin.scheme == "https"
    assert str(following).isascii()
    assert str(following).isprintable()
