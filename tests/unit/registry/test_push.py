"""Pushing: one piece, chunks that break, mounts, manifests, and the upkeep of referrers."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.httpd import Request, Response
from tests.fakes.registry import FakeRegistry
from tests.fakes.scene import REPO, Scene
from unlade.errors import IntegrityError
from unlade.model import Descriptor, Digest
from unlade.model.mediatypes import OCI_INDEX, OCI_MANIFEST
from unlade.registry import BadResponse, HTTPFailure, NotFound, Unavailable, Unreachable, WrongContent
from unlade.registry.referrers import fallback_tag

DATA = bytes(range(256)) * 4000  # four blocks of 256 KiB, the last one short
DIGEST = Digest.of(DATA)
SBOM = "application/vnd.example.sbom"


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene() as stage:
        yield stage


def push(
    scene: Scene, chunk_size: int | None = None, data: bytes = DATA, digest: Digest = DIGEST
) -> list[int]:
    positions: list[int] = []
    scene.client().upload_blob(
        scene.ref,
        digest,
        len(DATA),
        lambda offset: io.BytesIO(data[offset:]),
        chunk_size=chunk_size,
        deadline=scene.deadline(),
        on_sent=positions.append,
    )
    return positions


def has(scene: Scene) -> bool:
    return scene.registry.repository(REPO).blobs.get(str(DIGEST)) == DATA


def methods(scene: Scene) -> list[str]:
    return [request.method for request in scene.registry.requests if request.status != 401]


def test_one_piece(scene: Scene) -> None:
    positions = push(scene)
    assert has(scene)
    assert methods(scene) == ["POST", "PUT"]
    assert positions[-1] == len(DATA)
    assert positions == sorted(positions)


def test_an_empty_blob(scene: Scene) -> None:
    scene.client().upload_blob(
        scene.ref, Digest.of(b""), 0, lambda _offset: io.BytesIO(), deadline=scene.deadline()
    )
    assert str(Digest.of(b"")) in scene.registry.repository(REPO).blobs


def test_chunks(scene: Scene) -> None:
    push(scene, 300_000)
    assert has(scene)
    assert methods(scene) == ["POST", "PATCH", "PATCH", "PATCH", "PATCH", "PUT"]
    ranges = [request.headers["Content-Range"] for request in scene.registry.seen("PATCH")]
    assert ranges == ["0-299999", "300000-599999", "600000-899999", "900000-1023999"]


def test_the_registrys_least_chunk_is_kept(scene: Scene) -> None:
    scene.registry.alter(
        lambda q, r: (
            Response(202, {**r.headers, "OCI-Chunk-Min-Length": "600000"})
            if q.method == "POST" and r.status == 202
            else None
        )
    )
    push(scene, 1000)
    assert len(scene.registry.seen("PATCH")) == 2


def test_an_absurd_least_chunk_is_refused(scene: Scene) -> None:
    scene.registry.alter(
        lambda q, r: (
            Response(202, {**r.headers, "OCI-Chunk-Min-Length": str(1 << 40)})
            if q.method == "POST" and r.status == 202
            else None
        )
    )
    with pytest.raises(BadResponse):
        push(scene, 1000)


def test_a_chunk_that_breaks_is_continued_where_the_registry_stands(scene: Scene) -> None:
    taken = 100_000

    def cut(request: Request) -> Response | None:
        if request.method != "PATCH" or not request.headers["Content-Range"].startswith("300000-"):
            return None
        session = next(iter(scene.registry.uploads))
        # The registry kept what arrived before the connection broke.
        scene.registry.uploads[session] += DATA[300_000 : 300_000 + taken]
        return Response.drop(read_body=taken)

    scene.registry.fault(cut, times=1, early=True)
    push(scene, 300_000)
    assert has(scene)
    sent = sum(len(request.body) for request in scene.registry.seen("PATCH"))
    assert sent == len(DATA)
    assert len(scene.registry.seen("GET", "/uploads/")) == 1


def test_a_chunk_out_of_order_is_continued(scene: Scene) -> None:
    """The registry lost the second chunk; it says so with 416 and is asked where it stands."""

    def lose(request: Request) -> Response | None:
        if request.method == "PATCH" and request.headers["Content-Range"].startswith("300000-"):
            session = next(iter(scene.registry.uploads))
            return Response(202, scene.registry._progress(REPO, session))
        return None

    scene.registry.fault(lose, times=1)
    push(scene, 300_000)
    assert has(scene)


def test_an_upload_that_keeps_breaking_ends(scene: Scene) -> None:
    scene.registry.fault(lambda q: Response.drop(read_body=10) if q.method == "PATCH" else None, early=True)
    with pytest.raises(Unreachable):
        push(scene, 300_000)
    scene.assert_calm(40)


def test_one_piece_that_breaks_is_sent_again(scene: Scene) -> None:
    scene.registry.fault(
        lambda q: Response.drop(read_body=1000) if q.method == "PUT" else None, times=1, early=True
    )
    positions = push(scene)
    assert has(scene)
    assert methods(scene) == ["POST", "PUT", "POST", "PUT"] or len(scene.registry.seen("PUT")) == 2
    assert positions[-1] == len(DATA)


def test_a_refusal_in_the_middle_of_a_body_is_heard(scene: Scene) -> None:
    answer = Response(413, body=b'{"errors":[{"code":"SIZE_INVALID","message":"too big"}]}', read_body=70_000)
    scene.registry.fault(lambda q: answer if q.method == "PUT" else None, early=True)
    with pytest.raises((HTTPFailure, Unreachable)):
        push(scene)


def test_a_token_that_expires_between_chunks(scene: Scene) -> None:
    def expire(request: Request, response: Response) -> None:
        if request.method == "PATCH" and response.status == 202:
            scene.tokens.grants.clear()

    scene.registry.alter(expire)
    push(scene, 300_000)
    assert has(scene)


def test_a_registry_that_finds_another_digest(scene: Scene) -> None:
    with pytest.raises(HTTPFailure) as caught:
        push(scene, digest=Digest.of(b"else"))
    assert caught.value.codes == ("DIGEST_INVALID",)
    assert len(scene.registry.seen("PUT")) == 1


def test_a_registry_that_stored_something_else(scene: Scene) -> None:
    lie = {"Docker-Content-Digest": str(Digest.of(b"else"))}
    scene.registry.alter(lambda q, r: Response(201, lie) if r.status == 201 else None)
    with pytest.raises(WrongContent):
        push(scene)


def test_content_that_shrinks_while_it_is_sent(scene: Scene) -> None:
    with pytest.raises(IntegrityError, match="ended at byte"):
        push(scene, data=DATA[:-1])
    assert not has(scene)


def test_a_busy_registry_is_asked_again(scene: Scene) -> None:
    scene.registry.fault(lambda q: Response(503) if q.method == "POST" else None, times=1)
    push(scene)
    assert has(scene)
    scene.registry.fault(lambda q: Response(503) if q.method == "POST" else None)
    with pytest.raises(Unavailable):
        push(scene)


def test_a_mount_sends_nothing(scene: Scene) -> None:
    source = scene.registry.reference(REPO)
    target = scene.registry.reference("team/copy")
    client = scene.client()
    assert client.mount_blob(target, scene.layer.digest, source=source, deadline=scene.deadline())
    assert str(scene.layer.digest) in scene.registry.repository("team/copy").blobs
    scopes = scene.tokens.requests[-1].query["scope"]
    assert scopes == ["repository:team/copy:pull,push", f"repository:{REPO}:pull"]


def test_a_mount_that_is_not_granted_leaves_no_upload_behind(scene: Scene) -> None:
    target = scene.registry.reference("team/copy")
    client = scene.client()
    assert not client.mount_blob(
        target, Digest.of(b"none"), source=scene.registry.reference(REPO), deadline=scene.deadline()
    )
    assert scene.registry.uploads == {}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405])
def test_a_registry_that_does_not_mount_gets_the_bytes_instead(scene: Scene, status: int) -> None:
    scene.registry.fault(lambda q: Response(status) if "mount" in q.query else None)
    source, target = scene.registry.reference(REPO), scene.registry.reference("team/copy")
    assert not scene.client().mount_blob(target, scene.layer.digest, source=source, deadline=scene.deadline())


def test_a_mount_across_registries_is_not_asked_for(scene: Scene) -> None:
    source = scene.stranger.reference(REPO)
    assert not scene.client().mount_blob(
        scene.ref, scene.layer.digest, source=source, deadline=scene.deadline()
    )
    assert not scene.registry.requests


def raw_of(scene: Scene, descriptor: Descriptor) -> bytes:
    return scene.registry.repository(REPO).manifests[str(descriptor.digest)][1]


def artifact(scene: Scene, subject: Descriptor, note: str = "") -> bytes:
    config = scene.registry.put_blob(REPO, b"{}", "application/vnd.oci.empty.v1+json")
    return json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": SBOM,
            "config": config.to_json(),
            "layers": [scene.layer.to_json()],
            "subject": subject.to_json(),
            "annotations": {"note": note},
        }
    ).encode()


@pytest.mark.parametrize("tag", ["v2", None])
def test_a_manifest(scene: Scene, tag: str | None) -> None:
    raw = raw_of(scene, scene.image) + b"\n"
    digest = scene.client().put_manifest(scene.ref, raw, OCI_MANIFEST, tag=tag, deadline=scene.deadline())
    assert digest == Digest.of(raw)
    assert scene.registry.repository(REPO).manifests[str(digest)] == (OCI_MANIFEST, raw)
    assert (scene.registry.repository(REPO).tags.get("v2") == str(digest)) is (tag is not None)


def test_a_registry_that_changes_a_manifest(scene: Scene) -> None:
    lie = {"Docker-Content-Digest": str(Digest.of(b"else"))}
    scene.registry.alter(lambda q, r: Response(201, lie) if r.status == 201 else None)
    raw = raw_of(scene, scene.image)
    with pytest.raises(WrongContent):
        scene.client().put_manifest(scene.ref, raw, OCI_MANIFEST, tag="x", deadline=scene.deadline())


def test_a_manifest_whose_blobs_are_missing(scene: Scene) -> None:
    scene.registry.strict = True
    raw = artifact(scene, scene.image).replace(scene.layer.digest.hex.encode(), b"0" * 64)
    with pytest.raises(HTTPFailure) as caught:
        scene.client().put_manifest(scene.ref, raw, OCI_MANIFEST, tag="x", deadline=scene.deadline())
    assert caught.value.codes == ("MANIFEST_BLOB_UNKNOWN",)


@pytest.mark.parametrize("api", [True, False])
def test_referrers_by_api_and_by_tag(scene: Scene, api: bool) -> None:
    scene.registry.referrers = api
    client, deadline = scene.client(), scene.deadline()
    digests = [
        client.put_manifest(
            scene.ref, artifact(scene, scene.image, str(n)), OCI_MANIFEST, tag=None, deadline=deadline
        )
        for n in range(3)
    ]
    found = client.referrers(scene.ref, scene.image.digest, deadline=deadline)
    assert [entry.digest for entry in found] == digests
    assert [entry.artifact_type for entry in found] == [SBOM] * 3
    assert [entry.annotations["note"] for entry in found] == ["0", "1", "2"]
    assert (
        client.referrers(scene.ref, scene.image.digest, artifact_type="other/type", deadline=deadline) == []
    )
    assert len(client.referrers(scene.ref, scene.image.digest, artifact_type=SBOM, deadline=deadline)) == 3
    tagged = fallback_tag(scene.image.digest) in scene.registry.repository(REPO).tags
    assert tagged is not api


def test_the_same_referrer_twice_is_listed_once(scene: Scene) -> None:
    scene.registry.referrers = False
    client, deadline, raw = scene.client(), scene.deadline(), artifact(scene, scene.image)
    for _ in range(2):
        client.put_manifest(scene.ref, raw, OCI_MANIFEST, tag=None, deadline=deadline)
    assert len(client.referrers(scene.ref, scene.image.digest, deadline=deadline)) == 1


def test_no_referrers(scene: Scene) -> None:
    for api in (True, False):
        scene.registry.referrers = api
        assert scene.client().referrers(scene.ref, scene.image.digest, deadline=scene.deadline()) == []


def test_a_page_for_people_in_place_of_the_api(scene: Scene) -> None:
    scene.registry.referrers = False
    client, deadline = scene.client(), scene.deadline()
    client.put_manifest(scene.ref, artifact(scene, scene.image), OCI_MANIFEST, tag=None, deadline=deadline)
    page = Response(200, {"Content-Type": "text/html"}, b"<html>")
    scene.registry.fault(lambda q: page if "/referrers/" in q.path else None)
    assert len(client.referrers(scene.ref, scene.image.digest, deadline=deadline)) == 1


def test_referrers_in_pages(scene: Scene) -> None:
    scene.registry.page_size = 2
    for n in range(5):
        scene.registry.put_manifest(REPO, None, artifact(scene, scene.image, str(n)))
    found = scene.client().referrers(
        scene.ref, scene.image.digest, artifact_type=SBOM, deadline=scene.deadline()
    )
    assert len(found) == 5
    assert len(scene.registry.seen("GET", "/referrers/")) == 3 + 1  # the first was answered with 401


@pytest.mark.parametrize("api", [True, False])
def test_a_mirror_without_referrers_does_not_hide_them(scene: Scene, tmp_path: Path, api: bool) -> None:
    with FakeRegistry(address="127.0.0.3", referrers=api) as mirror:
        (tmp_path / "_default").mkdir()
        (tmp_path / "_default" / "hosts.toml").write_text(f'[host."{mirror.url}"]')
        scene.registry.put_manifest(REPO, None, artifact(scene, scene.image))
        client = scene.client(scene.config(certs_dirs=(str(tmp_path),)))
        assert len(client.referrers(scene.ref, scene.image.digest, deadline=scene.deadline())) == 1
        assert mirror.seen("GET", "/referrers/")


def test_a_lost_race_over_the_list_is_run_again(scene: Scene) -> None:
    """Another writer replaces the list between our write and our look at it."""
    scene.registry.referrers = False
    tag = fallback_tag(scene.image.digest)
    other = scene.registry.put_manifest(REPO, None, artifact(scene, scene.image, "other"))

    def overwrite(request: Request, response: Response) -> Response | None:
        if request.method == "PUT" and request.path.endswith(tag) and response.status == 201:
            theirs = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [other.to_json()]}
            scene.registry.put_manifest(REPO, tag, theirs)
            return response
        return None

    scene.registry.alter(overwrite, times=1)
    client, deadline = scene.client(), scene.deadline()
    mine = client.put_manifest(
        scene.ref, artifact(scene, scene.image, "mine"), OCI_MANIFEST, tag=None, deadline=deadline
    )
    found = client.referrers(scene.ref, scene.image.digest, deadline=deadline)
    assert [entry.digest for entry in found] == [other.digest, mine]


def test_many_writers_keep_one_list(scene: Scene) -> None:
    scene.registry.referrers = False
    client, deadline = scene.client(), scene.deadline()
    failures: list[BaseException] = []

    def write(n: int) -> None:
        try:
            raw = artifact(scene, scene.image, str(n))
            client.put_manifest(scene.ref, raw, OCI_MANIFEST, tag=None, deadline=deadline)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(client.referrers(scene.ref, scene.image.digest, deadline=deadline)) == 8


@pytest.mark.parametrize("api", [True, False])
def test_deleting_a_referrer_removes_it_from_the_list(scene: Scene, api: bool) -> None:
    scene.registry.referrers = api
    client, deadline = scene.client(), scene.deadline()
    first, second = (
        client.put_manifest(
            scene.ref, artifact(scene, scene.image, n), OCI_MANIFEST, tag=None, deadline=deadline
        )
        for n in ("1", "2")
    )
    client.delete_manifest(scene.ref, first, deadline=deadline)
    assert [entry.digest for entry in client.referrers(scene.ref, scene.image.digest, deadline=deadline)] == [
        second
    ]
    with pytest.raises(NotFound):
        client.delete_manifest(scene.ref, first, deadline=deadline)
