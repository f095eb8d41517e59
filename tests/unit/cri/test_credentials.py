"""AuthConfig as the kubelet passes it (V4)."""

from __future__ import annotations

import base64

import pytest

from unlade.cri.api import images_pb2 as api
from unlade.cri.credentials import from_auth
from unlade.model import Reference
from unlade.registry import Credential, InvalidCredentials

REF = Reference.parse("r.example/team/model:v1")


def _found(auth: api.AuthConfig, reference: Reference = REF) -> list[Credential]:
    source = from_auth(auth, reference)
    assert source is not None
    return list(source.lookup(reference.registry, reference.repository))


def test_nothing_is_left_to_the_nodes_own_configuration() -> None:
    assert from_auth(api.AuthConfig(), REF) is None
    assert from_auth(api.AuthConfig(server_address="r.example"), REF) is None


def test_every_form_of_it() -> None:
    assert _found(api.AuthConfig(username="a", password="b")) == [Credential("a", "b")]
    encoded = base64.b64encode(b"a:b:c").decode()
    assert _found(api.AuthConfig(auth=encoded)) == [Credential("a", "b:c")]
    assert _found(api.AuthConfig(identity_token="t")) == [Credential(identity_token="t")]
    assert _found(api.AuthConfig(registry_token="t")) == [Credential(registry_token="t")]


def test_a_credential_for_another_server_is_not_sent() -> None:
    mine = api.AuthConfig(username="a", password="b", server_address="https://r.example/v1/")
    assert _found(mine) == [Credential("a", "b")]
    other = api.AuthConfig(username="a", password="b", server_address="evil.example")
    assert _found(other) == []
    source = from_auth(api.AuthConfig(username="a", password="b"), REF)
    assert source is not None
    assert list(source.lookup("evil.example", "team/model")) == []


def test_rubbish_is_refused_without_being_quoted() -> None:
    with pytest.raises(InvalidCredentials) as caught:
        from_auth(api.AuthConfig(auth="aHVudGVyMg=="), REF)
    assert not {"aHVudGVyMg==", "hunter2"} & set(str(caught.value).split())
