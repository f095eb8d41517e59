"""A driver on a fake registry, and small artifacts to mount."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc
import pytest

from tests.fakes.driver import Driver
from tests.fakes.registry import FakeRegistry
from unlade.model import Descriptor
from unlade.model.mediatypes import ANNOTATION_TITLE

ARTIFACT = "application/vnd.example.content.v1"


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        yield registry


@pytest.fixture
def driver(tmp_path: Path, fake: FakeRegistry) -> Iterator[Driver]:
    with Driver(tmp_path, fake) as running:
        yield running


def refused(error: pytest.ExceptionInfo[grpc.RpcError], code: grpc.StatusCode, *words: str) -> None:
    """A call that ended with this code, and said these words."""
    assert error.value.code() == code, error.value.details()
    for word in words:
        assert word in error.value.details()


Put = Callable[..., Descriptor]


@pytest.fixture
def put(fake: FakeRegistry) -> Put:
    def artifact(
        repository: str, tag: str | None, files: Mapping[str, bytes], *, subject: Descriptor | None = None
    ) -> Descriptor:
        blobs = [
            fake.put_blob(repository, data, "application/octet-stream", {ANNOTATION_TITLE: name})
            for name, data in files.items()
        ]
        return fake.put_artifact(repository, tag, blobs, ARTIFACT, subject=subject)

    return artifact
