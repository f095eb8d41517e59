"""Requests: credentials that change, answers that are not what was asked for."""

from pathlib import Path

import pytest
from kubernetes import client as kube

from tests.fakes.kube_api import Answer, FakeKubeApi, status
from unlade.controllers.api import ApiError, ApiServer, load_client
from unlade.errors import InvalidInput


def test_a_replaced_token_is_used_after_one_refusal(api: FakeKubeApi, client: kube.ApiClient) -> None:
    client.configuration.api_key["BearerToken"] = "Bearer old"
    server = ApiServer(client)
    server.read("GET", "/api/v1/pods")
    client.configuration.api_key["BearerToken"] = "Bearer new"
    server.read("GET", "/api/v1/pods")
    refused = [status(401, "Unauthorized")]
    api.fault = lambda _request: refused.pop() if refused else None
    with pytest.raises(ApiError) as error:
        server.read("GET", "/api/v1/pods")
    assert error.value.status == 401
    server.read("GET", "/api/v1/pods")
    assert [request.authorization for request in api.requests] == [
        "Bearer old",
        "Bearer old",
        "Bearer old",
        "Bearer new",
    ]


def test_what_the_server_says_is_what_the_error_says(api: FakeKubeApi, server: ApiServer) -> None:
    for answer, message, reason in (
        (status(403, "Forbidden", "exceeded quota"), "exceeded quota", "Forbidden"),
        (Answer(502, b"<html>gateway</html>"), "HTTP 502: <html>gateway</html>", ""),
        (Answer(500, b""), "HTTP 500: ", ""),
        (Answer(400, b"[1]"), "HTTP 400: [1]", ""),
    ):
        api.fault = lambda _request, answer=answer: answer  # type: ignore[misc]
        with pytest.raises(ApiError) as error:
            server.read("GET", "/api/v1/pods")
        assert (str(error.value), error.value.reason) == (message, reason)
        assert error.value.status == answer.status
        assert not error.value.unanswered


def test_no_answer_is_an_error_of_its_own(api: FakeKubeApi, server: ApiServer) -> None:
    api.refuse()
    with pytest.raises(ApiError) as error:
        server.read("GET", "/api/v1/pods")
    assert error.value.unanswered
    assert error.value.next_step


def test_a_redirect_is_not_followed_with_credentials(api: FakeKubeApi, server: ApiServer) -> None:
    api.fault = lambda _request: Answer(302, b"", {"Location": f"{api.url}/elsewhere"})
    with pytest.raises(ApiError) as error:
        server.request("GET", "/api/v1/pods")
    assert error.value.status == 302
    assert [request.path for request in api.requests] == ["/api/v1/pods"]


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as error:
        load_client(kubeconfig=str(tmp_path / "none"), context=None, connections=1, user_agent="test")
    assert "--kubeconfig" in error.value.next_step
