"""Artifacts in a real containerd: mountable, recorded, found again, removed (V1, V6, V7, V11, V14, R1-R6)."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.corpus import Artifact, corpus, differences, snapshot
from tests.corpus.pushing import push
from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.conftest import Connect
from tests.rig.containerd.daemon import Daemon
from unlade.containerd import (
    ArtifactImage,
    Artifacts,
    Containerd,
    ContainerdTrees,
    Handler,
    Handlers,
    OrdinaryImage,
    PullOptions,
    SnapshotterUnsupported,
    UnknownHandler,
    leases,
)
from unlade.errors import IntegrityError, NothingProduced
from unlade.model import Descriptor, Digest, Platform
from unlade.model.mediatypes import ANNOTATION_TITLE, OCI_INDEX
from unlade.registry import NotFound, Registry, RegistryConfig, Unauthorized

pytestmark = pytest.mark.root

AMD64, ARM64 = Platform("linux", "amd64"), Platform("linux", "arm64")
HANDLERS = Handlers(
    "runc",
    {
        "runc": Handler("runc", AMD64),
        "second": Handler("second", AMD64),
        "guest": Handler("guest", ARM64),
        "plain": Handler("plain", AMD64, "native"),
        "blocks": Handler("blocks", AMD64, "no-such-snapshotter"),
    },
)
REPO = "models/tiny"


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        yield registry


@pytest.fixture
def registry(fake: FakeRegistry) -> Iterator[Registry]:
    with Registry(RegistryConfig(plain_http=frozenset({fake.host}))) as client:
        yield client


@pytest.fixture
def artifacts(connection: Containerd, registry: Registry) -> Iterator[Artifacts]:
    with Artifacts(connection, registry, HANDLERS, jobs=2) as running:
        yield running


@pytest.fixture
def mounted(daemon: Daemon, connection: Containerd, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Mounts an image as containerd's own client does, by its record alone; gives the directory."""
    namespace = connection.namespace
    with ExitStack() as undo:

        def mount(name: str, snapshotter: str = "overlayfs") -> str:
            point = tmp_path / f"mounted-{len(list(tmp_path.iterdir()))}"
            point.mkdir()
            arguments = ("images", "mount", "--snapshotter", snapshotter, name, str(point))
            done = daemon.ctr("-n", namespace, *arguments, check=False)
            assert done.returncode == 0, done.stderr.decode()
            undo.callback(daemon.ctr, "-n", namespace, "images", "unmount", "--rm", str(point))
            return str(point)

        yield mount


def titled(fake: FakeRegistry, files: dict[str, bytes], tag: str = "v1", repo: str = REPO) -> Descriptor:
    """Push an artifact of titled files."""
    layers = [
        Descriptor(
            media_type="application/vnd.example.weights",
            digest=blob.digest,
            size=blob.size,
            annotations={ANNOTATION_TITLE: name},
        )
        for name, data in files.items()
        for blob in [fake.put_blob(repo, data)]
    ]
    return fake.put_artifact(repo, tag, layers, "application/vnd.example.model")


def left(daemon: Daemon, connection: Containerd) -> dict[str, list[str]]:
    """Everything that a namespace holds, as ctr lists it."""
    names = connection.namespace
    return {
        "images": daemon.lines(names, "images", "ls", "-q"),
        "leases": daemon.lines(names, "leases", "ls", "-q"),
        "content": daemon.lines(names, "content", "ls", "-q"),
        "overlayfs": daemon.lines(names, "snapshots", "--snapshotter", "overlayfs", "ls"),
        "native": daemon.lines(names, "snapshots", "--snapshotter", "native", "ls"),
    }


def nothing() -> dict[str, list[str]]:
    return {"images": [], "leases": [], "content": [], "overlayfs": [], "native": []}


def _options(artifact: Artifact) -> PullOptions:
    return PullOptions(
        unpack=artifact.options.unpack,
        only=artifact.options.only,
        as_file=artifact.options.as_file,
        artifact_type=artifact.artifact_type or "",
        annotations=artifact.annotations,
    )


def pull(artifacts: Artifacts, reference: object, **how: Any) -> ArtifactImage:
    image = artifacts.pull(str(reference), **how)
    assert isinstance(image, ArtifactImage)
    return image


@pytest.mark.parametrize("artifact", corpus(), ids=lambda artifact: artifact.name)
def test_every_format_is_mounted_by_containerd(
    artifact: Artifact,
    fake: FakeRegistry,
    daemon: Daemon,
    connection: Containerd,
    registry: Registry,
    mounted: Callable[[str], str],
) -> None:
    repo = f"formats/{artifact.name}"
    push(fake.host, repo, artifact)
    handlers = Handlers.single(platform=Platform.parse(artifact.platform))
    with Artifacts(connection, registry, handlers, jobs=2) as artifacts:
        reference = fake.reference(repo, "v1")
        if artifact.error is not None:
            with pytest.raises(artifact.error) as caught:
                artifacts.pull(reference, options=_options(artifact))
            assert caught.value.next_step
            assert left(daemon, connection) == nothing()
            return
        image = artifacts.pull(reference, options=_options(artifact))
        if isinstance(image, OrdinaryImage):
            assert artifact.family == "image"
            assert left(daemon, connection) == nothing()
            return
        assert artifact.tree is not None
        assert image.family == artifact.family
        assert differences(artifact.tree, snapshot(mounted(image.id))) == []
        files = [node.content for node in artifact.tree.values() if node.content is not None]
        assert image.size == sum(map(len, files))


def test_records_and_what_they_say(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    pushed = titled(fake, {"weights.bin": b"w" * 100_000, "config.json": b"{}"})
    reference = fake.reference(REPO, "v1")
    image = pull(artifacts, reference)
    pinned = f"{reference.name}@{pushed.digest}"
    assert (image.size, image.entries, image.cached) == (100_002, 2, False)
    assert (image.repo_tags, image.repo_digests) == ((str(reference),), (pinned,))
    assert image.handlers == {"runc"}
    assert {one.manifest for one in image.tuples} == {str(pushed.digest)}
    held = left(daemon, connection)
    assert sorted(held["images"]) == sorted([str(reference), pinned, image.id])
    assert held["leases"] == []
    assert len(held["overlayfs"]) == 1
    assert len(held["content"]) == 3, "config, manifest, file list: no blob is kept beside the tree"
    for name in (str(reference), pinned, image.id):
        assert artifacts.find(name) == image
    assert artifacts.list() == [image]
    assert artifacts.find("example.test/other:v1") is None
    assert artifacts.find("sha256:" + "0" * 64) is None
    artifacts.collect()
    assert left(daemon, connection) == held


def test_the_manifest_that_containerd_reads(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    """The size that the kubelet adds up is the content's; the config embeds the tree's key."""
    titled(fake, {"weights.bin": b"w" * 100_000})
    image = pull(artifacts, fake.reference(REPO, "v1"))
    get = ("-n", connection.namespace, "content", "get")
    manifest = json.loads(daemon.ctr(*get, image.target).stdout)
    config = json.loads(daemon.ctr(*get, image.id).stdout)
    assert [layer["size"] for layer in manifest["layers"]] == [100_000]
    assert config["config"]["Labels"] == {"unlade.dev/tree": str(image.tree)}
    assert config["rootfs"]["diff_ids"] != [str(image.tree)], "a tree's key does not name its snapshot (V5)"


def test_a_second_pull_fetches_and_writes_nothing(
    artifacts: Artifacts, fake: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    titled(fake, {"weights.bin": b"again" * 1000})
    first = pull(artifacts, fake.reference(REPO, "v1"))
    asked = len(fake.requests)
    calls: list[str] = []
    call = artifacts.containerd.call

    def counting(method: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(method.path.rpartition("/")[2])
        return call(method, *arguments, **named)

    monkeypatch.setattr(artifacts.containerd, "call", counting)
    again = pull(artifacts, fake.reference(REPO, "v1"))
    assert again == first and again.cached
    assert sorted(calls) == ["Get", "Get", "Get", "Stat"], "records by ID, tag and digest; the snapshot"
    assert [request.path for request in fake.requests[asked:]] == [f"/v2/{REPO}/manifests/v1"]


def test_many_pods_one_download(artifacts: Artifacts, fake: FakeRegistry) -> None:
    titled(fake, {"weights.bin": b"many" * 100_000}, tag="many")
    asked = len(fake.requests)
    with ThreadPoolExecutor(20) as pool:
        images = list(pool.map(lambda _: pull(artifacts, fake.reference(REPO, "many")), range(40)))
    assert len({image.id for image in images}) == 1
    assert sum(not image.cached for image in images) == 1
    blobs = [one for one in fake.requests[asked:] if "/blobs/" in one.path and one.method == "GET"]
    assert len([one for one in blobs if one.status == 200]) <= 2, "the blob, and the look at its first bytes"


def test_same_bytes_for_two_handlers_are_stored_once(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    """R1, R4: two tuples, one image; removing one by its handler leaves the other."""
    titled(fake, {"weights.bin": b"shared"})
    reference = str(fake.reference(REPO, "v1"))
    first = pull(artifacts, reference)
    second = pull(artifacts, reference, handler="second")
    assert second.id == first.id and second.cached
    assert second.handlers == {"runc", "second"}
    assert sum(image.size for image in artifacts.list()) == 6
    assert len(left(daemon, connection)["overlayfs"]) == 1
    assert artifacts.find(reference, handler="second") == second
    assert artifacts.remove(reference, handler="runc")
    assert artifacts.find(reference) is None
    kept = artifacts.find(reference, handler="second")
    assert kept is not None and kept.handlers == {"second"}
    assert len(left(daemon, connection)["overlayfs"]) == 1
    assert not artifacts.remove(reference, handler="runc")
    assert artifacts.remove(first.id, handler="second")
    assert left(daemon, connection) == nothing()


def test_a_handler_decides_the_entry_of_an_index(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    """R3, V11: one reference, two platforms, two images; index and child both name what was pulled."""
    children = {}
    for platform in (AMD64, ARM64):
        child = titled(fake, {"model.bin": str(platform).encode()}, tag=f"child-{platform.architecture}")
        children[platform] = child.digest
    entries = [
        {
            "mediaType": child.media_type,
            "digest": str(child.digest),
            "size": child.size,
            "platform": {"os": platform.os, "architecture": platform.architecture},
        }
        for platform in (AMD64, ARM64)
        for child in [fake_child(fake, platform)]
    ]
    index = fake.put_manifest(
        REPO, "multi", {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    )
    reference = str(fake.reference(REPO, "multi"))
    host, guest = pull(artifacts, reference), pull(artifacts, reference, handler="guest")
    assert host.id != guest.id and host.tree != guest.tree
    name = fake.reference(REPO, "multi").name
    for platform, image, handler in ((AMD64, host, "runc"), (ARM64, guest, "guest")):
        assert image.repo_digests == tuple(sorted([f"{name}@{index.digest}", f"{name}@{children[platform]}"]))
        for named in (reference, *image.repo_digests):
            assert artifacts.find(named, handler=handler) == image
        assert {one.platform for one in image.tuples} == {str(platform)}
    assert artifacts.find(guest.id, handler="runc") is None
    assert artifacts.remove(reference, handler="guest")
    assert artifacts.find(reference) == host
    assert artifacts.find(guest.id) is None
    assert artifacts.remove(reference)
    assert left(daemon, connection) == nothing()


def fake_child(fake: FakeRegistry, platform: Platform) -> Descriptor:
    return titled(fake, {"model.bin": str(platform).encode()}, tag=f"child-{platform.architecture}")


def test_a_handler_with_a_snapshotter_of_its_own(
    artifacts: Artifacts,
    fake: FakeRegistry,
    daemon: Daemon,
    connection: Containerd,
    mounted: Callable[..., str],
) -> None:
    """R6: the tree is where the handler's containers look for it, under the same image ID."""
    titled(fake, {"weights.bin": b"native"})
    reference = str(fake.reference(REPO, "v1"))
    first = pull(artifacts, reference)
    second = pull(artifacts, reference, handler="plain")
    assert second.id == first.id and not second.cached
    assert second.snapshotters == {"overlayfs", "native"}
    held = left(daemon, connection)
    assert (len(held["overlayfs"]), len(held["native"])) == (1, 1)
    assert snapshot(mounted(first.id, "native"))["weights.bin"].content == b"native"
    assert artifacts.remove(reference, handler="runc")
    assert (left(daemon, connection)["overlayfs"], artifacts.find(reference)) == ([], None)
    kept = artifacts.find(reference, handler="plain")
    assert kept is not None and kept.snapshotters == {"native"}


def test_a_kubelet_that_does_not_say_the_handler(
    connection: Containerd, registry: Registry, fake: FakeRegistry, mounted: Callable[..., str]
) -> None:
    """R6 with the gate off: `everywhere` puts the tree where each handler of the platform looks for it."""
    titled(fake, {"weights.bin": b"everywhere"})
    known = {name: HANDLERS.known[name] for name in ("runc", "guest", "plain")}
    with Artifacts(connection, registry, Handlers("runc", known), jobs=1, everywhere=True) as artifacts:
        reference = str(fake.reference(REPO, "v1"))
        image = pull(artifacts, reference)
        assert image.snapshotters == {"overlayfs", "native"}
        for snapshotter in ("overlayfs", "native"):
            assert snapshot(mounted(image.id, snapshotter))["weights.bin"].content == b"everywhere"
        assert pull(artifacts, reference).cached
        assert artifacts.remove(reference)


def test_handlers_and_snapshotters_that_are_not_there(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    titled(fake, {"weights.bin": b"x"})
    reference = fake.reference(REPO, "v1")
    with pytest.raises(UnknownHandler, match="kata"):
        artifacts.pull(reference, handler="kata")
    with pytest.raises(UnknownHandler):
        artifacts.find(str(reference), handler="kata")
    with pytest.raises(SnapshotterUnsupported, match="no-such-snapshotter"):
        artifacts.pull(reference, handler="blocks")
    assert left(daemon, connection) == nothing()


def test_options_have_trees_of_their_own(
    artifacts: Artifacts, fake: FakeRegistry, mounted: Callable[[str], str]
) -> None:
    """V19: one pod's options never change what another's reference means."""
    titled(fake, {"weights.bin": b"w", "config.json": b"{}"})
    reference = str(fake.reference(REPO, "v1"))
    some = PullOptions(only=("*.json",))
    part = pull(artifacts, reference, options=some)
    assert artifacts.find(reference) is None, "a part is not the whole"
    assert artifacts.find(reference, options=some) == part
    whole = pull(artifacts, reference)
    assert whole.id != part.id
    assert sorted(snapshot(mounted(part.id))) == ["config.json"]
    assert sorted(snapshot(mounted(whole.id))) == ["config.json", "weights.bin"]
    assert (artifacts.find(reference), artifacts.find(reference, options=some)) == (whole, part)


def test_a_moved_tag(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    old_digest = titled(fake, {"weights.bin": b"old"}).digest
    reference = fake.reference(REPO, "v1")
    old = pull(artifacts, reference)
    titled(fake, {"weights.bin": b"new"})
    new = pull(artifacts, reference)
    assert artifacts.find(str(reference)) == new
    kept = artifacts.find(f"{reference.name}@{old_digest}")
    assert kept is not None and kept.id == old.id and kept.repo_tags == ()
    assert artifacts.recover().images == (), "an image that only its digest names is whole"
    assert artifacts.remove(old.id)
    assert artifacts.find(str(reference)) == new
    assert artifacts.remove(str(reference))
    assert left(daemon, connection) == nothing()


def test_nothing_produced_leaves_nothing(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    fake.put_artifact(REPO, "empty", [], "application/vnd.example.nothing")
    with pytest.raises(NothingProduced) as caught:
        artifacts.pull(fake.reference(REPO, "empty"))
    assert caught.value.next_step
    assert left(daemon, connection) == nothing()


def test_wrong_bytes_leave_nothing(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    before = daemon.directories()
    good = fake.put_blob(REPO, b"x" * 50_000)
    lie = Descriptor(
        media_type="application/vnd.example.weights",
        digest=good.digest,
        size=good.size,
        annotations={ANNOTATION_TITLE: "weights.bin"},
    )
    fake.put_artifact(REPO, "bad", [lie], "application/vnd.example.model")
    fake.repository(REPO).blobs[str(good.digest)] = b"y" * 50_000
    with pytest.raises(IntegrityError):
        artifacts.pull(fake.reference(REPO, "bad"))
    assert left(daemon, connection) == nothing()
    assert daemon.directories() == before, "the disk has its space back"


def test_other_credentials_are_asked_for_again(
    connection: Containerd, daemon: Daemon, tmp_path: Path
) -> None:
    """V5: what one tenant pulled is not handed to another who may not."""
    from unlade.registry import Credential, StaticCredentials

    with (
        FakeRegistry(users={"alice": "secret"}) as private,
        Registry(RegistryConfig(plain_http=frozenset({private.host}))) as registry,
        Artifacts(connection, registry, HANDLERS, jobs=2) as artifacts,
    ):
        titled(private, {"weights.bin": b"private"})
        reference = private.reference(REPO, "v1")
        alice = StaticCredentials({private.host: Credential("alice", "secret")})
        mallory = StaticCredentials({private.host: Credential("mallory", "guess")})
        image = pull(artifacts, reference, credentials=alice)
        for credentials in (mallory, None):
            with pytest.raises(Unauthorized):
                artifacts.pull(reference, credentials=credentials)
        assert pull(artifacts, reference, credentials=alice) == image


def test_a_referrer_of_another_repository(artifacts: Artifacts, fake: FakeRegistry) -> None:
    """V12, and V5: who may read the subject may not for that read what refers to it from elsewhere."""
    subject = titled(fake, {"weights.bin": b"public"}, repo="public/model")
    blob = fake.put_blob("private/notes", b"private notes")
    layer = Descriptor(
        media_type="text/plain",
        digest=blob.digest,
        size=blob.size,
        annotations={ANNOTATION_TITLE: "notes.txt"},
    )
    notes = fake.put_artifact("private/notes", None, [layer], "application/x-notes", subject=subject)
    reference = fake.reference("public/model", "v1")
    options = PullOptions(
        referrer="application/x-notes", referrer_from=fake.reference("private/notes", "v1").name
    )
    image = pull(artifacts, reference, options=options)
    assert artifacts.find(str(reference), options=options) == image
    assert {one.manifest for one in image.tuples} == {str(notes.digest)}
    assert image.origins == {options.referrer_from}
    raw = fake.repository("private/notes").manifests[str(notes.digest)]
    fake.put_blob("public/model", b"{}")
    fake.repository("public/model").manifests[str(notes.digest)] = raw
    fake.repository("public/model").tags["stolen"] = str(notes.digest)
    with pytest.raises(NotFound):
        artifacts.pull(fake.reference("public/model", "stolen"))
    assert artifacts.remove(image.id)


def test_knowing_digests_grants_nothing(
    connection: Containerd, artifacts: Artifacts, fake: FakeRegistry, registry: Registry
) -> None:
    """V5: a registry of somebody's own names the layers of a private artifact, whose tree is here."""
    secret = b"private weights" * 1000
    pushed = titled(fake, {"weights.bin": secret}, repo="private/model")
    image = pull(artifacts, fake.reference("private/model", "v1"))
    raw = fake.repository("private/model").manifests[str(pushed.digest)]
    with FakeRegistry(address="127.0.0.2", strict=False) as evil:
        both = RegistryConfig(plain_http=frozenset({fake.host, evil.host}))
        with Registry(both) as client, Artifacts(connection, client, HANDLERS, jobs=1) as others:
            for host, repo in ((evil, "stolen/model"), (fake, "stolen/model")):
                host.put_blob(repo, b"{}")
                host.repository(repo).manifests[str(pushed.digest)] = raw
                host.repository(repo).tags["v1"] = str(pushed.digest)
                with pytest.raises(NotFound):
                    others.pull(host.reference(repo, "v1"))
            layer = next(iter(set(fake.repository("private/model").blobs) - {str(Digest.of(b"{}"))}))
            evil.repository("stolen/model").blobs[layer] = bytes(len(secret))
            with pytest.raises(IntegrityError):
                others.pull(evil.reference("stolen/model", "v1"))
            assert artifacts.find(image.id) == image, "no name of theirs leads to it"
            # Who has the bytes may have them: shown once, by one byte where the registry is known.
            evil.repository("stolen/model").blobs[layer] = secret
            fake.repository("stolen/model").blobs[layer] = secret
            for host in (evil, fake):
                host.clear_log()
                theirs = pull(others, host.reference("stolen/model", "v1"))
                assert theirs.id == image.id and theirs.cached
                assert sum("/blobs/" in request.path for request in host.requests) >= 1
                host.clear_log()
                assert pull(others, host.reference("stolen/model", "v1")).cached
                assert not [one for one in host.requests if "/blobs/" in one.path]


def test_names_that_containerd_moved_meanwhile(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    """V21: with the agent away, containerd pulls an image under a name of ours; it is left alone."""
    titled(fake, {"weights.bin": b"ours"})
    reference = fake.reference(REPO, "v1")
    image = pull(artifacts, reference)
    titled(fake, {"other.bin": b"other"}, tag="other")
    theirs = pull(artifacts, fake.reference(REPO, "other"))
    run = ("-n", connection.namespace, "images")
    daemon.ctr(*run, "tag", "--force", str(fake.reference(REPO, "other")), str(reference))
    assert artifacts.find(str(reference)) is None
    recovered = artifacts.recover()
    assert recovered.images == ()
    kept = artifacts.find(image.id)
    assert kept is not None and kept.repo_tags == ()
    assert str(reference) in daemon.lines(connection.namespace, "images", "ls", "-q")
    assert artifacts.find(theirs.id) == theirs


def test_what_containerd_half_removed(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd
) -> None:
    """Records removed by hand, in any order: recover takes the rest."""
    titled(fake, {"weights.bin": b"ours"})
    reference = str(fake.reference(REPO, "v1"))
    run = ("-n", connection.namespace, "images", "rm")
    for which in ("id", "tag", "names"):
        image = pull(artifacts, reference)
        names = [*image.repo_tags, *image.repo_digests]
        for victim in {"id": [image.id], "tag": names[:1], "names": names}[which]:
            daemon.ctr(*run, victim)
        artifacts.recover()
        found = artifacts.find(image.id)
        if found is None:
            assert left(daemon, connection) == nothing()
        else:
            assert found.repo_tags == () and found.repo_digests
            artifacts.remove(image.id)
    assert left(daemon, connection) == nothing()


def test_recover_leaves_the_living_alone(connect: Connect, registry: Registry) -> None:
    mine, theirs = connect(), connect()
    with Artifacts(mine, registry, HANDLERS, jobs=1) as artifacts, leases.lease(theirs, "at work"):
        assert artifacts.recover() == artifacts.recover()
        assert artifacts.recover().leases == ()
    with leases.lease(theirs, "left behind"), Artifacts(mine, registry, HANDLERS, jobs=1) as artifacts:
        theirs.owner.close()
        assert len(artifacts.recover().leases) == 1


@pytest.mark.parametrize("damage", ["bytes", "missing", "added"])
def test_rot_is_found_and_cured(
    damage: str, artifacts: Artifacts, connection: Containerd, fake: FakeRegistry
) -> None:
    titled(fake, {"weights.bin": b"w" * 10_000, "config.json": b"{}"})
    reference = fake.reference(REPO, "v1")
    image = pull(artifacts, reference)
    assert artifacts.fsck() == []
    tree = ContainerdTrees(connection).find(image.tree)
    assert tree is not None and tree.path is not None
    weights = tree.path / "weights.bin"
    before = weights.stat()
    if damage == "bytes":
        weights.write_bytes(b"w" * 5_000 + b"v" + b"w" * 4_999)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif damage == "missing":
        weights.unlink()
    else:
        (tree.path / "extra").touch()
    (problem,) = artifacts.fsck()
    assert (problem.kind, problem.subject, problem.repaired) == ("tree-damaged", str(reference), False)
    (problem,) = artifacts.fsck(repair=True)
    assert problem.repaired
    assert artifacts.fsck() == []
    assert pull(artifacts, reference).id == image.id
    assert artifacts.fsck() == []


def test_many_lives_leak_nothing(
    artifacts: Artifacts, fake: FakeRegistry, daemon: Daemon, connection: Containerd, full: bool
) -> None:
    """Threads, descriptors, snapshots and leases are as many after many pulls and removals as before."""
    titled(fake, {"weights.bin": b"life" * 1000}, tag="life")
    fake.put_artifact(REPO, "nothing", [], "application/vnd.example.nothing")

    def live() -> None:
        pull(artifacts, fake.reference(REPO, "life"))
        pull(artifacts, fake.reference(REPO, "life"), handler="plain")
        with pytest.raises(NothingProduced):
            artifacts.pull(fake.reference(REPO, "nothing"))
        assert artifacts.remove(str(fake.reference(REPO, "life")))

    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for _ in range(5):
        live()
    before = counts()
    for _ in range(100 if full else 20):
        live()
    threads, files = counts()
    # Connections of the fake registry come and go.
    assert threads <= before[0] + 3 and files <= before[1] + 6, (before, (threads, files))
    assert left(daemon, connection) == nothing()
    assert not list((connection.state / "locks").iterdir())
    assert len(list((connection.state / "owners").iterdir())) == 1


def test_what_is_mounted_stays_whatever_is_removed(
    artifacts: Artifacts,
    fake: FakeRegistry,
    daemon: Daemon,
    connection: Containerd,
    mounted: Callable[[str], str],
) -> None:
    """V6: a removal takes the records; the tree goes when its last mount does, and is found until then."""
    titled(fake, {"weights.bin": b"in use"})
    reference = fake.reference(REPO, "v1")
    image = pull(artifacts, reference)
    path = mounted(image.id)
    assert artifacts.remove(image.id)
    artifacts.collect()
    assert snapshot(path)["weights.bin"].content == b"in use"
    assert left(daemon, connection)["images"] == []
    again = pull(artifacts, reference)
    assert again.id == image.id
    assert snapshot(mounted(again.id))["weights.bin"].content == b"in use"
