"""References, digests and platforms: parsed to something that prints and parses back, or a typed error."""

from __future__ import annotations

from typing import Final

from unlade.errors import InvalidInput
from unlade.model import Digest, Platform, Reference
from unlade.model.paths import check_relative

CORPUS: Final = [
    b"nginx",
    b"docker.io/library/nginx:1.27",
    b"localhost:5000/a/b__c/d-e.f:Tag_1",
    b"[::1]:5000/x",
    b"registry.example.com/team/app@sha256:" + b"0a" * 32,
    b"r.io/x:tag@sha512:" + b"ff" * 64,
    b"sha256:" + b"AB" * 32,
    b"linux/arm64/v8",
    b"windows(10.0.17763)/amd64",
    b"some/relative/path",
    b"../x",
    "h\u00e9/\u0130:\u212a".encode(),
]


def one_input(data: bytes) -> None:
    """Through every grammar of the model."""
    text = data.decode("utf-8", "surrogateescape")
    for parse in (Reference.parse, Digest.parse, Platform.parse):
        try:
            value = parse(text)
        except InvalidInput:
            continue
        assert str(parse(str(value))) == str(value), f"{value!r} does not survive its own text"
    try:
        path = check_relative(text)
    except InvalidInput:
        return
    assert not path.startswith("/")
    assert ".." not in path.split("/")
    assert "\0" not in path
