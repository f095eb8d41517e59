"""Digests are safe as file names once parsed (CVE-2024-3727)."""

from __future__ import annotations

import hashlib

import pytest

from unlade.model import ChainID, DiffID, Digest, InvalidDigest, chain_id

EMPTY = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_round_trip() -> None:
    assert str(Digest.parse(EMPTY)) == EMPTY
    assert Digest.of(b"{}") == Digest.parse(EMPTY)


def test_sha512_is_accepted() -> None:
    text = "sha512:" + hashlib.sha512(b"x").hexdigest()
    digest = Digest.parse(text)
    hasher = digest.hasher()
    hasher.update(b"x")
    assert digest.matches(hasher)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sha256",
        "sha256:",
        EMPTY.upper(),
        EMPTY[:-1],
        EMPTY + "0",
        EMPTY + "\n",
        "md5:d41d8cd98f00b204e9800998ecf8427e",
        "sha1:" + "0" * 40,
        "sha256:../../../../etc/passwd",
        "sha256:" + "../" * 21 + "a",
        "sha256:" + "g" * 64,
        "sha256:" + "٣" * 64,
        "SHA256:" + "0" * 64,
        "sha256+b64:" + "0" * 64,
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(InvalidDigest) as caught:
        Digest.parse(text)
    assert caught.value.next_step


def test_chain_of_two_layers() -> None:
    first, second = DiffID(Digest.of(b"a")), DiffID(Digest.of(b"b"))
    chain = chain_id(chain_id(None, first), second)
    assert chain_id(None, first) == ChainID(first)
    assert chain == ChainID(Digest.of(f"{first} {second}".encode()))
