"""Who we are, to whom: Basic, tokens, identity tokens, several candidates, expiry, login (V4)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import parse_qs

import pytest

from tests.fakes.httpd import Response
from tests.fakes.scene import PASSWORD, REPO, USER, Scene
from unlade.registry import Credential, NotFound, Registry, StaticCredentials, Unauthorized

ALICE = Credential(USER, PASSWORD)
WRONG = Credential("mallory", "guess")


class Several:
    """A source with candidates in a fixed order, which counts how often it is asked."""

    def __init__(self, *candidates: Credential) -> None:
        self.candidates = candidates
        self.asked = 0

    def lookup(self, registry: str, repository: str) -> Sequence[Credential]:
        self.asked += 1
        return self.candidates


def test_basic_is_sent_without_asking_twice() -> None:
    with Scene(auth="basic") as scene:
        client = scene.client()
        for _ in range(3):
            client.resolve(scene.ref, deadline=scene.deadline())
        assert [request.status for request in scene.registry.requests] == [401, 200, 200, 200]


def test_a_token_is_kept_for_its_repository() -> None:
    with Scene() as scene:
        client = scene.client()
        for _ in range(3):
            client.resolve(scene.ref, deadline=scene.deadline())
        assert [request.status for request in scene.registry.requests] == [401, 200, 200, 200]
        (request,) = scene.tokens.requests
        assert request.query == {
            "service": [scene.registry.host],
            "scope": [f"repository:{REPO}:pull"],
            "account": [USER],
        }


def test_a_second_repository_gets_its_token_without_a_refusal() -> None:
    with Scene() as scene:
        scene.registry.put_image("team/other", "v1", [])
        client = scene.client()
        client.resolve(scene.ref, deadline=scene.deadline())
        client.resolve(scene.registry.reference("team/other", "v1"), deadline=scene.deadline())
        assert [request.status for request in scene.registry.requests] == [401, 200, 200]


def test_an_expired_token_is_replaced() -> None:
    with Scene() as scene:
        client = scene.client()
        client.resolve(scene.ref, deadline=scene.deadline())
        scene.tokens.grants.clear()
        client.resolve(scene.ref, deadline=scene.deadline())
        assert [request.status for request in scene.registry.requests] == [401, 200, 401, 200]


@pytest.mark.parametrize("seconds", [None, 0, -5, 1, 0.5, 10**12, 1e308])
def test_a_token_is_used_whatever_lifetime_it_claims(seconds: float | None) -> None:
    with Scene() as scene:
        token = scene.tokens.issue(USER, [f"repository:{REPO}:pull"])
        answer = json.dumps({"token": token, "expires_in": seconds}).encode()
        scene.tokens.fault(lambda q: Response(200, body=answer))
        client = scene.client()
        for _ in range(2):
            assert client.resolve(scene.ref, deadline=scene.deadline()).descriptor == scene.image
        assert len(scene.tokens.requests) == 1


def test_an_identity_token_is_traded_by_post() -> None:
    with Scene() as scene:
        scene.tokens.identity_tokens["long-lived"] = USER
        credential = Credential(identity_token="long-lived")
        with Registry(scene.config(), StaticCredentials({scene.registry.host: credential})) as client:
            client.resolve(scene.ref, deadline=scene.deadline())
        (request,) = scene.tokens.requests
        assert request.method == "POST"
        form = parse_qs(request.body.decode())
        assert form["grant_type"] == ["refresh_token"]
        assert form["scope"] == [f"repository:{REPO}:pull"]
        assert form["service"] == [scene.registry.host]
        assert "long-lived" not in str(request.query)
        assert request.authorization is None


def test_a_registry_token_is_used_as_it_is() -> None:
    with Scene() as scene:
        token = scene.tokens.issue(USER, [f"repository:{REPO}:pull"])
        credential = Credential(registry_token=token)
        with Registry(scene.config(), StaticCredentials({scene.registry.host: credential})) as client:
            client.resolve(scene.ref, deadline=scene.deadline())
        assert not scene.tokens.requests
        assert [request.status for request in scene.registry.requests] == [200]


@pytest.mark.parametrize("auth", ["token", "basic"])
def test_candidates_are_tried_in_turn_and_the_right_one_is_remembered(auth: str) -> None:
    with Scene(auth=auth) as scene:
        source = Several(WRONG, Credential(USER, "old password"), ALICE)
        with Registry(scene.config(), source) as client:
            client.resolve(scene.ref, deadline=scene.deadline())
            asked = len(scene.registry.requests) + len(scene.tokens.requests)
            client.resolve(scene.ref, deadline=scene.deadline())
            client.head_blob(scene.ref, scene.layer.digest, deadline=scene.deadline())
        now = len(scene.registry.requests) + len(scene.tokens.requests)
        assert now - asked <= 3
        assert source.asked == 1


def test_a_candidate_that_may_not_is_not_the_end() -> None:
    with Scene() as scene:
        scene.tokens.users["bob"] = "b"
        scene.tokens.rights = lambda user, repository: frozenset({"pull"} if user == USER else ())
        with Registry(scene.config(), Several(Credential("bob", "b"), ALICE)) as client:
            assert client.resolve(scene.ref, deadline=scene.deadline()).descriptor == scene.image


def test_public_content_is_pulled_in_spite_of_a_stale_login() -> None:
    with Scene() as scene:
        scene.tokens.anonymous = frozenset({"pull"})
        with Registry(scene.config(), Several(WRONG)) as client:
            assert client.resolve(scene.ref, deadline=scene.deadline()).descriptor == scene.image


def test_a_push_is_never_tried_as_nobody() -> None:
    with Scene() as scene:
        scene.tokens.anonymous = frozenset({"pull", "push"})
        raw = scene.registry.repository(REPO).manifests[str(scene.image.digest)][1]
        with Registry(scene.config(), Several(WRONG)) as client, pytest.raises(Unauthorized):
            client.put_manifest(scene.ref, raw, scene.image.media_type, tag="x", deadline=scene.deadline())


def test_not_found_by_a_good_credential_says_more_than_denied_by_others() -> None:
    with Scene() as scene:
        ref = scene.registry.reference(REPO, "none")
        with Registry(scene.config(), Several(WRONG, ALICE)) as client, pytest.raises(NotFound):
            client.resolve(ref, deadline=scene.deadline())


def test_nobody_is_told_to_log_in() -> None:
    with Scene() as scene, Registry(scene.config()) as client:
        with pytest.raises(Unauthorized) as caught:
            client.resolve(scene.ref, deadline=scene.deadline())
        assert f"unlade login {scene.registry.host}" in caught.value.next_step
        assert not caught.value.retryable


def test_an_unknown_scheme_is_a_refusal() -> None:
    with Scene(auth=None) as scene:
        scene.registry.fault(lambda q: Response(401, {"WWW-Authenticate": "Negotiate"}))
        with pytest.raises(Unauthorized):
            scene.client().resolve(scene.ref, deadline=scene.deadline())
        scene.assert_calm(2)


@pytest.mark.parametrize("auth", ["token", "basic"])
def test_logging_in(auth: str) -> None:
    with Scene(auth=auth) as scene, Registry(scene.config()) as client:
        client.check_login(scene.registry.host, ALICE, deadline=scene.deadline())
        for wrong in (WRONG, Credential(USER, "x")):
            with pytest.raises(Unauthorized):
                client.check_login(scene.registry.host, wrong, deadline=scene.deadline())
        assert all(request.path == "/v2/" for request in scene.registry.requests)


def test_fingerprints_of_clients() -> None:
    with Scene() as scene:
        nobody, alice, both = Several(), Several(ALICE), Several(ALICE, WRONG)
        prints = {Registry(scene.config(), source).fingerprint(scene.ref) for source in (nobody, alice, both)}
        assert len(prints) == 3


@pytest.mark.parametrize("auth", ["basic", "token"])
def test_a_client_for_somebody_else_shares_connections_and_nothing_more(auth: str) -> None:
    """V5: one process pulls for many pods; what one may do never rubs off on another."""
    with Scene(auth=auth) as scene:
        alice = scene.client()
        alice.resolve(scene.ref, deadline=scene.deadline())
        mallory = alice.with_credentials(Several(WRONG))
        nobody = alice.with_credentials(Several())
        for client in (mallory, nobody):
            with pytest.raises(Unauthorized):
                client.resolve(scene.ref, deadline=scene.deadline())
        assert alice.fingerprint(scene.ref) != mallory.fingerprint(scene.ref)
        asked = len(scene.registry.requests)
        alice.with_credentials(Several(ALICE)).resolve(scene.ref, deadline=scene.deadline())
        assert [request.status for request in scene.registry.requests[asked:]] == [200]
