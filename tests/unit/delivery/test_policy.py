"""When the registry is asked, and with whose credentials (V2, V5), and what an index or referrer means."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.httpd import Request as Asked
from tests.fakes.httpd import Response
from tests.fakes.registry import FakeRegistry
from tests.unit.delivery.conftest import ARTIFACT, PutImage, tar
from unlade.delivery import (
    AsTree,
    Directory,
    Engine,
    InStore,
    NoReferrer,
    NotPresent,
    Request,
    default_policy,
)
from unlade.errors import IntegrityError, InvalidInput, RegistryError
from unlade.model import Digest, Platform, Reference
from unlade.model.mediatypes import ANNOTATION_CREATED, ANNOTATION_TITLE, OCI_INDEX, OCI_LAYER_GZIP
from unlade.registry import Credential, Registry, RegistryConfig, StaticCredentials
from unlade.store import DirStore


def as_tree(ref: Reference, **options: object) -> Request:
    return Request(references=(ref,), destination=AsTree(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("a/b", "always"),
        ("a/b:latest", "always"),
        ("a/b:v1", "missing"),
        (f"a/b@{Digest.of(b'')}", "missing"),
    ],
)
def test_default_policy(text: str, policy: str) -> None:
    assert default_policy(Reference.parse(text)) == policy


def test_never_wants_it_present(engine: Engine, fake: FakeRegistry, put_files: PutImage) -> None:
    put_files("model", "v1", {"f": b"1"})
    ref = fake.reference("model", "v1")
    with pytest.raises(NotPresent):
        engine.deliver(as_tree(ref, pull="never"))
    assert fake.seen() == []
    engine.deliver(as_tree(ref))
    fake.clear_log()
    assert engine.deliver(as_tree(ref, pull="never")).cached
    assert fake.seen() == []


def test_missing_pulls_once_and_always_asks_again(
    engine: Engine, fake: FakeRegistry, put_files: PutImage
) -> None:
    put_files("model", "v1", {"f": b"1"})
    ref = fake.reference("model", "v1")
    first = engine.deliver(as_tree(ref))
    put_files("model", "v1", {"f": b"2"})
    assert engine.deliver(as_tree(ref)).tree == first.tree, "the tag moved, but the record answers"
    moved = engine.deliver(as_tree(ref, pull="always"))
    assert moved.tree != first.tree
    assert not moved.cached


def test_options_never_change_another_tree(engine: Engine, fake: FakeRegistry, put_files: PutImage) -> None:
    put_files("model", "v1", {"a": b"1", "b": b"2"})
    ref = fake.reference("model", "v1")
    whole = engine.deliver(as_tree(ref))
    part = engine.deliver(as_tree(ref, only=("a",), handler="other"))
    assert whole.tree != part.tree
    assert part.path is not None
    assert [path.name for path in Path(part.path).iterdir()] == ["a"]


def test_two_references_to_one_content_share_a_tree(
    engine: Engine, fake: FakeRegistry, put_files: PutImage
) -> None:
    put_files("one", "v1", {"f": b"1"})
    put_files("two", "v2", {"f": b"1"})
    first = engine.deliver(as_tree(fake.reference("one", "v1")))
    fake.clear_log()
    second = engine.deliver(as_tree(fake.reference("two", "v2")))
    assert second.tree == first.tree
    assert second.cached
    assert not fake.seen("GET", "/blobs/")


@pytest.fixture
def private() -> Iterator[FakeRegistry]:
    with FakeRegistry(users={"alice": "a", "bob": "b"}) as registry:
        yield registry


def tenant(fake: FakeRegistry, store: DirStore, user: str, password: str) -> Engine:
    config = RegistryConfig(plain_http=frozenset({fake.host}))
    return Engine(
        Registry(config, StaticCredentials({fake.host: Credential(username=user, password=password)})), store
    )


def test_cached_content_is_not_handed_to_a_stranger(private: FakeRegistry, store: DirStore) -> None:
    blob = private.put_blob("secret", b"s", "application/octet-stream", {ANNOTATION_TITLE: "f"})
    private.put_artifact("secret", "v1", [blob], ARTIFACT)
    ref = private.reference("secret", "v1")
    with tenant(private, store, "alice", "a") as alice:
        alice.deliver(as_tree(ref, reauthorize=True))
        private.clear_log()
        alice.deliver(as_tree(ref, reauthorize=True))
        assert private.seen() == [], "the grant is remembered"
    with tenant(private, store, "mallory", "m") as mallory:
        with pytest.raises(RegistryError):
            mallory.deliver(as_tree(ref, reauthorize=True))
        pinned = ref.with_digest(Digest.parse(private.repository("secret").tags["v1"]))
        with pytest.raises(RegistryError):
            mallory.deliver(as_tree(pinned, reauthorize=True))
    with tenant(private, store, "bob", "b") as bob:
        private.clear_log()
        assert bob.deliver(as_tree(ref, reauthorize=True)).cached
        assert [request.method for request in private.seen(contains="/manifests/")][-1] == "HEAD"
        assert not private.seen(contains="/blobs/"), "asked for the right, not for the bytes"


def test_an_index_gives_the_platforms_entry(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path
) -> None:
    entries = []
    for architecture in ("amd64", "arm64"):
        child = put_image("img", f"only-{architecture}", {"arch": architecture.encode()})
        entries.append(child.to_json() | {"platform": {"os": "linux", "architecture": architecture}})
    fake.put_manifest("img", "v1", {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries})
    ref = fake.reference("img", "v1")
    for architecture in ("amd64", "arm64"):
        out = tmp_path / architecture
        done = engine.deliver(
            Request(
                references=(ref,),
                destination=Directory(str(out)),
                platform=Platform("linux", architecture),
            )
        )
        assert (out / "arch").read_text() == architecture
        assert str(done.resolved[0].index) == fake.repository("img").tags["v1"]
        assert str(done.resolved[0].digest) == fake.repository("img").tags[f"only-{architecture}"]
    with pytest.raises(InvalidInput):
        engine.deliver(as_tree(ref, platform=Platform("linux", "s390x")))


def test_another_platform_is_not_answered_from_the_record(
    engine: Engine, fake: FakeRegistry, put_image: PutImage
) -> None:
    entries = []
    for architecture in ("amd64", "arm64"):
        child = put_image("img", f"only-{architecture}", {"arch": architecture.encode()})
        entries.append(child.to_json() | {"platform": {"os": "linux", "architecture": architecture}})
    fake.put_manifest("img", "v1", {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries})
    ref = fake.reference("img", "v1")
    first = engine.deliver(as_tree(ref, platform=Platform("linux", "amd64")))
    second = engine.deliver(as_tree(ref, platform=Platform("linux", "arm64")))
    assert first.tree != second.tree


@pytest.mark.parametrize("referrers", [True, False])
def test_the_newest_referrer_whose_subject_is_true(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path, referrers: bool
) -> None:
    fake.referrers = referrers
    subject = put_image("img", "v1", {"f": b"1"})
    other = put_image("img", "v2", {"f": b"2"})
    sbom = "application/vnd.example.sbom.v1"
    index = []
    for number, (about, when) in enumerate([(subject, "2025"), (subject, "2026"), (other, "2027")]):
        blob = fake.put_blob("img", f"sbom {number}".encode(), "text/plain", {ANNOTATION_TITLE: "sbom"})
        created = {ANNOTATION_CREATED: f"{when}-01-01T00:00:00Z"}
        made = fake.put_artifact("img", None, [blob], sbom, subject=about, annotations=created)
        index.append(made.to_json() | {"artifactType": sbom, "annotations": created})
    if not referrers:
        # The tag schema's list is writable by anyone who may push tags: it lies about the third.
        tag = str(subject.digest).replace(":", "-")
        fake.put_manifest("img", tag, {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": index})
    ref = fake.reference("img", "v1")
    engine.deliver(Request(references=(ref,), destination=Directory(str(tmp_path / "out")), referrer=sbom))
    assert (tmp_path / "out" / "sbom").read_text() == "sbom 1"
    with pytest.raises(NoReferrer):
        engine.deliver(
            Request(references=(ref,), destination=Directory(str(tmp_path / "no")), referrer="application/x")
        )


def test_a_referrer_in_another_repository(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path
) -> None:
    subject = put_image("img", "v1", {"f": b"1"})
    kind = "application/vnd.example.sbom.v1"
    blob = fake.put_blob("boms", b"sbom", "text/plain", {ANNOTATION_TITLE: "sbom"})
    fake.put_artifact("boms", None, [blob], kind, subject=subject)
    engine.deliver(
        Request(
            references=(fake.reference("img", "v1"),),
            destination=Directory(str(tmp_path / "out")),
            referrer=kind,
            referrer_from=fake.reference("boms"),
        )
    )
    assert (tmp_path / "out" / "sbom").read_text() == "sbom"


def test_in_store_makes_a_layout(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, store: DirStore
) -> None:
    made = put_image("img", "v1", {"f": b"1"})
    ref = fake.reference("img", "v1")
    assert not engine.deliver(Request(references=(ref,), destination=InStore())).cached
    assert engine.deliver(Request(references=(ref,), destination=InStore(), pull="always")).cached
    assert store.stat(made.digest) is not None
    record = store.images.get(str(ref))
    assert record is not None
    assert record.content


def test_what_the_store_holds_is_not_fetched(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, tmp_path: Path
) -> None:
    put_image("img", "v1", {"f": b"1"})
    ref = fake.reference("img", "v1")
    engine.deliver(Request(references=(ref,), destination=InStore()))
    fake.clear_log()
    engine.deliver(Request(references=(ref,), destination=Directory(str(tmp_path / "out")), pull="always"))
    assert not fake.seen(contains="/blobs/")
    assert (tmp_path / "out" / "f").read_bytes() == b"1"


def test_several_references_cannot_fill_the_store(fake: FakeRegistry) -> None:
    with pytest.raises(InvalidInput):
        Request(references=(fake.reference("a"), fake.reference("b")), destination=InStore())


@pytest.mark.parametrize("family", ["packed directory", "untitled tar", "config decides"])
def test_what_is_cached_needs_no_registry(engine: Engine, fake: FakeRegistry, family: str) -> None:
    """V2, never: also where planning had to look at a layer's first bytes, or at the config."""
    archive = gzip.compress(tar({"d/": None, "d/f": b"1"}), mtime=0)
    if family == "packed directory":
        packed = {ANNOTATION_TITLE: "d", "io.deis.oras.content.unpack": "true"}
        fake.put_artifact("pkg", "v1", [fake.put_blob("pkg", archive, OCI_LAYER_GZIP, packed)], ARTIFACT)
    elif family == "untitled tar":
        fake.put_artifact("pkg", "v1", [fake.put_blob("pkg", archive, "application/x-tar")], ARTIFACT)
    else:
        kit = "application/vnd.kitops.modelkit"
        config = fake.put_blob("pkg", b'{"manifestVersion":"1.0.0"}', f"{kit}.config.v1+json")
        layer = fake.put_blob("pkg", archive, f"{kit}.model.v1.tar+gzip")
        document = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": f"{kit}.manifest.v1+json",
            "config": config.to_json(),
            "layers": [layer.to_json()],
        }
        fake.put_manifest("pkg", "v1", document)
    ref = fake.reference("pkg", "v1")
    first = engine.deliver(as_tree(ref))
    fake.clear_log()
    again = engine.deliver(as_tree(ref, pull="never"))
    assert again.tree == first.tree
    assert again.cached
    assert fake.seen() == []


def test_a_registry_with_two_faces_is_found_out(engine: Engine, fake: FakeRegistry) -> None:
    """What was shown when the format was looked at must be what is sent."""
    words = b"plain words, no archive" * 20_000
    blob = fake.put_blob("pkg", words, "application/x-unknown")
    fake.put_artifact("pkg", "v1", [blob], ARTIFACT)
    archive = gzip.compress(tar({"f": b"1"}))

    def other_head(request: Asked, response: Response) -> Response | None:
        if "/blobs/" in request.path and request.headers.get("Range"):
            asked = int(response.headers["Content-Length"]) if "Content-Length" in response.headers else 0
            return Response(206, dict(response.headers), archive.ljust(asked or len(response.body), b"\0"))  # type: ignore[arg-type]
        return None

    fake.alter(other_head)
    with pytest.raises(IntegrityError) as caught:
        engine.deliver(as_tree(fake.reference("pkg", "v1")))
    assert caught.value.code == "two-faced"


def test_a_small_layer_that_was_looked_at_is_not_fetched_again(engine: Engine, fake: FakeRegistry) -> None:
    archive = gzip.compress(tar({"f": b"1"}))
    fake.put_artifact("pkg", "v1", [fake.put_blob("pkg", archive, "application/x-unknown")], ARTIFACT)
    fake.clear_log()
    done = engine.deliver(as_tree(fake.reference("pkg", "v1")))
    assert done.entries == 1
    assert len(fake.seen("GET", str(Digest.of(archive)))) == 1


def test_a_small_layer_that_looked_otherwise_is_fetched_and_found_out(
    engine: Engine, fake: FakeRegistry
) -> None:
    archive, other = gzip.compress(tar({"f": b"1"}), mtime=0), gzip.compress(tar({"f": b"2"}), mtime=0)
    fake.put_artifact("pkg", "v1", [fake.put_blob("pkg", archive, "application/x-unknown")], ARTIFACT)
    shown: list[str] = []

    def other_face(request: Asked, response: Response) -> Response | None:
        if "/blobs/" in request.path and not shown:
            shown.append(request.path)
            return Response(200, dict(response.headers), other)
        return None

    fake.alter(other_face)
    with pytest.raises(IntegrityError) as caught:
        engine.deliver(as_tree(fake.reference("pkg", "v1")))
    assert caught.value.code == "two-faced"


@pytest.mark.parametrize("destination", [AsTree(), InStore()])
def test_knowing_digests_grants_nothing(
    fake: FakeRegistry, store: DirStore, put_files: PutImage, destination: AsTree | InStore
) -> None:
    """V5: somebody's own registry serves the manifest of a private artifact, which is here."""
    pushed = put_files("private", "v1", {"f": b"secret" * 100})
    raw = fake.repository("private").manifests[str(pushed.digest)]
    blobs = dict(fake.repository("private").blobs)
    with FakeRegistry(address="127.0.0.2", strict=False) as evil:
        config = RegistryConfig(plain_http=frozenset({fake.host, evil.host}))
        with Registry(config, StaticCredentials({})) as client, Engine(client, store, jobs=2) as engine:

            def deliver(host: FakeRegistry, repository: str) -> bool:
                ref = host.reference(repository, "v1")
                request = Request(references=(ref,), destination=destination, reauthorize=True)
                return engine.deliver(request).cached

            assert not deliver(fake, "private")
            for host in (evil, fake):
                host.repository("stolen").manifests[str(pushed.digest)] = raw
                host.repository("stolen").tags["v1"] = str(pushed.digest)
                with pytest.raises(RegistryError):
                    deliver(host, "stolen")
                assert store.images.get(str(host.reference("stolen", "v1"))) is None
            evil.repository("stolen").blobs.update({name: bytes(len(data)) for name, data in blobs.items()})
            with pytest.raises(IntegrityError):
                deliver(evil, "stolen")
            # Who has the bytes may have them; it is asked once.
            for host in (evil, fake):
                host.repository("stolen").blobs.update(blobs)
                assert deliver(host, "stolen")
                host.clear_log()
                assert deliver(host, "stolen")
                assert not host.seen(contains="/blobs/")
