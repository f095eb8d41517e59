"""Hostile registries, first part: bytes, digests, sizes and documents that are not what they should be (V13).

Every variant must end in the right class of error, without a credential at a stranger and without a storm.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.httpd import Request, Response
from tests.fakes.scene import REPO, Scene
from unlade.errors import IntegrityError, RegistryError, UnladeError
from unlade.model import Descriptor, Digest, InvalidManifest
from unlade.model.mediatypes import DOCKER_MANIFEST, OCI_CONFIG, OCI_INDEX, OCI_LAYER_GZIP, OCI_MANIFEST
from unlade.registry import BadResponse, ResponseTooLarge, Truncated, Unauthorized, WrongContent
from unlade.transfer.fetch import Fetcher

MB = 1 << 20
EMPTY = str(Digest.of(b"{}"))


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene() as stage:
        yield stage


def endless() -> Iterator[bytes]:
    while True:
        yield b" " * 65536


def answer_blobs(scene: Scene, make: Callable[[Request, Response], Response | None]) -> None:
    """Let `make` replace the answers to GETs of blobs."""

    def hook(request: Request, response: Response) -> Response | None:
        if request.method == "GET" and "/blobs/" in request.path and response.status in (200, 206):
            return make(request, response)
        return None

    scene.registry.alter(hook)


def answer_manifests(scene: Scene, make: Callable[[Request, Response], Response | None]) -> None:
    def hook(request: Request, response: Response) -> Response | None:
        if request.method == "GET" and "/manifests/" in request.path and response.status == 200:
            return make(request, response)
        return None

    scene.registry.alter(hook)


def body_of(response: Response) -> bytes:
    assert isinstance(response.body, bytes)
    return response.body


# Wrong bytes, short or long body, false Content-Range, 200 to a range, an ETag that changes.

WHOLE_BLOB: dict[str, tuple[Callable[[Request, Response], Response], type[UnladeError]]] = {
    "other bytes of the same length": (
        lambda _, r: Response(200, body=bytes(len(body_of(r)))),
        IntegrityError,
    ),
    "one bit flipped": (
        lambda _, r: Response(200, body=bytes([body_of(r)[0] ^ 1]) + body_of(r)[1:]),
        IntegrityError,
    ),
    "short body, honest length": (lambda _, r: Response(200, body=body_of(r)[:-1]), WrongContent),
    "empty body": (lambda _, r: Response(200, body=b""), WrongContent),
    "long body, honest length": (lambda _, r: Response(200, body=body_of(r) + b"x"), WrongContent),
    "long body, chunked": (lambda _, r: Response(200, body=iter([body_of(r), b"x"])), WrongContent),
    "endless body, chunked": (lambda _, r: Response(200, body=endless()), IntegrityError),
    "short body, chunked": (lambda _, r: Response(200, body=iter([body_of(r)[:-1]])), WrongContent),
    "a part where the whole was asked for": (
        lambda _, r: Response(206, {"Content-Range": "bytes 0-9/10240"}, body_of(r)[:10]),
        BadResponse,
    ),
    "compressed on the way": (
        lambda _, r: Response(200, {"Content-Encoding": "gzip"}, gzip.compress(body_of(r))),
        IntegrityError,
    ),
    "cut every time": (lambda _, r: Response(r.status, r.headers, body_of(r), cut_after=1), Truncated),
    "a page for people": (
        lambda _, r: Response(200, {"Content-Type": "text/html"}, b"<html>log in</html>"),
        WrongContent,
    ),
    "nothing found": (lambda _, r: Response(204), RegistryError),
}


@pytest.mark.parametrize("variant", WHOLE_BLOB)
def test_a_blob_that_is_not_the_promised_one(scene: Scene, variant: str) -> None:
    make, error = WHOLE_BLOB[variant]
    answer_blobs(scene, make)
    with pytest.raises(error):
        Fetcher(scene.client()).read(scene.ref, scene.layer, limit=MB, deadline=scene.deadline())
    scene.assert_no_leak()
    scene.assert_calm(16)


RANGED_BLOB: dict[str, tuple[dict[str, str], int, type[UnladeError]]] = {
    "starts earlier": ({"Content-Range": "bytes 99-10239/10240"}, 206, WrongContent),
    "starts later": ({"Content-Range": "bytes 101-10239/10240"}, 206, WrongContent),
    "ends earlier": ({"Content-Range": "bytes 100-200/10240"}, 206, WrongContent),
    "another total": ({"Content-Range": "bytes 100-10239/99999"}, 206, WrongContent),
    "ends beyond the total": ({"Content-Range": "bytes 100-20479/10240"}, 206, WrongContent),
    "backwards": ({"Content-Range": "bytes 10239-100/10240"}, 206, WrongContent),
    "no header": ({}, 206, BadResponse),
    "garbage": ({"Content-Range": "bytes one-two/three"}, 206, BadResponse),
    "negative": ({"Content-Range": "bytes -100-10239/10240"}, 206, BadResponse),
    "a hundred digits": ({"Content-Range": f"bytes {'9' * 100}-10239/10240"}, 206, BadResponse),
    "several parts": ({"Content-Type": "multipart/byteranges; boundary=x"}, 206, BadResponse),
    "not satisfiable": ({"Content-Range": "bytes */10240"}, 416, RegistryError),
}


@pytest.mark.parametrize("variant", RANGED_BLOB)
def test_a_range_that_is_not_the_one_asked_for(scene: Scene, variant: str) -> None:
    headers, status, error = RANGED_BLOB[variant]
    answer_blobs(scene, lambda _, r: Response(status, headers, body_of(r)))
    with pytest.raises(error):
        scene.client().blob(scene.ref, scene.layer, offset=100, deadline=scene.deadline())
    scene.assert_no_leak()
    scene.assert_calm(5)


def test_the_whole_blob_in_answer_to_a_range_is_used_from_its_start(scene: Scene) -> None:
    scene.registry.ranges = False
    with scene.client().blob(scene.ref, scene.layer, offset=100, deadline=scene.deadline()) as stream:
        assert (stream.offset, stream.end) == (0, scene.layer.size)


@pytest.mark.parametrize("honest", [True, False])
def test_an_etag_that_changes_mid_pull_decides_nothing_the_digest_does(scene: Scene, honest: bool) -> None:
    count = 0

    def make(request: Request, response: Response) -> Response:
        nonlocal count
        count += 1
        body = body_of(response) if honest or count == 1 else bytes(len(body_of(response)))
        cut = 5000 if count == 1 else None
        return Response(response.status, {**response.headers, "ETag": f'"{count}"'}, body, cut_after=cut)

    answer_blobs(scene, make)
    fetcher = Fetcher(scene.client())
    if honest:
        assert fetcher.read(scene.ref, scene.layer, limit=MB, deadline=scene.deadline()) == scene.data
    else:
        with pytest.raises(IntegrityError):
            fetcher.read(scene.ref, scene.layer, limit=MB, deadline=scene.deadline())
    assert count == 2


MANIFEST_BODIES: dict[str, tuple[Callable[[Request, Response], Response], type[UnladeError]]] = {
    "other bytes": (
        lambda _, r: Response(200, r.headers, body_of(r).replace(b"gzip", b"zstd")),
        WrongContent,
    ),
    "another valid manifest": (lambda _, r: Response(200, r.headers, body_of(r) + b" "), WrongContent),
    "shorter": (lambda _, r: Response(200, r.headers, body_of(r)[:-1]), WrongContent),
    "empty": (lambda _, r: Response(200, r.headers, b""), WrongContent),
    "cut every time": (lambda _, r: Response(200, r.headers, body_of(r), cut_after=10), Truncated),
    "over 4 MiB, announced": (lambda _, r: Response(200, r.headers, bytes(4 * MB + 1)), ResponseTooLarge),
    "over 4 MiB, endless": (lambda _, r: Response(200, r.headers, endless()), ResponseTooLarge),
    "an absurd length": (lambda _, r: Response(200, r.headers, b"{}", length=1 << 62), ResponseTooLarge),
}


@pytest.mark.parametrize("variant", MANIFEST_BODIES)
@pytest.mark.parametrize("by", ["digest", "descriptor"])
def test_a_manifest_that_is_not_the_one_named(scene: Scene, variant: str, by: str) -> None:
    make, error = MANIFEST_BODIES[variant]
    answer_manifests(scene, make)
    with pytest.raises(error):
        if by == "digest":
            scene.client().resolve(scene.registry.reference(REPO, scene.image), deadline=scene.deadline())
        else:
            scene.client().manifest(scene.ref, scene.image, deadline=scene.deadline())
    scene.assert_no_leak()
    scene.assert_calm(6)


# A digest used as a path, unknown or weak algorithms, upper-case hex (CVE-2024-3727).

BAD_DIGESTS = {
    "a path": "sha256:../../../../etc/passwd",
    "a path after hex": f"sha256:{'a' * 58}/../..",
    "an absolute path": "/etc/passwd",
    "md5": f"md5:{'a' * 32}",
    "sha1": f"sha1:{'a' * 40}",
    "unknown algorithm": f"blake9:{'a' * 64}",
    "no algorithm": "a" * 64,
    "upper case": f"sha256:{'A' * 64}",
    "too short": f"sha256:{'a' * 63}",
    "too long": f"sha256:{'a' * 65}",
    "empty": "",
    "a newline": f"sha256:{'a' * 63}\n",
    "other digits": f"sha256:{'٠' * 64}",
}


@pytest.mark.parametrize("variant", BAD_DIGESTS)
@pytest.mark.parametrize("place", ["config", "layers", "subject"])
def test_a_bad_digest_in_a_manifest_is_refused_before_use(scene: Scene, variant: str, place: str) -> None:
    bad = {"mediaType": OCI_LAYER_GZIP, "digest": BAD_DIGESTS[variant], "size": 2}
    good = {"mediaType": OCI_CONFIG, "digest": EMPTY, "size": 2}
    document: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": good,
        "layers": [good],
    }
    document[place] = [bad] if place == "layers" else bad
    scene.registry.put_manifest(REPO, "bad", document)
    with pytest.raises(InvalidManifest):
        scene.client().resolve(scene.registry.reference(REPO, "bad"), deadline=scene.deadline())
    assert not scene.registry.seen("GET", "/blobs/")


@pytest.mark.parametrize(
    "variant", [name for name in BAD_DIGESTS if "newline" not in name and "other" not in name]
)
def test_a_bad_digest_in_a_header_is_refused(scene: Scene, variant: str) -> None:
    headers = {"Docker-Content-Digest": BAD_DIGESTS[variant]}
    answer_manifests(scene, lambda _, r: Response(200, {**r.headers, **headers}, r.body))
    with pytest.raises(BadResponse):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    scene.assert_calm(4)


def test_a_well_formed_digest_of_something_else_is_refused(scene: Scene) -> None:
    headers = {"Docker-Content-Digest": EMPTY}
    answer_manifests(scene, lambda _, r: Response(200, {**r.headers, **headers}, r.body))
    with pytest.raises(WrongContent):
        scene.client().resolve(scene.ref, deadline=scene.deadline())


# Token and error bodies over 1 MiB.


@pytest.mark.parametrize("body", ["announced", "endless"])
def test_a_token_over_one_mebibyte_is_not_read(scene: Scene, body: str) -> None:
    def make(request: Request) -> Response:
        return Response(200, body=b" " * (MB + 1) if body == "announced" else endless())

    scene.tokens.fault(make)
    with pytest.raises(ResponseTooLarge):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert all(request.sent < 8 * MB for request in scene.tokens.requests)
    scene.assert_calm(4)


@pytest.mark.parametrize("status", [400, 404, 500])
@pytest.mark.parametrize("body", ["announced", "endless"])
def test_an_error_document_over_one_mebibyte_is_not_read(scene: Scene, status: int, body: str) -> None:
    def make(request: Request) -> Response | None:
        if "/manifests/" not in request.path:
            return None
        return Response(status, body=b" " * (MB + 1) if body == "announced" else endless())

    scene.registry.fault(make)
    with pytest.raises(RegistryError):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert all(request.sent < 8 * MB for request in scene.registry.requests)
    scene.assert_calm(4)


def test_control_characters_of_a_registry_do_not_reach_the_terminal(scene: Scene) -> None:
    text = json.dumps({"errors": [{"code": "DENIED", "message": "\x1b]0;owned\x07\x1b[2J" + "x" * 9999}]})
    scene.registry.fault(lambda r: Response(403, body=text.encode()) if "/manifests/" in r.path else None)
    with pytest.raises(Unauthorized) as caught:
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert caught.value.codes == ("DENIED",)


# A descriptor that lies about its size.


@pytest.mark.parametrize("size", [0, 1, 4 * MB, 4 * MB + 1, 1 << 40, 1 << 50])
def test_a_descriptor_that_lies_about_a_manifest_costs_no_memory(scene: Scene, size: int) -> None:
    lie = Descriptor(media_type=OCI_MANIFEST, digest=scene.image.digest, size=size)
    with pytest.raises(WrongContent):
        scene.client().manifest(scene.ref, lie, deadline=scene.deadline())
    scene.assert_calm(4)


@pytest.mark.parametrize("size", [0, 1, 10239, 10241, 1 << 40, 1 << 50])
def test_a_descriptor_that_lies_about_a_blob_costs_no_memory(scene: Scene, size: int) -> None:
    lie = scene.layer_at(size=size)
    with pytest.raises(WrongContent):
        scene.client().blob(scene.ref, lie, deadline=scene.deadline())
    scene.assert_calm(4)


@pytest.mark.parametrize("size", [-1, -(1 << 63), 1 << 51, 1 << 64, 1.5, "10"])
def test_an_impossible_size_in_a_manifest_is_refused(scene: Scene, size: object) -> None:
    entry = {"mediaType": OCI_LAYER_GZIP, "digest": EMPTY, "size": size}
    scene.registry.put_manifest(
        REPO, "bad", {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": entry, "layers": []}
    )
    with pytest.raises(InvalidManifest):
        scene.client().resolve(scene.registry.reference(REPO, "bad"), deadline=scene.deadline())


# Ambiguous documents (CVE-2021-41190), wide and deep ones.

CONFIG = {"mediaType": OCI_CONFIG, "digest": EMPTY, "size": 2}
AMBIGUOUS: dict[str, tuple[dict[str, object], str]] = {
    "manifests and layers": (
        {"mediaType": OCI_MANIFEST, "config": CONFIG, "layers": [], "manifests": []},
        OCI_MANIFEST,
    ),
    "manifests and layers, as an index": (
        {"mediaType": OCI_INDEX, "config": CONFIG, "layers": [], "manifests": []},
        OCI_INDEX,
    ),
    "an index announced as a manifest": ({"mediaType": OCI_INDEX, "manifests": []}, OCI_MANIFEST),
    "a manifest announced as an index": (
        {"mediaType": OCI_MANIFEST, "config": CONFIG, "layers": []},
        OCI_INDEX,
    ),
    "OCI announced as Docker": (
        {"mediaType": OCI_MANIFEST, "config": CONFIG, "layers": []},
        DOCKER_MANIFEST,
    ),
    "an index by shape, announced as a manifest": ({"manifests": []}, OCI_MANIFEST),
    "ten thousand and one entries": (
        {"mediaType": OCI_INDEX, "manifests": [CONFIG] * 10_001},
        OCI_INDEX,
    ),
    "neither": ({}, OCI_MANIFEST),
}


@pytest.mark.parametrize("variant", AMBIGUOUS)
def test_an_ambiguous_document_is_refused(scene: Scene, variant: str) -> None:
    document, announced = AMBIGUOUS[variant]
    scene.registry.put_manifest(REPO, "bad", {"schemaVersion": 2, **document}, announced)
    with pytest.raises(InvalidManifest):
        scene.client().resolve(scene.registry.reference(REPO, "bad"), deadline=scene.deadline())
    scene.assert_calm(4)


def test_a_document_nested_a_hundred_thousand_deep_is_refused(scene: Scene) -> None:
    raw = b'{"schemaVersion":2,"annotations":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    scene.registry.put_manifest(REPO, "bad", raw, OCI_MANIFEST)
    with pytest.raises(InvalidManifest):
        scene.client().resolve(scene.registry.reference(REPO, "bad"), deadline=scene.deadline())


# A tag that moves; URLs inside manifests.


def test_a_tag_that_moves_is_resolved_once(scene: Scene) -> None:
    client = scene.client()
    resolved = client.resolve(scene.ref, deadline=scene.deadline())
    scene.registry.put_image(REPO, "v1", [])
    assert resolved.descriptor.digest == scene.image.digest
    assert client.manifest(scene.ref, resolved.descriptor, deadline=scene.deadline()) == resolved.raw
    asked = [
        r.path.rpartition("/")[2] for r in scene.registry.seen(contains="/manifests/") if r.status == 200
    ]
    assert asked == ["v1", str(scene.image.digest)]
    assert not scene.registry.seen("HEAD")


@pytest.mark.parametrize("present", [True, False])
def test_urls_in_a_manifest_are_never_followed(scene: Scene, present: bool) -> None:
    foreign = scene.layer_at(urls=(f"{scene.stranger.url}/v2/{REPO}/blobs/{scene.layer.digest}",))
    if not present:
        scene.registry.fault(lambda r: Response(404) if "/blobs/" in r.path else None)
    fetcher = Fetcher(scene.client())
    if present:
        assert fetcher.read(scene.ref, foreign, limit=MB, deadline=scene.deadline()) == scene.data
    else:
        with pytest.raises(RegistryError):
            fetcher.read(scene.ref, foreign, limit=MB, deadline=scene.deadline())
    assert not scene.stranger.requests
