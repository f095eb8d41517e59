"""The service between a kubelet and a containerd, both played by plain gRPC: who answers what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.rig.node.client import Client
from unlade.containerd import ArtifactImage, Handler, Handlers, ImageTuple, PullOptions
from unlade.cri.api import images_pb2 as api
from unlade.cri.images import Images
from unlade.cri.observed import Metrics
from unlade.cri.passthrough import IMAGE_SERVICE, Upstream, connect
from unlade.cri.server import ImageServer
from unlade.errors import NothingProduced
from unlade.model import Deadline, Digest, Platform, Reference
from unlade.registry import CredentialSource, Unreachable
from unlade.transfer import Progress, ProgressEvent

IMAGE = "sha256:" + "1" * 64
TREE = "sha256:" + "2" * 64
EMPTY = "sha256:" + "3" * 64
HOST = Platform.host()
HANDLERS = Handlers("runc", {name: Handler(name, HOST) for name in ("runc", "vm")})


class FakeContainerd:
    """Names and IDs; pulls give the image, whatever is asked for."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.pulls: list[bytes] = []
        self.gets = IMAGE

    def status(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        name = api.ImageStatusRequest.FromString(request).image.image
        answer = api.ImageStatusResponse()
        if name in self.names:
            answer.image.id = self.names[name]
        return bytes(answer.SerializeToString())

    def pull(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.pulls.append(request)
        name = api.PullImageRequest.FromString(request).image.image
        if "missing" in name:
            context.abort(grpc.StatusCode.NOT_FOUND, "containerd's own words")
        self.names |= {name: self.gets, self.gets: self.gets}
        return bytes(api.PullImageResponse(image_ref=self.gets).SerializeToString())

    def remove(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        gone = self.names.get(api.RemoveImageRequest.FromString(request).image.image)
        self.names = {name: target for name, target in self.names.items() if target != gone}
        return b""


@dataclass
class FakeArtifacts:
    """Trees by tuple; `outcome` decides a pull."""

    containerd: FakeContainerd
    tuples: dict[tuple[str, str, str], str] = field(default_factory=dict)
    outcome: Callable[[Progress], str | None] = lambda _progress: TREE
    asked: list[dict[str, Any]] = field(default_factory=list)

    def pull(
        self,
        reference: Reference | str,
        *,
        handler: str = "",
        credentials: CredentialSource | None = None,
        options: PullOptions | None = None,
        deadline: Deadline | None = None,
        progress: Progress = lambda _event: None,
    ) -> ArtifactImage | None:
        self.asked.append({"handler": handler, "credentials": credentials, "options": options})
        tree = self.outcome(progress)
        if tree is None:
            return None
        options = options or PullOptions()
        self.tuples[str(reference), handler or "runc", options.fingerprint()] = tree
        self.containerd.names[tree] = tree
        if handler in ("", "runc") and options.plain:
            self.containerd.names[str(reference)] = tree
        return self.find(tree)

    def find(
        self, name_or_id: str, *, handler: str | None = None, options: PullOptions | None = None
    ) -> ArtifactImage | None:
        if name_or_id.startswith("sha256:"):
            leading = [
                key
                for key, tree in self.tuples.items()
                if tree == name_or_id and handler in (None, key[1])
            ]  # fmt: skip
            if not leading:
                return None
            tree = name_or_id
        else:
            key = (name_or_id, handler or "runc", (options or PullOptions()).fingerprint())
            if key not in self.tuples:
                return None
            tree, leading = self.tuples[key], [key]
        tuples = tuple(ImageTuple(*key) for key in leading)
        return ArtifactImage(tree, Digest.parse(tree), "oras", 1, 1, tree, tuples, 0.0)

    def remove(self, name_or_id: str, *, handler: str | None = None) -> bool:
        found = self.find(name_or_id, handler=handler)
        if found is None:
            return False
        self.tuples = {
            key: tree
            for key, tree in self.tuples.items()
            if tree != found.id or (handler is not None and key[1] != handler)
        }
        if found.id not in self.tuples.values():
            names = self.containerd.names.items()
            self.containerd.names = {name: tree for name, tree in names if tree != found.id}
        return True


@dataclass
class Scene:
    """Everything that talks, and the client."""

    client: Client
    containerd: FakeContainerd
    artifacts: FakeArtifacts
    metrics: Metrics


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    containerd = FakeContainerd()
    below = grpc.server(ThreadPoolExecutor(4))
    calls = {"ImageStatus": containerd.status, "PullImage": containerd.pull, "RemoveImage": containerd.remove}
    handlers = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()}
    below.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(IMAGE_SERVICE, handlers),))
    below.add_insecure_port(f"unix://{tmp_path}/containerd.sock")
    below.start()
    artifacts = FakeArtifacts(containerd)
    channel = connect(f"{tmp_path}/containerd.sock")
    upstream = Upstream(channel)
    metrics = Metrics()
    images = Images(upstream, artifacts, HANDLERS, metrics, is_image=lambda image: image.id == IMAGE)
    server = ImageServer(f"{tmp_path}/image.sock", upstream, images, metrics)
    server.start()
    client = Client(f"{tmp_path}/image.sock")
    yield Scene(client, containerd, artifacts, metrics)
    client.channel.close()
    server.close(0)
    channel.close()
    below.stop(0).wait()


def _refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_an_ordinary_image_is_pulled_by_containerd_with_the_callers_own_bytes(scene: Scene) -> None:
    scene.artifacts.outcome = lambda _progress: None
    spec = api.ImageSpec(image="r.example/a:1")
    request = api.PullImageRequest(image=spec).SerializeToString() + b"\xfa\xff\x07\x05later"
    method = scene.client.channel.unary_unary(f"/{IMAGE_SERVICE}/PullImage")
    assert api.PullImageResponse.FromString(method(request, timeout=10)).image_ref == IMAGE
    assert scene.containerd.pulls == [request]


def test_an_artifact_is_answered_by_its_id(scene: Scene) -> None:
    auth = api.AuthConfig(username="u", password="p")
    assert scene.client.pull("r.example/a:1", auth=auth) == TREE
    assert scene.containerd.pulls == []
    source = scene.artifacts.asked[0]["credentials"]
    assert source.lookup("r.example", "a")[0].username == "u"
    status = scene.client.status("r.example/a:1")
    assert status is not None
    assert status.id == TREE


def test_unknown_handlers_are_refused_everywhere(scene: Scene) -> None:
    for call in (scene.client.pull, scene.client.status, scene.client.remove):
        code, words = _refused(lambda call=call: call("r.example/a:1", handler="gone"))  # type: ignore[misc]
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "'gone'" in words
    assert scene.artifacts.asked == []


def test_errors_tell_what_and_what_next(scene: Scene) -> None:
    def fail(_progress: Progress) -> str:
        raise NothingProduced("no file in it", next_step="name its layers")

    scene.artifacts.outcome = fail
    told = _refused(lambda: scene.client.pull("r.example/a:1"))
    assert told == (grpc.StatusCode.FAILED_PRECONDITION, "no file in it; next: name its layers")
    assert scene.containerd.pulls == []


def _unreachable(_progress: Progress) -> str:
    raise Unreachable("no route", next_step="look at the network")


def test_what_we_cannot_reach_containerd_may(scene: Scene) -> None:
    scene.artifacts.outcome = _unreachable
    assert scene.client.pull("r.example/a:1") == IMAGE
    assert _refused(lambda: scene.client.pull("r.example/missing:1"))[1] == "containerd's own words"


def test_an_artifact_never_passes_as_an_empty_image(scene: Scene) -> None:
    """V14: containerd would record it and mount nothing."""
    scene.artifacts.outcome = _unreachable
    scene.containerd.gets = EMPTY
    code, words = _refused(lambda: scene.client.pull("r.example/a:1"))
    assert (code, words) == (grpc.StatusCode.UNAVAILABLE, "no route; next: look at the network")
    assert scene.containerd.names == {}


def test_what_containerd_took_for_an_image_before_we_came_is_pulled_again(scene: Scene) -> None:
    scene.containerd.names = {"r.example/a:1": EMPTY, EMPTY: EMPTY}
    assert scene.client.status("r.example/a:1") is None
    assert scene.client.status("r.example/a:1", handler="vm") is None
    scene.client.pull("r.example/a:1")
    found = scene.client.status("r.example/a:1")
    assert found is not None
    assert found.id == TREE


def test_known_artifacts_and_options_are_not_left_to_containerd(scene: Scene) -> None:
    def cut(progress: Progress) -> str:
        progress(ProgressEvent("start", "r.example/a:1", Digest.parse(TREE), 0, 10))
        return _unreachable(progress)

    scene.artifacts.outcome = cut
    assert _refused(lambda: scene.client.pull("r.example/a:1"))[0] == grpc.StatusCode.UNAVAILABLE
    scene.artifacts.outcome = _unreachable
    options = {"unlade.dev/for": "r.example/a:1", "unlade.dev/only": "x"}
    told = _refused(lambda: scene.client.pull("r.example/a:1", annotations=options))
    assert told[0] == grpc.StatusCode.UNAVAILABLE
    assert scene.containerd.pulls == []


def test_status_is_by_tuple(scene: Scene) -> None:
    """R1: what was pulled for one handler or with options is not there for another."""
    options = {"unlade.dev/for": "r.example/a:1", "unlade.dev/only": "x"}
    scene.client.pull("r.example/a:1", handler="vm")
    assert scene.client.status("r.example/a:1") is None
    assert scene.client.status("r.example/a:1", handler="runc") is None
    assert scene.client.status("r.example/a:1", annotations=options) is None
    found = scene.client.status("r.example/a:1", handler="vm")
    assert found is not None
    assert found.id == TREE
    assert scene.client.status(TREE) is not None
    assert scene.client.status(TREE, handler="vm") is not None
    assert scene.client.status(TREE, handler="runc") is None
    scene.client.pull("r.example/a:1", annotations=options)
    assert scene.client.status("r.example/a:1", annotations=options) is not None
    assert scene.client.status("r.example/a:1") is None


def test_ordinary_images_are_there_for_every_handler(scene: Scene) -> None:
    scene.containerd.names = {"r.example/a:1": IMAGE, IMAGE: IMAGE}
    for name in ("r.example/a:1", IMAGE):
        found = scene.client.status(name, handler="vm")
        assert found is not None
        assert found.id == IMAGE


def test_removal_by_handler_leaves_the_others(scene: Scene) -> None:
    """R4."""
    scene.client.pull("r.example/a:1")
    scene.client.pull("r.example/a:1", handler="vm")
    scene.client.remove(TREE, handler="vm")
    assert scene.client.status("r.example/a:1", handler="vm") is None
    assert scene.client.status("r.example/a:1") is not None
    scene.client.remove("r.example/a:1", handler="vm")
    assert scene.client.status("r.example/a:1") is not None
    scene.client.remove(TREE)
    assert scene.client.status(TREE) is None
    assert scene.artifacts.tuples == {}
    scene.client.remove(TREE)


def test_removal_of_an_ordinary_image_is_containerds(scene: Scene) -> None:
    scene.containerd.names = {"r.example/a:1": IMAGE, IMAGE: IMAGE}
    scene.client.remove("r.example/a:1")
    assert scene.containerd.names == {}


def test_the_numbers_and_the_log(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pod = api.PodSandboxConfig(metadata=api.PodSandboxMetadata(name="p", namespace="n", uid="u"))
    request = api.PullImageRequest(
        image=api.ImageSpec(image="r.example/a:1"),
        sandbox_config=pod,
        auth=api.AuthConfig(username="alice", password="hunter2"),
    )
    scene.client.call("PullImage", request, api.PullImageResponse)
    scene.artifacts.outcome = lambda _progress: None
    _refused(lambda: scene.client.pull("r.example/missing:1"))
    _refused(lambda: scene.client.pull("r.example/a:1", handler="gone"))
    text = scene.metrics.text().decode()
    assert 'unlade_node_pulls_total{result="artifact"} 1.0' in text
    assert 'unlade_node_call_seconds_count{call="PullImage",code="NOT_FOUND"} 1.0' in text
    assert 'unlade_node_errors_total{code="unknown-handler"} 1.0' in text
    assert 'unlade_node_pulls_in_flight{state="running"} 0.0' in text
    about = next(record.about for record in caplog.records if record.message == "pulled")  # type: ignore[attr-defined]
    assert about["pod"] == "n/p"
    assert about["reference"] == "r.example/a:1"
    assert "hunter2" not in str([record.__dict__ for record in caplog.records])
