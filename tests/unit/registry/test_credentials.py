"""Credentials: matching keys, pull secrets, fingerprints (V4, V5)."""

from __future__ import annotations

import base64
import json

import pytest

from unlade.registry import (
    ChainCredentials,
    Credential,
    InvalidCredentials,
    PullSecretCredentials,
    StaticCredentials,
)
from unlade.registry.credentials import matching_keys, normalise_key


def auth(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("key", "normal"),
    [
        ("r.io", "r.io"),
        ("R.io:5000", "r.io:5000"),
        ("https://r.io", "r.io"),
        ("https://r.io/", "r.io"),
        ("https://r.io/v1/", "r.io"),
        ("http://r.io/v2", "r.io"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("registry-1.docker.io", "docker.io"),
        ("docker.io/library", "docker.io/library"),
        ("r.io/Team/App/", "r.io/Team/App"),
    ],
)
def test_keys_as_people_write_them(key: str, normal: str) -> None:
    assert normalise_key(key) == normal


def test_the_longest_key_comes_first_and_parts_are_whole() -> None:
    keys = ["r.io", "r.io/team", "r.io/team/app", "r.io/tea", "r.io/team/app/x", "s.io", "r.io:5000", "*.io"]
    assert matching_keys(keys, "r.io", "team/app") == ["r.io/team/app", "r.io/team", "r.io", "*.io"]
    assert matching_keys(keys, "r.io", "team-b/app") == ["r.io", "*.io"]
    assert matching_keys(keys, "r.io:5000", "team/app") == ["r.io:5000"]


@pytest.mark.parametrize(
    ("key", "registry", "matches"),
    [
        ("*.azurecr.io", "mine.azurecr.io", True),
        ("*.azurecr.io", "azurecr.io", False),
        ("*.azurecr.io", "a.b.azurecr.io", False),
        ("*.azurecr.io", "mine.azurecr.io.evil.example", False),
        ("registry*.example", "registry1.example", True),
        ("*.example:5000", "a.example:5000", True),
        ("*.example", "a.example:5000", False),
        ("*", "localhost", True),
        ("*", "r.io", False),
    ],
)
def test_patterns_match_label_by_label_as_the_kubelets(key: str, registry: str, matches: bool) -> None:
    assert bool(matching_keys([key], registry, "a/b")) is matches


@pytest.mark.parametrize(
    "key", ["https://index.docker.io/v1/", "docker.io", "index.docker.io", "registry-1.docker.io"]
)
def test_docker_hub_has_many_names(key: str) -> None:
    credential = Credential("u", "p")
    assert StaticCredentials({key: credential}).lookup("docker.io", "library/nginx") == [credential]


def test_a_pull_secret_of_either_kind() -> None:
    entries = {"r.io": {"auth": auth("u", "p:with:colons")}, "r.io/team": {"username": "v", "password": "q"}}
    for document in ({"auths": entries}, entries):
        secret = PullSecretCredentials(json.dumps(document).encode())
        assert list(secret.lookup("r.io", "team/app")) == [
            Credential("v", "q"),
            Credential("u", "p:with:colons"),
        ]
        assert list(secret.lookup("s.io", "team/app")) == []


def test_a_pull_secret_with_tokens() -> None:
    document = {
        "auths": {"r.io": {"auth": auth("u", ""), "identitytoken": "i"}, "s.io": {"registrytoken": "t"}}
    }
    secret = PullSecretCredentials(json.dumps(document).encode())
    assert list(secret.lookup("r.io", "a")) == [Credential("u", "", "i")]
    assert list(secret.lookup("s.io", "a")) == [Credential(registry_token="t")]


def test_an_empty_entry_is_no_credential() -> None:
    secret = PullSecretCredentials(b'{"auths":{"r.io":{},"s.io":{"auth":""},"t.io":{"username":"u"}}}')
    assert not any(secret.lookup(host, "a") for host in ("r.io", "s.io", "t.io"))


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b'"x"', b'{"auths":[]}', b'{"auths":{"r.io":"x"}}', b"{", b"\xff", b"[" * 100_000],
)
def test_a_secret_that_is_none(data: bytes) -> None:
    with pytest.raises(InvalidCredentials):
        PullSecretCredentials(data)


def test_a_broken_entry_is_an_error_only_for_its_registry() -> None:
    document = {"auths": {"r.io": {"auth": "not base64!"}, "s.io": {"auth": auth("u", "p")}}}
    secret = PullSecretCredentials(json.dumps(document).encode(), name="secret ns/pull")
    assert list(secret.lookup("s.io", "a")) == [Credential("u", "p")]
    with pytest.raises(InvalidCredentials, match="secret ns/pull"):
        secret.lookup("r.io", "a")


def test_errors_do_not_quote_the_secret() -> None:
    with pytest.raises(InvalidCredentials) as caught:
        PullSecretCredentials(b'{"auths":{"r.io":{"password":hunter2}}}')
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert "hunter2" not in repr(Credential("u", "hunter2"))
    assert "hunter2" not in str(Credential("u", "hunter2"))


def test_a_chain_keeps_order_and_drops_repeats() -> None:
    first, second = Credential("a", "1"), Credential("b", "2")
    chain = ChainCredentials(
        [StaticCredentials({"r.io": first}), StaticCredentials({"r.io": first, "r.io/x": second})]
    )
    assert chain.lookup("r.io", "x/y") == [first, second]


def test_fingerprints_tell_credentials_apart() -> None:
    some = [
        Credential("a", "bc"),
        Credential("ab", "c"),
        Credential("a", "b", "c"),
        Credential("a", "b", "", "c"),
    ]
    assert len({one.fingerprint() for one in some}) == len(some)
    assert Credential("a", "b").fingerprint() == Credential("a", "b").fingerprint()
    assert "bc" not in Credential("a", "bc").fingerprint()[:0] + repr(Credential("a", "bc"))
