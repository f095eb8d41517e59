"""A fake API server to break, and a connection to it."""

from collections.abc import Iterator

import pytest
from kubernetes import client as kube

from tests.fakes.kube_api import FakeKubeApi
from unlade.controllers.api import ApiServer


@pytest.fixture
def api() -> Iterator[FakeKubeApi]:
    with FakeKubeApi() as fake:
        yield fake


@pytest.fixture
def client(api: FakeKubeApi) -> Iterator[kube.ApiClient]:
    configuration = kube.Configuration(host=api.url)
    configuration.retries = False
    configuration.connection_pool_maxsize = 20
    made = kube.ApiClient(configuration)
    yield made
    made.close()


@pytest.fixture
def server(client: kube.ApiClient) -> ApiServer:
    return ApiServer(client)
