"""Hostile registries, third part: servers that stall, flood or never stop, and false referrers (V12, V13).

Every variant counts requests: a client must not turn one bad server into many requests, nor wait for it
forever.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.fakes.httpd import Request, Response
from tests.fakes.registry import FakeRegistry
from tests.fakes.scene import REPO, Scene
from unlade.errors import DeadlineExceeded, IntegrityError, UnladeError
from unlade.model import Deadline, Digest, decode_manifest
from unlade.model.mediatypes import OCI_INDEX, OCI_MANIFEST
from unlade.registry import (
    BadResponse,
    HTTPFailure,
    NotFound,
    RateLimited,
    Registry,
    ResponseTooLarge,
    TooManyPages,
    TooSlow,
    Unavailable,
    Unreachable,
    WrongSubject,
    check_subject,
)
from unlade.transfer.fetch import Fetcher

MB = 1 << 20


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene(auth=None) as stage:
        yield stage


def read_layer(scene: Scene, deadline: Deadline | None = None) -> bytes:
    deadline = deadline or scene.deadline()
    return Fetcher(scene.client()).read(scene.ref, scene.layer, limit=MB, deadline=deadline)


# 429, Retry-After, failures that do not end.

AGAIN: dict[str, tuple[Response, type[UnladeError], int]] = {
    # answer, error, requests at most
    "429 for ever": (Response(429), RateLimited, 3),
    "429 with a second": (Response(429, {"Retry-After": "0"}), RateLimited, 3),
    "429 for thirty years": (Response(429, {"Retry-After": "1000000000"}), RateLimited, 1),
    "429 for a number of a thousand digits": (Response(429, {"Retry-After": "9" * 1000}), RateLimited, 1),
    "429 until a date far away": (
        Response(429, {"Retry-After": formatdate(time.time() + 10**9, usegmt=True)}),
        RateLimited,
        1,
    ),
    "429 until a date long ago": (Response(429, {"Retry-After": formatdate(0, usegmt=True)}), RateLimited, 3),
    "429 with nonsense": (Response(429, {"Retry-After": "soon"}), RateLimited, 3),
    "429 with a negative number": (Response(429, {"Retry-After": "-1"}), RateLimited, 3),
    "503 for ever": (Response(503), Unavailable, 3),
    "503 for thirty years": (Response(503, {"Retry-After": "1000000000"}), Unavailable, 1),
    "500": (Response(500), Unavailable, 3),
    "502 with a page": (Response(502, body=b"<html>" * 1000), Unavailable, 3),
    "504": (Response(504), Unavailable, 3),
    "400": (Response(400), HTTPFailure, 1),
    "418": (Response(418), HTTPFailure, 1),
    "501": (Response(501), HTTPFailure, 1),
    "connection dropped": (Response.drop(), Unreachable, 3),
    "not HTTP": (Response(raw=b"SSH-2.0-OpenSSH_9.6\r\n"), BadResponse, 1),
    "a status line of 100 KB": (
        Response(raw=b"HTTP/1.1 200 " + b"x" * 100_000 + b"\r\n\r\n"),
        BadResponse,
        1,
    ),
    "ten thousand headers": (
        Response(raw=b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(10_000)) + b"\r\n"),
        BadResponse,
        1,
    ),
    "a header of 100 KB": (
        Response(raw=b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"),
        BadResponse,
        1,
    ),
    "a status of 99999": (Response(raw=b"HTTP/1.1 99999 OK\r\n\r\n"), BadResponse, 1),
    "interim answers without an end": (
        Response(raw=b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000),
        UnladeError,
        3,
    ),
    "an informational status": (
        Response(raw=b"HTTP/1.1 199 Hm\r\nContent-Length: 0\r\n\r\n"),
        BadResponse,
        1,
    ),
    "a bad chunk size": (
        Response(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        BadResponse,
        3,
    ),
    "a negative chunk size": (
        Response(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n"),
        UnladeError,
        3,
    ),
}


@pytest.mark.parametrize("variant", AGAIN)
def test_a_failure_is_tried_again_within_bounds(scene: Scene, variant: str) -> None:
    answer, error, limit = AGAIN[variant]
    scene.registry.fault(lambda q: answer)
    began = time.monotonic()
    with pytest.raises(error):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert len(scene.registry.requests) <= limit
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("variant", ["429 for ever", "503 for ever", "connection dropped"])
@pytest.mark.parametrize("call", ["blob", "head_blob", "authorize", "tags", "put_manifest", "referrers"])
def test_every_call_keeps_the_bounds(scene: Scene, variant: str, call: str) -> None:
    answer, error, limit = AGAIN[variant]
    scene.registry.fault(lambda q: answer)
    client, ref, deadline = scene.client(), scene.ref, scene.deadline()
    raw = scene.registry.repository(REPO).manifests[str(scene.image.digest)][1]
    calls: dict[str, Callable[[], object]] = {
        "blob": lambda: client.blob(ref, scene.layer, deadline=deadline),
        "head_blob": lambda: client.head_blob(ref, scene.layer.digest, deadline=deadline),
        "authorize": lambda: client.authorize(ref, scene.image.digest, deadline=deadline),
        "tags": lambda: list(client.tags(ref, deadline=deadline)),
        "put_manifest": lambda: client.put_manifest(ref, raw, OCI_MANIFEST, tag="v2", deadline=deadline),
        "referrers": lambda: client.referrers(ref, scene.image.digest, deadline=deadline),
    }
    with pytest.raises(error):
        calls[call]()
    assert len(scene.registry.requests) <= limit


def test_a_token_server_that_fails_is_not_stormed() -> None:
    with Scene() as scene:
        scene.tokens.fault(lambda q: Response(503))
        with pytest.raises(Unavailable):
            scene.client().resolve(scene.ref, deadline=scene.deadline())
        scene.assert_calm(12)


def test_a_registry_that_always_says_401_is_not_stormed() -> None:
    with Scene() as scene:
        challenge = f'Bearer realm="{scene.tokens.realm}",service="s"'
        scene.registry.fault(lambda q: Response(401, {"WWW-Authenticate": challenge}))
        with pytest.raises(UnladeError):
            scene.client().resolve(scene.ref, deadline=scene.deadline())
        scene.assert_calm(8)


def test_a_hundred_threads_ask_for_one_token() -> None:
    with Scene() as scene:
        scene.tokens.alter(lambda q, r: Response(r.status, r.headers, r.body, delay=0.1))
        client = scene.client()
        with pytest.raises(NotFound):
            client.resolve(scene.registry.reference(REPO, "none"), deadline=scene.deadline())
        asked = len(scene.tokens.requests)
        scene.tokens.grants.clear()  # as after a restart of the token server
        failures: list[BaseException] = []

        def pull() -> None:
            try:
                client.resolve(scene.ref, deadline=scene.deadline())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=pull) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert len(scene.tokens.requests) - asked <= 3


# Slow drip, silence, cancellation.


def test_a_body_that_drips_is_given_up(scene: Scene) -> None:
    scene.registry.alter(
        lambda q, r: Response(200, r.headers, r.body, drip=(1, 0.05)) if "/blobs/" in q.path else None
    )
    with scene.client().blob(scene.ref, scene.layer, deadline=scene.deadline()) as stream:
        began = time.monotonic()
        with pytest.raises(TooSlow) as caught:
            while stream.readinto(memoryview(bytearray(1024))):
                pass
    assert time.monotonic() - began < 2
    assert caught.value.retryable


def test_a_chunked_body_that_drips_is_given_up(scene: Scene) -> None:
    def drip() -> Iterator[bytes]:
        while True:
            time.sleep(0.05)
            yield b"x"

    scene.registry.alter(lambda q, r: Response(200, r.headers, drip()) if "/manifests/" in q.path else None)
    with pytest.raises(TooSlow):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert len(scene.registry.requests) <= 3


@pytest.mark.parametrize(
    "unit",
    [
        b"0;" + b"x" * 60_000 + b"\r\n" + b"X-Trailer: 1\r\n" * 100,  # trailers without an end
        b"1;" + b"x" * 60_000 + b"\r\na\r\n",  # a byte of content in sixty thousand of padding
    ],
    ids=["trailers", "padding"],
)
def test_a_flood_that_brings_nothing_is_given_up(scene: Scene, unit: bytes) -> None:
    """Fast, but useless: what counts is content."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = unit if unit.startswith(b"1;") else unit + b"X: 1\r\n" * 20_000
    scene.registry.fault(lambda q: Response(raw=head, raw_flood=body))
    began = time.monotonic()
    with pytest.raises((TooSlow, BadResponse)):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert time.monotonic() - began < 10
    assert len(scene.registry.requests) <= 3


def test_a_body_that_stops_is_given_up(scene: Scene) -> None:
    scene.registry.alter(
        lambda q, r: Response(200, r.headers, r.body, drip=(5000, 30)) if "/blobs/" in q.path else None
    )
    with scene.client().blob(scene.ref, scene.layer, deadline=scene.deadline()) as stream:
        began = time.monotonic()
        with pytest.raises(TooSlow):
            while stream.readinto(memoryview(bytearray(1024))):
                pass
    assert time.monotonic() - began < 3


def test_headers_that_drip_are_given_up(scene: Scene) -> None:
    """One byte at a time would satisfy any timeout per receive."""
    scene.registry.fault(lambda q: Response(200, {"X-Slow": "x" * 5000}, drip_head=0.02))
    began = time.monotonic()
    with pytest.raises(TooSlow):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert time.monotonic() - began < 8
    assert len(scene.registry.requests) <= 3


def test_a_server_that_says_nothing_is_given_up(scene: Scene) -> None:
    scene.registry.fault(lambda q: Response(200, delay=30))
    began = time.monotonic()
    with pytest.raises(TooSlow):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert time.monotonic() - began < 8
    assert len(scene.registry.requests) <= 3


def test_a_deadline_ends_a_silent_request(scene: Scene) -> None:
    scene.registry.fault(lambda q: Response(200, delay=30))
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        scene.client().resolve(scene.ref, deadline=Deadline.after(0.3))
    assert time.monotonic() - began < 2
    assert len(scene.registry.requests) == 1


def test_cancelling_ends_a_silent_body(scene: Scene) -> None:
    scene.registry.alter(
        lambda q, r: Response(200, r.headers, r.body, drip=(5000, 30)) if "/blobs/" in q.path else None
    )
    client = scene.client(replace(scene.config(), rate_window=60.0))
    deadline = Deadline.never()
    timer = threading.Timer(0.3, deadline.cancel)
    timer.start()
    began = time.monotonic()
    with client.blob(scene.ref, scene.layer, deadline=deadline) as stream, pytest.raises(DeadlineExceeded):
        while stream.readinto(memoryview(bytearray(1024))):
            pass
    timer.join()
    assert time.monotonic() - began < 3


def test_a_deadline_ends_the_waits_between_attempts(scene: Scene) -> None:
    scene.registry.fault(lambda q: Response(503))
    config = replace(scene.config(), backoff=10.0, backoff_cap=10.0, attempts=10)
    began = time.monotonic()
    with pytest.raises(UnladeError):
        scene.client(config).resolve(scene.ref, deadline=Deadline.after(0.5))
    assert time.monotonic() - began < 3


def test_a_slow_reader_is_not_a_slow_server(scene: Scene) -> None:
    with scene.client().blob(scene.ref, scene.layer, deadline=scene.deadline()) as stream:
        got = stream.readinto(memoryview(bytearray(10)))
        time.sleep(0.8)  # longer than the window in which a server's rate is judged
        view = memoryview(bytearray(1 << 16))
        while count := stream.readinto(view):
            got += count
    assert got == scene.layer.size


# Endless pagination.


def next_page(target: str, body: object) -> Response:
    return Response(200, {"Link": f'<{target}>; rel="next"'}, json.dumps(body).encode())


def test_tags_without_an_end(scene: Scene) -> None:
    count = iter(range(10**9))
    scene.registry.fault(
        lambda q: next_page(f"{q.path}?last={next(count)}", {"tags": ["a"]}) if "/tags/" in q.path else None
    )
    with pytest.raises(TooManyPages):
        for _ in scene.client().tags(scene.ref, deadline=scene.deadline()):
            pass
    assert len(scene.registry.requests) <= 1000


PAGES = {
    "the same page again": ("/v2/{repo}/tags/list?n=1000", TooManyPages),
    "another repository": ("/v2/team/other/tags/list", BadResponse),
    "another host": ("{stranger}/v2/{repo}/tags/list", BadResponse),
    "another scheme": ("https://127.0.0.1/v2/{repo}/tags/list", BadResponse),
    "a path that climbs": ("../../../secret", BadResponse),
    "a file": ("file:///etc/passwd", BadResponse),
    "a long header": ("/v2/{repo}/tags/list?last=" + "x" * 9000, BadResponse),
}


@pytest.mark.parametrize("variant", PAGES)
def test_a_next_page_that_must_not_be_asked_for(scene: Scene, variant: str) -> None:
    target, error = PAGES[variant]
    target = target.replace("{repo}", REPO).replace("{stranger}", scene.stranger.url)
    scene.registry.fault(lambda q: next_page(target, {"tags": ["a"]}) if "/tags/" in q.path else None)
    config = scene.config(plain=(scene.registry, scene.stranger))
    with pytest.raises(error):
        list(scene.client(config).tags(scene.ref, deadline=scene.deadline()))
    assert not scene.stranger.requests
    scene.assert_calm(2)


TAGS = {
    "over 16 MiB": b'{"tags":["' + b"x" * (16 * MB) + b'"]}',
    "not JSON": b"<html>",
    "not a list": b'{"tags":{"a":1}}',
    "not strings": b'{"tags":[1]}',
    "an escape sequence": b'{"tags":["\\u001b[2J"]}',
    "a path": b'{"tags":["../../x"]}',
}


@pytest.mark.parametrize("variant", TAGS)
def test_a_list_of_tags_that_is_none(scene: Scene, variant: str) -> None:
    scene.registry.fault(lambda q: Response(200, body=TAGS[variant]))
    with pytest.raises(BadResponse):
        list(scene.client().tags(scene.ref, deadline=scene.deadline()))
    scene.assert_calm(1)


# Referrers.

SBOM = "application/vnd.example.sbom"


def index_of(*entries: dict[str, object]) -> bytes:
    return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": list(entries)}).encode()


def many(count: int) -> bytes:
    return index_of(
        *(
            {"mediaType": OCI_MANIFEST, "digest": str(Digest.of(b"%d" % n)), "size": 2, "artifactType": SBOM}
            for n in range(count)
        )
    )


@pytest.mark.parametrize("by_tag", [True, False])
@pytest.mark.parametrize(
    ("variant", "error"),
    [
        ("thousands", TooManyPages),
        ("over 4 MiB", ResponseTooLarge),
        ("not an index", BadResponse),
        ("not JSON", BadResponse),
        ("bad digests", BadResponse),
    ],
)
def test_a_list_of_referrers_that_must_not_be_used(
    scene: Scene, by_tag: bool, variant: str, error: type[UnladeError]
) -> None:
    bodies = {
        "thousands": many(6000),
        "over 4 MiB": bytes(4 * MB + 1),
        "not an index": scene.registry.repository(REPO).manifests[str(scene.image.digest)][1],
        "not JSON": b"<html>",
        "bad digests": index_of({"mediaType": OCI_MANIFEST, "digest": "sha256:../x", "size": 2}),
    }

    def answer(request: Request) -> Response | None:
        if "/referrers/" in request.path and by_tag:
            return Response(404)
        if "/referrers/" in request.path or "/manifests/sha256-" in request.path:
            return Response(200, {"Content-Type": OCI_INDEX}, bodies[variant])
        return None

    scene.registry.fault(answer)
    with pytest.raises(error):
        scene.client().referrers(scene.ref, scene.image.digest, deadline=scene.deadline())
    scene.assert_calm(2)


def test_referrers_without_an_end(scene: Scene) -> None:
    count = iter(range(10**9))

    def page(request: Request) -> Response | None:
        if "/referrers/" not in request.path:
            return None
        link = f'<{request.path}?page={next(count)}>; rel="next"'
        return Response(200, {"Content-Type": OCI_INDEX, "Link": link}, index_of())

    scene.registry.fault(page)
    with pytest.raises(TooManyPages):
        scene.client().referrers(scene.ref, scene.image.digest, deadline=scene.deadline())
    assert len(scene.registry.requests) <= 1000


@pytest.mark.parametrize("claim", ["wrong subject", "no subject", "forged type", "right"])
def test_a_referrer_is_held_against_its_own_manifest(scene: Scene, claim: str) -> None:
    real_type = "application/vnd.example.other" if claim == "forged type" else SBOM
    other = scene.registry.put_image(REPO, None, [])
    subject = {"wrong subject": other, "no subject": None}.get(claim, scene.image)
    entry = scene.registry.put_artifact(REPO, None, [scene.layer], real_type, subject=subject)
    listed = {**entry.to_json(), "artifactType": SBOM}
    scene.registry.fault(
        lambda q: (
            Response(200, {"Content-Type": OCI_INDEX}, index_of(listed)) if "/referrers/" in q.path else None
        )
    )
    client = scene.client()
    (found,) = client.referrers(scene.ref, scene.image.digest, artifact_type=SBOM, deadline=scene.deadline())
    document = decode_manifest(client.manifest(scene.ref, found, deadline=scene.deadline()))
    if claim == "right":
        check_subject(document, found, scene.image.digest, artifact_type=SBOM)
    else:
        with pytest.raises(WrongSubject):
            check_subject(document, found, scene.image.digest, artifact_type=SBOM)


# Mirrors that misbehave do not stand between us and the registry, and are not asked again at once.

MIRROR_FAULTS = {
    "dropped": Response.drop(),
    "503": Response(503),
    "wrong bytes": Response(200, body=b'{"schemaVersion":2}'),
    "429 for thirty years": Response(429, {"Retry-After": "1000000000"}),
    "not HTTP": Response(raw=b"hello\r\n"),
    "redirect to metadata": Response(307, {"Location": "https://169.254.169.254/"}),
    "realm at metadata": Response(401, {"WWW-Authenticate": 'Bearer realm="https://169.254.169.254/t"'}),
    "404": Response(404),
}


@pytest.mark.parametrize("variant", MIRROR_FAULTS)
@pytest.mark.parametrize("by", ["tag", "digest"])
def test_a_bad_mirror_is_passed_over(scene: Scene, tmp_path: Path, variant: str, by: str) -> None:
    directory = tmp_path / scene.registry.host
    directory.mkdir()
    directory.joinpath("hosts.toml").write_text(f'[host."{scene.stranger.url}"]\n')
    scene.stranger.fault(lambda q: MIRROR_FAULTS[variant])
    ref = scene.ref if by == "tag" else scene.registry.reference(REPO, scene.image)
    with Registry(scene.config(certs_dirs=(str(tmp_path),))) as client:
        for _ in range(5):
            assert client.resolve(ref, deadline=scene.deadline()).descriptor == scene.image
    assert len(scene.stranger.requests) == (5 if variant == "404" else 1)
    assert scene.stranger.requests[0].first("ns") == scene.registry.host


def test_when_every_host_fails_the_upstreams_error_names_the_mirrors(scene: Scene, tmp_path: Path) -> None:
    directory = tmp_path / scene.registry.host
    directory.mkdir()
    directory.joinpath("hosts.toml").write_text(f'[host."{scene.stranger.url}"]\n')
    for server in (scene.stranger, scene.registry):
        server.fault(lambda q: Response(503))
    with Registry(scene.config(certs_dirs=(str(tmp_path),))) as client, pytest.raises(Unavailable) as caught:
        client.resolve(scene.ref, deadline=scene.deadline())
    assert scene.stranger.url in str(caught.value)
    scene.assert_calm(4)


def test_a_mirror_with_wrong_bytes_is_found_out_once(scene: Scene, tmp_path: Path) -> None:
    directory = tmp_path / scene.registry.host
    directory.mkdir()
    directory.joinpath("hosts.toml").write_text(f'[host."{scene.stranger.url}"]\n')
    scene.stranger.alter(lambda q, r: Response(200, r.headers, bytes(scene.layer.size)))
    with Registry(scene.config(certs_dirs=(str(tmp_path),))) as client:
        fetcher = Fetcher(client)
        with pytest.raises(IntegrityError):
            fetcher.read(scene.ref, scene.layer, limit=MB, deadline=scene.deadline())
        assert fetcher.read(scene.ref, scene.layer, limit=MB, deadline=scene.deadline()) == scene.data
    assert len(scene.stranger.requests) == 1


def test_a_registry_that_is_not_there(scene: Scene) -> None:
    with FakeRegistry() as gone:
        ref = gone.reference(REPO, "v1")
        config = scene.config(plain=(gone,))
    with Registry(config) as client, pytest.raises(Unreachable) as caught:
        client.resolve(ref, deadline=scene.deadline())
    assert caught.value.retryable
    assert caught.value.next_step
