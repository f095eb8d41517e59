"""The client against the fake registry: what well-behaved servers get."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.httpd import Response
from tests.fakes.proxy import TunnelProxy
from tests.fakes.registry import FakeRegistry
from tests.fakes.scene import REPO, Scene
from tests.fakes.tls import Authority
from unlade.errors import InvalidInput, RegistryError
from unlade.model import Digest, Index, Manifest
from unlade.model.mediatypes import ACCEPT, OCI_INDEX
from unlade.registry import Credential, NotFound, Registry, StaticCredentials, TLSFailure, Unreachable


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene(auth=None) as stage:
        yield stage


def read(client: Registry, scene: Scene, **part: int) -> bytes:
    with client.blob(scene.ref, scene.layer, deadline=scene.deadline(), **part) as stream:
        data, view = bytearray(), memoryview(bytearray(1000))
        while got := stream.readinto(view):
            data += view[:got]
    return bytes(data)


def test_a_tag_is_resolved_by_one_get(scene: Scene) -> None:
    resolved = scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert resolved.descriptor == scene.image
    assert Digest.of(resolved.raw) == scene.image.digest
    assert isinstance(resolved.document, Manifest)
    (request,) = scene.registry.requests
    assert (request.method, request.path) == ("GET", f"/v2/{REPO}/manifests/v1")
    assert request.headers["Accept"] == ", ".join(ACCEPT)
    assert request.headers["Accept-Encoding"] == "identity"


def test_an_index_is_resolved_as_one(scene: Scene) -> None:
    document = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [scene.image.to_json()]}
    index = scene.registry.put_manifest(REPO, "multi", document)
    resolved = scene.client().resolve(scene.registry.reference(REPO, "multi"), deadline=scene.deadline())
    assert resolved.descriptor == index
    assert isinstance(resolved.document, Index)


def test_a_sha512_digest_is_verified_as_one(scene: Scene) -> None:
    raw = scene.registry.repository(REPO).manifests[str(scene.image.digest)]
    digest = Digest("sha512", hashlib.sha512(raw[1]).hexdigest())
    scene.registry.repository(REPO).manifests[str(digest)] = raw
    ref = scene.registry.reference(REPO, digest)
    assert scene.client().resolve(ref, deadline=scene.deadline()).descriptor.digest == digest


@pytest.mark.parametrize(
    "part", [{}, {"offset": 1}, {"offset": 100, "end": 101}, {"end": 5000}, {"offset": 10239}]
)
def test_parts_of_a_blob(scene: Scene, part: dict[str, int]) -> None:
    assert read(scene.client(), scene, **part) == scene.data[part.get("offset", 0) : part.get("end", 10240)]


def test_a_chunked_blob(scene: Scene) -> None:
    scene.registry.alter(
        lambda q, r: (
            Response(200, {}, iter([scene.data[:7], scene.data[7:]])) if "/blobs/" in q.path else None
        )
    )
    assert read(scene.client(), scene) == scene.data


def test_a_blob_that_ends_with_its_connection(scene: Scene) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    scene.registry.fault(lambda q: Response(raw=head + scene.data) if "/blobs/" in q.path else None)
    assert read(scene.client(), scene) == scene.data


def test_an_empty_blob(scene: Scene) -> None:
    empty = scene.registry.put_blob(REPO, b"")
    with scene.client().blob(scene.ref, empty, deadline=scene.deadline()) as stream:
        assert stream.readinto(memoryview(bytearray(10))) == 0


@pytest.mark.parametrize(
    "part", [{"offset": -1}, {"offset": 20000}, {"offset": 10, "end": 5}, {"end": 10241}]
)
def test_a_part_outside_the_blob(scene: Scene, part: dict[str, int]) -> None:
    with pytest.raises(InvalidInput):
        read(scene.client(), scene, **part)


def test_connections_are_used_again(scene: Scene) -> None:
    client = scene.client()
    for _ in range(5):
        client.resolve(scene.ref, deadline=scene.deadline())
        read(client, scene)
        with pytest.raises(NotFound):
            client.resolve(scene.registry.reference(REPO, "none"), deadline=scene.deadline())
        client.head_blob(scene.ref, scene.layer.digest, deadline=scene.deadline())
    assert scene.registry.connections == 1


def test_a_stream_closed_early_does_not_poison_the_next(scene: Scene) -> None:
    client = scene.client()
    with client.blob(scene.ref, scene.layer, deadline=scene.deadline()) as stream:
        stream.readinto(memoryview(bytearray(10)))
    assert read(client, scene) == scene.data


def test_a_server_that_closed_an_idle_connection_is_asked_again(scene: Scene) -> None:
    client = scene.client()
    client.resolve(scene.ref, deadline=scene.deadline())
    scene.registry.drop_connections()
    client.resolve(scene.ref, deadline=scene.deadline())
    assert scene.registry.connections == 2


def test_a_passing_failure_is_tried_again(scene: Scene) -> None:
    scene.registry.fault(lambda q: Response(503, {"Retry-After": "0"}), times=1)
    scene.registry.fault(lambda q: Response.drop(), times=1)
    assert scene.client().resolve(scene.ref, deadline=scene.deadline()).descriptor == scene.image
    assert len(scene.registry.requests) == 3


def test_a_manifest_cut_on_its_way_is_asked_for_again(scene: Scene) -> None:
    scene.registry.alter(lambda q, r: Response(200, r.headers, r.body, cut_after=10), times=2)
    assert scene.client().resolve(scene.ref, deadline=scene.deadline()).descriptor == scene.image
    assert len(scene.registry.requests) == 3


def test_head_blob(scene: Scene) -> None:
    client = scene.client()
    assert client.head_blob(scene.ref, scene.layer.digest, deadline=scene.deadline()) == scene.layer.size
    assert client.head_blob(scene.ref, Digest.of(b"none"), deadline=scene.deadline()) is None


def test_tags_page_by_page(scene: Scene) -> None:
    tags = sorted(f"v{n}" for n in range(25))
    scene.registry.page_size = 10
    for tag in tags:
        scene.registry.repository("many").tags[tag] = str(scene.image.digest)
    ref = scene.registry.reference("many")
    assert list(scene.client().tags(ref, deadline=scene.deadline())) == tags
    assert len(scene.registry.requests) == 3


def test_no_tags(scene: Scene) -> None:
    scene.registry.fault(lambda q: Response(200, body=b'{"name":"x","tags":null}'))
    assert list(scene.client().tags(scene.ref, deadline=scene.deadline())) == []


def test_errors_say_what_where_and_what_next(scene: Scene) -> None:
    with pytest.raises(NotFound) as caught:
        scene.client().resolve(scene.registry.reference(REPO, "none"), deadline=scene.deadline())
    error = caught.value
    assert (error.status, error.codes) == (404, ("MANIFEST_UNKNOWN",))
    assert f"{scene.registry.host}/{REPO}:none" in str(error)
    assert error.url == f"{scene.registry.url}/v2/{REPO}/manifests/none"
    assert error.next_step
    assert not error.retryable


@pytest.mark.parametrize("fault", ["drop", "not HTTP", "silence"])
def test_every_error_names_the_reference(scene: Scene, fault: str) -> None:
    answers = {"drop": Response.drop(), "not HTTP": Response(raw=b"x\r\n"), "silence": Response(delay=3)}
    scene.registry.fault(lambda q: answers[fault])
    with pytest.raises(RegistryError, match=str(scene.ref)) as caught:
        scene.client(replace(scene.config(), attempts=1)).resolve(scene.ref, deadline=scene.deadline())
    assert caught.value.next_step


def test_a_broken_body_names_the_digest(scene: Scene) -> None:
    scene.registry.alter(lambda q, r: replace(r, cut_after=100))
    stream = scene.client().blob(scene.ref, scene.layer, deadline=scene.deadline())
    with stream, pytest.raises(RegistryError, match=str(scene.layer.digest)):
        while stream.readinto(memoryview(bytearray(50))):
            pass


def test_mirrors_in_their_order_with_their_headers(scene: Scene, tmp_path: Path) -> None:
    with FakeRegistry(address="127.0.0.3", share=scene.registry) as second:
        (tmp_path / "_default").mkdir()
        (tmp_path / "_default" / "hosts.toml").write_text(
            f'[host."{scene.stranger.url}"]\ncapabilities = ["resolve"]\n'
            f'[host."{second.url}"]\ncapabilities = ["pull"]\nheader = {{ x-token = "abc" }}\n'
        )
        client = scene.client(scene.config(certs_dirs=(str(tmp_path),)))
        client.resolve(scene.ref, deadline=scene.deadline())
        assert read(client, scene) == scene.data
        assert [len(server.requests) for server in (scene.stranger, second, scene.registry)] == [1, 1, 0]
        assert second.requests[0].headers["x-token"] == "abc"
        assert scene.stranger.requests[0].headers["x-token"] is None
        assert second.requests[0].first("ns") == scene.registry.host


def test_a_mirrors_path_override(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "_default").mkdir()
    (tmp_path / "_default" / "hosts.toml").write_text(
        f'[host."{scene.stranger.url}/v2/proxy"]\noverride_path = true\n'
    )
    image = scene.registry.put_image(f"proxy/{REPO}", "v1", [])
    client = scene.client(scene.config(certs_dirs=(str(tmp_path),)))
    assert client.resolve(scene.ref, deadline=scene.deadline()).descriptor == image


@pytest.mark.parametrize("how", ["ca_files", "certs.d", "skip", "skip all"])
def test_tls(tmp_path: Path, how: str) -> None:
    authority = Authority(str(tmp_path))
    with FakeRegistry(tls=authority.server_context("127.0.0.1")) as server, Scene(auth=None) as scene:
        image = server.put_image(REPO, "v1", [])
        directory = tmp_path / "certs.d" / server.host
        directory.mkdir(parents=True)
        (directory / "ca.crt").write_bytes(Path(authority.ca).read_bytes())
        config = {
            "ca_files": scene.config(ca_files=(authority.ca,)),
            "certs.d": scene.config(certs_dirs=(str(tmp_path / "certs.d"),)),
            "skip": scene.config(insecure_skip_tls_verify=frozenset({server.host})),
            "skip all": scene.config(insecure_skip_tls_verify=frozenset({"*"})),
        }[how]
        with Registry(config) as client:
            for _ in range(3):
                ref = server.reference(REPO, "v1")
                assert client.resolve(ref, deadline=scene.deadline()).descriptor == image
        assert server.connections == 1


def test_a_large_blob_over_tls(tmp_path: Path) -> None:
    authority = Authority(str(tmp_path))
    data = bytes(range(256)) * 20_000
    with FakeRegistry(tls=authority.server_context("127.0.0.1")) as server, Scene(auth=None) as scene:
        blob = server.put_blob(REPO, data)
        client = Registry(scene.config(ca_files=(authority.ca,)))
        with client, client.blob(server.reference(REPO), blob, deadline=scene.deadline()) as stream:
            got, view = bytearray(), memoryview(bytearray(1 << 20))
            while count := stream.readinto(view):
                got += view[:count]
    assert bytes(got) == data


def test_a_client_certificate(tmp_path: Path) -> None:
    authority = Authority(str(tmp_path))
    context = authority.server_context("127.0.0.1", require_client=True)
    with FakeRegistry(tls=context) as server, Scene(auth=None) as scene:
        image = server.put_image(REPO, "v1", [])
        pair = authority.issue("alice", client=True)
        directory = tmp_path / "certs.d" / server.host
        directory.mkdir(parents=True)
        (directory / "hosts.toml").write_text(
            f"ca = {json.dumps(authority.ca)}\nclient = [[{json.dumps(pair.cert)}, {json.dumps(pair.key)}]]"
        )
        config = scene.config(certs_dirs=(str(tmp_path / "certs.d"),))
        ref = server.reference(REPO, "v1")
        with Registry(config) as client:
            assert client.resolve(ref, deadline=scene.deadline()).descriptor == image
        with (
            Registry(replace(config, certs_dirs=(), ca_files=(authority.ca,))) as client,
            pytest.raises((TLSFailure, Unreachable)),
        ):
            client.resolve(ref, deadline=scene.deadline())


def test_a_ca_file_that_is_none(tmp_path: Path, scene: Scene) -> None:
    (tmp_path / "ca.pem").write_text("not a certificate")
    config = scene.config(plain=(), ca_files=(str(tmp_path / "ca.pem"),))
    with Registry(config) as client, pytest.raises(InvalidInput, match="certificate file"):
        client.resolve(scene.ref, deadline=scene.deadline())


def test_a_proxy_is_used_except_for_loopback(scene: Scene) -> None:
    with FakeRegistry(address="127.0.0.4") as proxy:
        proxy.fault(lambda q: Response(200, body=b"{}"))
        config = replace(
            scene.config(),
            proxies={"http": proxy.url},
            plain_http=frozenset({"r.example.test", scene.registry.host}),
        )
        with Registry(config) as client:
            client.resolve(scene.ref, deadline=scene.deadline())
            assert not proxy.requests
            ref = type(scene.ref)("r.example.test", REPO, "v1")
            with pytest.raises(InvalidInput):
                client.resolve(ref, deadline=scene.deadline())
        assert proxy.requests[0].headers["Host"] == "r.example.test"


def test_a_proxy_gets_its_own_credentials_and_no_others(scene: Scene) -> None:
    with FakeRegistry(address="127.0.0.4") as proxy:
        proxy.fault(lambda q: Response(200, body=b"{}"))
        url = proxy.url.replace("://", "://user:p%40ss@")
        config = replace(scene.config(), proxies={"http": url}, plain_http=frozenset({"r.example.test"}))
        with Registry(config) as client, pytest.raises(InvalidInput):
            client.resolve(type(scene.ref)("r.example.test", REPO, "v1"), deadline=scene.deadline())
        (request,) = proxy.requests
        assert request.headers["Proxy-Authorization"] == "Basic dXNlcjpwQHNz"
        assert request.authorization is None


def test_the_proxy_of_the_environment(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRegistry(address="127.0.0.4") as proxy:
        proxy.fault(lambda q: Response(200, body=b"{}"))
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "direct.example.test")
        hosts = frozenset({"r.example.test", "direct.example.test"})
        config = replace(scene.config(), plain_http=hosts, attempts=1)
        with Registry(config) as client:
            with pytest.raises(InvalidInput):
                client.resolve(type(scene.ref)("r.example.test", REPO, "v1"), deadline=scene.deadline())
            with pytest.raises(Unreachable, match="direct"):
                client.resolve(type(scene.ref)("direct.example.test", REPO, "v1"), deadline=scene.deadline())
        assert len(proxy.requests) == 1


def test_a_registry_with_tls_behind_a_proxy(tmp_path: Path, scene: Scene) -> None:
    authority = Authority(str(tmp_path))
    with FakeRegistry(
        tls=authority.server_context("r.example.test"), users={"u": "p"}, name="r.example.test"
    ) as server:
        image = server.put_image(REPO, "v1", [])
        with TunnelProxy(("127.0.0.1", server.port)) as proxy:
            url = proxy.url.replace("://", "://me:pw@")
            config = scene.config(proxies={"https": url}, ca_files=(authority.ca,))
            with Registry(config, StaticCredentials({server.host: Credential("u", "p")})) as client:
                for _ in range(2):
                    ref = server.reference(REPO, "v1")
                    assert client.resolve(ref, deadline=scene.deadline()).descriptor == image
            (head,) = proxy.heads
    assert head.startswith(f"CONNECT {server.host} HTTP/1.")
    assert "proxy-authorization: basic bwu6chc=" in head.lower()
    assert "\r\nauthorization" not in head.lower()


@pytest.mark.parametrize("how", ["silent", "refuse"])
def test_a_proxy_that_does_not_let_us_through(scene: Scene, how: str) -> None:
    began = time.monotonic()
    with TunnelProxy(
        ("127.0.0.1", 1), silent=how == "silent", refuse="403 No" if how == "refuse" else ""
    ) as proxy:
        config = replace(scene.config(proxies={"https": proxy.url}), connect_timeout=0.5)
        with Registry(config) as client, pytest.raises(Unreachable):
            client.resolve(type(scene.ref)("r.example.test", REPO, "v1"), deadline=scene.deadline())
        assert len(proxy.heads) <= 3
    assert time.monotonic() - began < 10


def test_tls_without_trust_names_the_way_out(tmp_path: Path, scene: Scene) -> None:
    context = Authority(str(tmp_path)).server_context("127.0.0.1")
    with (
        FakeRegistry(tls=context) as server,
        Registry(scene.config()) as client,
        pytest.raises(TLSFailure, match="certificate") as caught,
    ):
        client.resolve(server.reference(REPO, "v1"), deadline=scene.deadline())
    assert "ca.crt" in caught.value.next_step
