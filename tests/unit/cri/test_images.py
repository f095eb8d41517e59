"""The service between a kubelet and a containerd, both played by plain gRPC: who answers what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.rig.node.client import Client
from unlade.containerd import (
    ArtifactImage,
    Handler,
    Handlers,
    HeldImage,
    ImageTuple,
    OrdinaryImage,
    PullOptions,
)
from unlade.cri.api import images_pb2 as api
from unlade.cri.images import Images
from unlade.cri.observed import Metrics
from unlade.cri.ordinary import Ordinary
from unlade.cri.passthrough import IMAGE_SERVICE, Upstream, connect
from unlade.cri.server import ImageServer
from unlade.errors import NothingProduced
from unlade.model import Deadline, Digest, Platform, Reference
from unlade.registry import CredentialSource, Unreachable
from unlade.transfer import Progress, ProgressEvent

IMAGE = "sha256:" + "1" * 64
TREE = "sha256:" + "2" * 64
EMPTY = "sha256:" + "3" * 64
GUESTS = "sha256:" + "4" * 64
HOST = Platform.host()
GUEST = Platform("linux", "riscv64")
HANDLERS = Handlers(
    "runc", {name: Handler(name, GUEST if name == "guest" else HOST) for name in ("runc", "vm", "guest")}
)
ENTRY = Digest.parse("sha256:" + "e" * 64)


class FakeContainerd:
    """Names and IDs; pulls give the image, whatever is asked for."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.pulls: list[bytes] = []
        self.gets = IMAGE
        self.index = False

    def status(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        name = api.ImageStatusRequest.FromString(request).image.image
        answer = api.ImageStatusResponse()
        if name in self.names:
            answer.image.id = self.names[name]
            others = [other for other in self.names if self.names[other] == self.names[name]]
            answer.image.repo_tags.extend(other for other in others if not other.startswith("sha256:"))
        return bytes(answer.SerializeToString())

    def pull(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.pulls.append(request)
        name = api.PullImageRequest.FromString(request).image.image
        if "missing" in name:
            context.abort(grpc.StatusCode.NOT_FOUND, "containerd's own words")
        # By digest, a guest's entry: another image than the one the tag leads to here.
        gets = GUESTS if name.endswith(str(ENTRY)) and self.index else self.gets
        self.names |= {name: gets, gets: gets}
        return bytes(api.PullImageResponse(image_ref=gets).SerializeToString())

    def list(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        images = [api.Image(id=image) for image in sorted(set(self.names.values()))]
        return bytes(api.ListImagesResponse(images=images).SerializeToString())

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
    ) -> ArtifactImage | OrdinaryImage:
        self.asked.append({"handler": handler, "credentials": credentials, "options": options})
        tree = self.outcome(progress)
        if tree is None:
            wanted = reference if isinstance(reference, Reference) else Reference.parse(reference)
            return OrdinaryImage(wanted, HANDLERS.resolve(handler), ENTRY, Digest.parse(IMAGE))
        options = options or PullOptions()
        self.tuples[str(reference), handler or "runc", options.fingerprint()] = tree
        self.containerd.names[tree] = tree
        if handler in ("", "runc") and options.plain:
            self.containerd.names[str(reference)] = tree
        found = self.find(tree)
        assert found is not None
        return found

    def list(self) -> list[ArtifactImage]:
        return [found for tree in set(self.tuples.values()) if (found := self.find(tree))]

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
class FakeRecords:
    """Tuples of ordinary images."""

    containerd: FakeContainerd
    tuples: dict[tuple[str, str], str] = field(default_factory=dict)

    def get(self, image_id: str) -> HeldImage | None:
        leading = tuple(ImageTuple(*key) for key, image in self.tuples.items() if image == image_id)
        return HeldImage(image_id, "", leading, 0.0) if image_id in self.containerd.names else None

    def find(self, name: str, handler: str) -> HeldImage | None:
        image = self.tuples.get((name, handler))
        return self.get(image) if image else None

    def named(self, name: str) -> HeldImage | None:
        return next((self.get(image) for (other, _), image in self.tuples.items() if other == name), None)

    def recorded(self) -> list[HeldImage]:
        return [held for image in sorted(set(self.tuples.values())) if (held := self.get(image))]

    def record(self, image_id: str, made: OrdinaryImage, *, deadline: Deadline) -> HeldImage:
        for name in {str(made.reference), made.name}:
            self.tuples[name, made.handler.name] = image_id
        held = self.get(image_id)
        assert held is not None
        return held

    def remove(self, image_id: str, handler: str, names: Collection[str]) -> list[str] | None:
        self.tuples = {
            key: image for key, image in self.tuples.items() if image != image_id or key[1] != handler
        }
        if image_id in self.tuples.values():
            return []
        for name in (*names, image_id):
            del self.containerd.names[name]
        return [*names, image_id]

    def removed(self, held: HeldImage) -> None:
        self.tuples = {key: image for key, image in self.tuples.items() if image != held.id}


@dataclass
class Scene:
    """Everything that talks, and the client."""

    client: Client
    containerd: FakeContainerd
    artifacts: FakeArtifacts
    records: FakeRecords
    metrics: Metrics


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with _scene(tmp_path) as made:
        yield made


@contextmanager
def _scene(tmp_path: Path, *, tuple_aware: bool = False) -> Iterator[Scene]:
    containerd = FakeContainerd()
    below = grpc.server(ThreadPoolExecutor(4))
    calls = {
        "ImageStatus": containerd.status,
        "PullImage": containerd.pull,
        "RemoveImage": containerd.remove,
        "ListImages": containerd.list,
    }
    handlers = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()}
    below.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(IMAGE_SERVICE, handlers),))
    below.add_insecure_port(f"unix://{tmp_path}/containerd.sock")
    below.start()
    artifacts = FakeArtifacts(containerd)
    channel = connect(f"{tmp_path}/containerd.sock")
    upstream = Upstream(channel)
    metrics = Metrics()
    records = FakeRecords(containerd)
    ordinary = Ordinary(records, HANDLERS)
    images = Images(
        upstream,
        artifacts,
        ordinary,
        HANDLERS,
        metrics,
        is_image=lambda image: image.id in (IMAGE, GUESTS),
        tuple_aware=tuple_aware,
    )
    server = ImageServer(f"{tmp_path}/image.sock", upstream, images, metrics)
    server.start()
    client = Client(f"{tmp_path}/image.sock")
    yield Scene(client, containerd, artifacts, records, metrics)
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
    assert scene.client.pull("r.example/a:1", handler="vm") == IMAGE
    assert scene.client.status("r.example/a:1", handler="vm") is not None
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


def test_what_came_without_us_is_there_for_every_handler_of_the_host(scene: Scene) -> None:
    scene.containerd.names = {"r.example/a:1": IMAGE, IMAGE: IMAGE}
    for name in ("r.example/a:1", IMAGE):
        for handler in ("runc", "vm"):
            found = scene.client.status(name, handler=handler)
            assert found is not None
            assert found.id == IMAGE
        assert scene.client.status(name, handler="guest") is None


def _ordinary(scene: Scene) -> None:
    scene.artifacts.outcome = lambda _progress: None


def test_an_ordinary_image_is_there_for_whom_it_was_pulled(scene: Scene) -> None:
    """R1: containerd has it once, and each handler's pod pulls it for itself."""
    _ordinary(scene)
    scene.client.pull("r.example/a:1")
    for name in ("r.example/a:1", IMAGE):
        assert scene.client.status(name) is not None
        assert scene.client.status(name, handler="runc") is not None
        assert scene.client.status(name, handler="vm") is None
    assert scene.client.pull("r.example/a:1", handler="vm") == IMAGE
    asked = api.PullImageRequest.FromString(scene.containerd.pulls[-1]).image
    assert (asked.image, asked.runtime_handler) == (f"r.example/a@{ENTRY}", "vm")
    for name in ("r.example/a:1", IMAGE):
        assert scene.client.status(name, handler="vm") is not None


def test_a_tag_belongs_to_the_default_handler(scene: Scene) -> None:
    _ordinary(scene)
    scene.client.pull("r.example/a:1", handler="vm")
    assert scene.client.status("r.example/a:1") is None
    assert scene.client.status("r.example/a:1", handler="runc") is None
    assert scene.client.status("r.example/a:1", handler="vm") is not None


def test_guests_of_another_platform_get_their_own_entry(scene: Scene) -> None:
    """R3: containerd is asked for the entry by digest, since it would choose its host's."""
    _ordinary(scene)
    scene.containerd.index = True
    host, guest = scene.client.pull("r.example/a:1"), scene.client.pull("r.example/a:1", handler="guest")
    assert (host, guest) == (IMAGE, GUESTS)
    asked = api.PullImageRequest.FromString(scene.containerd.pulls[-1]).image
    assert (asked.image, asked.runtime_handler) == (f"r.example/a@{ENTRY}", "guest")
    for handler, expected in (("", host), ("runc", host), ("guest", guest)):
        found = scene.client.status("r.example/a:1", handler=handler)
        assert found is not None
        assert found.id == expected
    scene.client.remove("r.example/a:1", handler="guest")
    assert scene.client.status("r.example/a:1", handler="guest") is None
    assert scene.client.status("r.example/a:1", handler="runc") is not None


def test_guests_wait_for_a_registry_that_only_containerd_reaches(scene: Scene) -> None:
    scene.artifacts.outcome = _unreachable
    assert _refused(lambda: scene.client.pull("r.example/a:1", handler="guest"))[0] == (
        grpc.StatusCode.UNAVAILABLE
    )
    assert scene.containerd.pulls == []


def test_removal_of_ordinary_images_by_handler(scene: Scene) -> None:
    """R4: one tuple goes, the others stay; without a handler all of the ID."""
    _ordinary(scene)
    for handler in ("", "vm"):
        scene.client.pull("r.example/a:1", handler=handler)
    scene.client.remove("r.example/a:1", handler="vm")
    assert scene.client.status("r.example/a:1", handler="vm") is None
    assert scene.client.status("r.example/a:1", handler="runc") is not None
    scene.client.remove(IMAGE, handler="vm")
    assert scene.client.status(IMAGE) is not None
    scene.client.remove(IMAGE, handler="runc")
    assert scene.containerd.names == {}
    scene.client.remove(IMAGE, handler="runc")


def test_removal_without_a_handler_finds_another_handlers_image(scene: Scene) -> None:
    _ordinary(scene)
    scene.containerd.index = True
    scene.client.pull("r.example/a:1", handler="guest")
    scene.client.remove("r.example/a:1")
    assert scene.containerd.names == {}


def test_lists_that_name_a_handler(scene: Scene) -> None:
    """R1: its tuples alone; a stock kubelet's list names none and shows each ID once."""
    _ordinary(scene)
    scene.client.pull("r.example/a:1")
    scene.containerd.index = True
    scene.client.pull("r.example/a:1", handler="guest")
    scene.artifacts.outcome = lambda _progress: TREE
    scene.client.pull("r.example/tree:1", handler="vm")
    assert scene.client.images() == [IMAGE, TREE, GUESTS]
    assert scene.client.listed("runc") == [(IMAGE, "runc")]
    assert scene.client.listed("guest") == [(GUESTS, "guest")]
    assert scene.client.listed("vm") == [(TREE, "vm")]
    assert scene.client.listed("vm", "r.example/a:1") == []
    assert scene.client.listed("guest", "r.example/a:1") == [(GUESTS, "guest")]
    assert _refused(lambda: scene.client.listed("gone"))[0] == grpc.StatusCode.INVALID_ARGUMENT


def test_a_kubelet_that_knows_tuples_is_shown_each(tmp_path: Path) -> None:
    """R1: only where the configuration says so."""
    with _scene(tmp_path, tuple_aware=True) as scene:
        scene.containerd.names = {"r.example/old:1": EMPTY, EMPTY: EMPTY}
        _ordinary(scene)
        for handler in ("", "vm"):
            scene.client.pull("r.example/a:1", handler=handler)
        assert scene.client.listed("") == [(IMAGE, ""), (IMAGE, "vm"), (EMPTY, "")]
        assert scene.client.listed("vm") == [(IMAGE, "vm")]


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
