"""Short names mean what they mean to Docker; two spellings of one thing are equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlade.errors import InvalidInput
from unlade.model import Digest, Reference

DIGEST = str(Digest.of(b""))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("nginx", "docker.io/library/nginx:latest"),
        ("nginx:1.27", "docker.io/library/nginx:1.27"),
        ("bitnami/redis", "docker.io/bitnami/redis:latest"),
        ("docker.io/nginx", "docker.io/library/nginx:latest"),
        ("index.docker.io/library/nginx", "docker.io/library/nginx:latest"),
        ("registry-1.docker.io/a/b:c", "docker.io/a/b:c"),
        ("localhost/x", "localhost/x:latest"),
        ("localhost:5000/x:y", "localhost:5000/x:y"),
        ("127.0.0.1:5000/a/b/c", "127.0.0.1:5000/a/b/c:latest"),
        ("[::1]:5000/x", "[::1]:5000/x:latest"),
        ("GHCR.io/x/y", "ghcr.io/x/y:latest"),
        (f"ghcr.io/x/y@{DIGEST}", f"ghcr.io/x/y@{DIGEST}"),
        (f"ghcr.io/x/y:v1@{DIGEST}", f"ghcr.io/x/y:v1@{DIGEST}"),
        ("a__b/c-d.e_f", "docker.io/a__b/c-d.e_f:latest"),
    ],
)
def test_canonical(text: str, canonical: str) -> None:
    reference = Reference.parse(text)
    assert str(reference) == canonical
    assert Reference.parse(canonical) == Reference.parse(str(Reference.parse(canonical)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "a:",
        "host.io/Upper",
        "host.io/a//b",
        "host.io/a/../b",
        "host.io/.a",
        "host.io/a/",
        "host.io:99999/a",
        "host.io/a:" + "t" * 129,
        "host.io/a:-x",
        "host.io/a@sha256:abc",
        "host.io/a@",
        "https://host.io/a",
        "oci://host.io/a",
        "host.io/a b",
        "host.io/a\n",
        "host.io/a:x\n",
        "-host.io/a",
        "host.io/" + "a" * 260,
        "host.io/é",
        "@" + DIGEST,
    ],
)
def test_refused_with_a_next_step(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Reference.parse(text)
    assert caught.value.next_step


def test_digest_decides_over_tag() -> None:
    reference = Reference.parse(f"ghcr.io/x/y:v1@{DIGEST}")
    assert reference.wanted == DIGEST
    assert str(reference.with_digest(Digest.parse(DIGEST))) == f"ghcr.io/x/y@{DIGEST}"
    assert str(reference.with_tag("v2")) == "ghcr.io/x/y:v2"


@given(st.text(max_size=300))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except InvalidInput:
        return
    assert Reference.parse(str(reference)) == Reference.parse(str(Reference.parse(str(reference))))
    assert ".." not in reference.repository.split("/")
