"""Artifacts as containerd's own CRI plugin shows them, with nobody in between: what a kubelet is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from rig.kube import until
from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.daemon import Daemon
from tests.rig.containerd.test_artifacts import left, nothing, titled
from unlade.containerd import ArtifactImage, Artifacts, Containerd, Handlers, PullOptions
from unlade.cri.api import images_pb2 as api
from unlade.registry import Registry, RegistryConfig

pytestmark = pytest.mark.root

Ask = Callable[[str, Any, Any], Any]


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        yield registry


@pytest.fixture
def connection(daemon: Daemon, tmp_path: Path) -> Iterator[Containerd]:
    """The CRI plugin has one namespace."""
    with Containerd(daemon.address, namespace="k8s.io", state=tmp_path / "state") as made:
        yield made


@pytest.fixture
def artifacts(connection: Containerd, fake: FakeRegistry) -> Iterator[Artifacts]:
    with (
        Registry(RegistryConfig(plain_http=frozenset({fake.host}))) as registry,
        Artifacts(connection, registry, Handlers.single(), jobs=1) as running,
    ):
        yield running


@pytest.fixture
def ask(daemon: Daemon) -> Iterator[Ask]:
    with grpc.insecure_channel(f"unix://{daemon.address}") as channel:

        def call(method: str, request: Any, answer: Any) -> Any:
            stub = channel.unary_unary(
                f"/runtime.v1.ImageService/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
            return stub(request, timeout=20, wait_for_ready=True)

        yield call


def status(ask: Ask, name: str) -> api.Image | None:
    answer = ask(
        "ImageStatus", api.ImageStatusRequest(image=api.ImageSpec(image=name)), api.ImageStatusResponse
    )
    return answer.image if answer.HasField("image") else None


def listed(ask: Ask) -> dict[str, api.Image]:
    answer = ask("ListImages", api.ListImagesRequest(), api.ListImagesResponse)
    return {image.id: image for image in answer.images}


def test_what_a_kubelet_is_told(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd, ask: Ask
) -> None:
    """One entry per ID, with every name and the true size; it survives a restart of containerd."""
    pushed = titled(fake, {"weights.bin": b"w" * 123_456, "config.json": b"{}"})
    reference = fake.reference("models/tiny", "v1")
    pinned = f"{reference.name}@{pushed.digest}"
    image = artifacts.pull(reference)
    assert isinstance(image, ArtifactImage)
    for round_ in ("pulled", "restarted"):
        for name in (str(reference), pinned, image.id):
            told = until(f"{name} {round_}", partial(status, ask, name), seconds=10)
            assert told.id == image.id
        told = listed(ask)[image.id]
        assert list(told.repo_tags) == [str(reference)]
        assert list(told.repo_digests) == [pinned]
        # containerd adds the config and the manifest, some hundred bytes.
        assert 123_458 <= told.size < 123_458 + 2000
        assert not told.spec.runtime_handler
        daemon.restart(kill=True)
    assert artifacts.find(image.id) == image
    assert artifacts.remove(image.id)
    until("it is gone", lambda: image.id not in listed(ask), seconds=10)


def test_a_part_is_not_shown_under_the_name_of_the_whole(
    artifacts: Artifacts, fake: FakeRegistry, ask: Ask
) -> None:
    titled(fake, {"weights.bin": b"w", "config.json": b"{}"})
    reference = fake.reference("models/tiny", "v1")
    part = artifacts.pull(reference, options=PullOptions(only=("*.json",)))
    assert isinstance(part, ArtifactImage)
    until("the image by its ID", lambda: status(ask, part.id), seconds=10)
    assert status(ask, str(reference)) is None
    assert artifacts.remove(part.id)


def test_removed_by_containerd_alone(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd, ask: Ask
) -> None:
    """V6, V21: with the agent off, the kubelet's collection reaches containerd, and takes all of it."""
    before = daemon.directories()
    titled(fake, {"weights.bin": b"w" * 1000})
    image = artifacts.pull(fake.reference("models/tiny", "v1"))
    assert isinstance(image, ArtifactImage)
    until("containerd knows it", lambda: status(ask, image.id), seconds=10)
    ask("RemoveImage", api.RemoveImageRequest(image=api.ImageSpec(image=image.id)), api.RemoveImageResponse)
    artifacts.collect()
    assert artifacts.find(image.id) is None
    assert left(daemon, connection) == nothing()
    assert daemon.directories() == before
    assert artifacts.recover().images == ()
