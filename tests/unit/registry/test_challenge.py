"""WWW-Authenticate as servers really write it, and as attackers would."""

from __future__ import annotations

import time

import pytest

from unlade.registry.challenge import Challenge, parse_challenges

WELL_FORMED: dict[str, list[tuple[str, dict[str, str]]]] = {
    'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull"': [
        (
            "bearer",
            {
                "realm": "https://auth.docker.io/token",
                "service": "registry.docker.io",
                "scope": "repository:a/b:pull",
            },
        )
    ],
    'Basic realm="Registry Realm"': [("basic", {"realm": "Registry Realm"})],
    "Basic": [("basic", {})],
    'bearer REALM = "x" , Service=y': [("bearer", {"realm": "x", "service": "y"})],
    'Bearer realm="a\\"b\\\\c"': [("bearer", {"realm": 'a"b\\c'})],
    'Basic realm="a", Bearer realm="b",service="c"': [
        ("basic", {"realm": "a"}),
        ("bearer", {"realm": "b", "service": "c"}),
    ],
    'Negotiate abc123==, Basic realm="a"': [("negotiate", {}), ("basic", {"realm": "a"})],
    'Bearer realm="first",realm="second"': [("bearer", {"realm": "first"})],
    'Bearer scope="repository:a:pull,push"': [("bearer", {"scope": "repository:a:pull,push"})],
    "": [],
    " , ,": [],
}


@pytest.mark.parametrize("header", WELL_FORMED)
def test_what_servers_send(header: str) -> None:
    assert parse_challenges(header) == [Challenge(scheme, values) for scheme, values in WELL_FORMED[header]]


@pytest.mark.parametrize(
    "header",
    [
        'Bearer realm="unclosed',
        "Bearer =x",
        'Bearer realm="a" service="b"',
        '"Bearer"',
        "Bearer realm=\x00",
        'Bearer realm="a\nb"',
        "Bearer " + ",".join(f"p{n}=1" for n in range(100)),
        "x" * 20_000,
    ],
)
def test_what_cannot_be_understood_is_nothing(header: str) -> None:
    assert parse_challenges(header) == []


@pytest.mark.parametrize("unit", ['a="', ",", " ", "a", "a=", 'a="\\', "=", 'Basic realm="x",'])
def test_the_time_is_linear(unit: str) -> None:
    began = time.monotonic()
    parse_challenges(unit * (16_000 // len(unit)))
    assert time.monotonic() - began < 0.5
