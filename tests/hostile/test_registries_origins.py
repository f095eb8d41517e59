"""Hostile registries, second part: redirects, realms, locations, plain HTTP, and who sees a credential.

The stranger is another host (127.0.0.2). Whatever the registry says, the stranger must never receive
Alice's password or a token, and nothing may be sent to a metadata address or over plain HTTP that was not
allowlisted.
"""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.httpd import FakeServer, Request, Response
from tests.fakes.names import names
from tests.fakes.registry import FakeRegistry
from tests.fakes.scene import PASSWORD, REPO, USER, Scene
from tests.fakes.tls import Authority
from tests.fakes.tokens import TokenServer
from unlade.errors import RegistryError, UnladeError
from unlade.model import Digest
from unlade.registry import (
    BadResponse,
    Credential,
    PlainHTTPRefused,
    Registry,
    StaticCredentials,
    TLSFailure,
    Unauthorized,
    Unreachable,
    UnsafeRedirect,
    UntrustedRealm,
)
from unlade.transfer.fetch import Fetcher

MB = 1 << 20


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene() as stage:
        yield stage


def read_layer(scene: Scene, client: Registry) -> bytes:
    return Fetcher(client).read(scene.ref, scene.layer, limit=MB, deadline=scene.deadline())


def redirect_blobs(scene: Scene, location: str | None, status: int = 307) -> None:
    headers = {} if location is None else {"Location": location}
    scene.registry.alter(
        lambda q, r: Response(status, headers) if "/blobs/" in q.path and r.status == 200 else None
    )


# Redirects.


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("auth", ["token", "basic"])
def test_a_redirect_to_another_host_goes_without_credentials(status: int, auth: str) -> None:
    with Scene(auth=auth) as scene:
        redirect_blobs(scene, f"{scene.stranger.url}/v2/{REPO}/blobs/{scene.layer.digest}", status)
        client = scene.client(scene.config(plain=(scene.registry, scene.tokens, scene.stranger)))
        assert read_layer(scene, client) == scene.data
        assert len(scene.stranger.requests) == 1
        scene.assert_no_leak()


def test_a_redirect_to_another_port_goes_without_credentials(scene: Scene) -> None:
    with FakeRegistry(share=scene.registry) as neighbour:
        redirect_blobs(scene, f"{neighbour.url}/v2/{REPO}/blobs/{scene.layer.digest}")
        client = scene.client(scene.config(plain=(scene.registry, scene.tokens, neighbour)))
        assert read_layer(scene, client) == scene.data
        assert len(neighbour.requests) == 1
        scene.assert_no_leak(neighbour)


def test_a_redirect_on_the_registry_itself_keeps_the_credentials(scene: Scene) -> None:
    scene.registry.alter(
        lambda q, r: (
            Response(307, {"Location": f"{q.path}?again=1"}) if "/blobs/" in q.path and not q.query else None
        )
    )
    assert read_layer(scene, scene.client()) == scene.data
    assert scene.registry.requests[-1].query == {"again": ["1"]}
    assert scene.registry.requests[-1].authorization


def test_credentials_are_not_taken_up_again_when_a_stranger_leads_back(scene: Scene) -> None:
    home = f"{scene.registry.url}/v2/{REPO}/blobs/{scene.layer.digest}?back=1"
    redirect_blobs(scene, f"{scene.stranger.url}/bounce")
    scene.stranger.fault(lambda q: Response(307, {"Location": home}))
    client = scene.client(scene.config(plain=(scene.registry, scene.tokens, scene.stranger)))
    with pytest.raises(Unauthorized):
        read_layer(scene, client)
    returned = [request for request in scene.registry.requests if request.query.get("back")]
    assert returned
    assert all(request.authorization is None for request in returned)
    scene.assert_no_leak()


def test_a_stranger_that_asks_for_credentials_gets_none(scene: Scene) -> None:
    redirect_blobs(scene, f"{scene.stranger.url}/blob")
    challenge = f'Bearer realm="{scene.tokens.realm}",service="x"'
    scene.stranger.fault(lambda q: Response(401, {"WWW-Authenticate": challenge}))
    client = scene.client(scene.config(plain=(scene.registry, scene.tokens, scene.stranger)))
    with pytest.raises(Unauthorized):
        read_layer(scene, client)
    scene.assert_no_leak()
    scene.assert_calm(8)


REDIRECTS: dict[str, tuple[str | None, type[UnladeError]]] = {
    "plain http elsewhere": ("http://127.0.0.2:{port}/x", PlainHTTPRefused),
    "metadata address": ("http://169.254.169.254/latest/meta-data/iam", PlainHTTPRefused),
    "metadata address over TLS": ("https://169.254.169.254/latest", UnsafeRedirect),
    "link-local": ("https://169.254.1.1/", UnsafeRedirect),
    "link-local in IPv6": ("https://[fe80::1]/", UnsafeRedirect),
    "metadata address in IPv6": ("https://[fd00:ec2::254]/", UnsafeRedirect),
    "metadata address mapped into IPv6": ("https://[::ffff:169.254.169.254]/", UnsafeRedirect),
    "metadata name": ("https://metadata.google.internal/computeMetadata/v1/", UnsafeRedirect),
    "metadata name with a dot": ("https://metadata.google.internal./", UnsafeRedirect),
    "address as one number": ("https://2852039166/latest", BadResponse),
    "address in hex": ("https://0xa9fea9fe/latest", BadResponse),
    "address in octal": ("https://0251.0376.0251.0376/latest", BadResponse),
    "address in two parts": ("https://169.16689662/latest", BadResponse),
    "user information": ("https://registry@127.0.0.2/x", BadResponse),
    "file": ("file:///etc/passwd", BadResponse),
    "ftp": ("ftp://127.0.0.2/x", BadResponse),
    "javascript": ("javascript:alert(1)", BadResponse),
    "no host": ("https:///x", BadResponse),
    "backslash": ("https://127.0.0.2\\@127.0.0.1/x", BadResponse),
    "space": ("https://127.0.0.2/a b", BadResponse),
    "port out of range": ("https://127.0.0.2:99999/x", BadResponse),
    "twenty thousand characters": ("https://127.0.0.2/" + "x" * 20_000, BadResponse),
    "no location": (None, UnsafeRedirect),
    "scheme-relative, elsewhere": ("//127.0.0.2:{port}/x", PlainHTTPRefused),
}


@pytest.mark.parametrize("variant", REDIRECTS)
def test_a_redirect_that_must_not_be_followed(scene: Scene, variant: str) -> None:
    location, error = REDIRECTS[variant]
    redirect_blobs(scene, None if location is None else location.replace("{port}", str(scene.stranger.port)))
    with pytest.raises(error):
        read_layer(scene, scene.client())
    assert not scene.stranger.requests
    scene.assert_calm(5)


def test_redirects_end(scene: Scene) -> None:
    scene.registry.alter(lambda q, r: Response(307, {"Location": q.path}) if "/blobs/" in q.path else None)
    with pytest.raises(UnsafeRedirect):
        read_layer(scene, scene.client())
    scene.assert_calm(9)


def test_redirects_between_two_hosts_end(scene: Scene) -> None:
    redirect_blobs(scene, f"{scene.stranger.url}/x")
    count = iter(range(100))
    scene.stranger.fault(lambda q: Response(307, {"Location": f"{scene.stranger.url}/{next(count)}"}))
    client = scene.client(scene.config(plain=(scene.registry, scene.tokens, scene.stranger)))
    with pytest.raises(UnsafeRedirect):
        read_layer(scene, client)
    scene.assert_no_leak()
    scene.assert_calm(9)


@pytest.mark.parametrize("allowlisted", [True, False])
def test_no_downgrade_from_tls(tmp_path: Path, allowlisted: bool) -> None:
    authority = Authority(str(tmp_path))
    with (
        Scene(auth=None) as scene,
        FakeRegistry(
            tls=authority.server_context("127.0.0.1"), users={USER: PASSWORD}, share=scene.registry
        ) as secure,
    ):
        secure.alter(
            lambda q, r: (
                Response(307, {"Location": f"{scene.stranger.url}{q.path}"}) if r.status == 200 else None
            )
        )
        config = scene.config(plain=(scene.stranger,) if allowlisted else (), ca_files=(authority.ca,))
        with Registry(config, StaticCredentials({secure.host: scene.credential})) as client:
            with pytest.raises(UnsafeRedirect):
                client.blob(secure.reference(REPO), scene.layer, deadline=scene.deadline())
            with pytest.raises(UnsafeRedirect):
                client.resolve(secure.reference(REPO, "v1"), deadline=scene.deadline())
        assert not scene.stranger.requests


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_write_is_never_redirected(scene: Scene, status: int, method: str) -> None:
    def elsewhere(request: Request, response: Response) -> Response | None:
        if request.method == method and response.status in (201, 202):
            return Response(status, {"Location": f"{scene.stranger.url}/x"})
        return None

    scene.registry.alter(elsewhere)
    client = scene.client(scene.config(plain=(scene.registry, scene.tokens, scene.stranger)))
    with pytest.raises(UnsafeRedirect):
        client.upload_blob(
            scene.ref, Digest.of(b"x"), 1, lambda _offset: io.BytesIO(b"x"), deadline=scene.deadline()
        )
    assert not scene.stranger.requests
    scene.assert_calm(6)


# Upload locations.


@pytest.mark.parametrize("chunk_size", [None, 4096])
def test_an_upload_location_off_host_gets_no_credentials(scene: Scene, chunk_size: int | None) -> None:
    def elsewhere(request: Request, response: Response) -> Response | None:
        location = response.headers.get("Location", "")
        if request.method == "POST" and response.status == 202:
            return Response(
                202,
                {**response.headers, "Location": location.replace(scene.registry.url, scene.stranger.url)},
            )
        return None

    scene.registry.alter(elsewhere)
    scene.stranger.uploads = scene.registry.uploads
    client = scene.client(scene.config(plain=(scene.registry, scene.tokens, scene.stranger)))
    data = bytes(10_000)
    client.upload_blob(
        scene.ref,
        Digest.of(data),
        len(data),
        lambda o: io.BytesIO(data[o:]),
        chunk_size=chunk_size,
        deadline=scene.deadline(),
    )
    assert scene.stranger.seen("PUT")
    assert str(Digest.of(data)) in scene.registry.repository(REPO).blobs
    scene.assert_no_leak()


LOCATIONS: dict[str, tuple[str | None, type[UnladeError]]] = {
    "plain http elsewhere": ("http://127.0.0.2:{port}/upload", PlainHTTPRefused),
    "metadata": ("https://169.254.169.254/upload", UnsafeRedirect),
    "metadata, plain": ("http://169.254.169.254/upload", PlainHTTPRefused),
    "file": ("file:///etc/passwd", BadResponse),
    "user information": ("http://a:b@127.0.0.2:{port}/upload", BadResponse),
    "none": (None, BadResponse),
}


@pytest.mark.parametrize("variant", LOCATIONS)
@pytest.mark.parametrize("step", ["POST", "PATCH"])
def test_an_upload_location_that_must_not_be_used(scene: Scene, variant: str, step: str) -> None:
    location, error = LOCATIONS[variant]

    def elsewhere(request: Request, response: Response) -> Response | None:
        if request.method != step or response.status != 202:
            return None
        headers = {name: value for name, value in response.headers.items() if name != "Location"}
        if location is not None:
            headers["Location"] = location.replace("{port}", str(scene.stranger.port))
        return Response(202, headers)

    scene.registry.alter(elsewhere)
    data = bytes(10_000)
    with pytest.raises(error):
        scene.client().upload_blob(
            scene.ref,
            Digest.of(data),
            len(data),
            lambda o: io.BytesIO(data[o:]),
            chunk_size=4096,
            deadline=scene.deadline(),
        )
    assert not scene.stranger.requests
    scene.assert_calm(6)


# Token realms.

REALMS: dict[str, tuple[str, type[UnladeError]]] = {
    "metadata, plain": ("http://169.254.169.254/latest/api/token", PlainHTTPRefused),
    "metadata over TLS": ("https://169.254.169.254/token", UntrustedRealm),
    "metadata name": ("https://metadata.google.internal/token", UntrustedRealm),
    "private range": ("https://10.0.0.1/token", UntrustedRealm),
    "private range, 192.168": ("https://192.168.1.1/token", UntrustedRealm),
    "loopback neighbour": ("https://127.0.0.2:{port}/token", UntrustedRealm),
    "loopback neighbour, plain": ("http://127.0.0.2:{port}/token", PlainHTTPRefused),
    "localhost": ("https://localhost/token", UntrustedRealm),
    "IPv6 loopback": ("https://[::1]/token", UntrustedRealm),
    "another host": ("https://tokens.example.org/token", UntrustedRealm),
    "the registry's name as user": ("https://127.0.0.1@127.0.0.2/token", UntrustedRealm),
    "address as a number": ("https://2130706434/token", UntrustedRealm),
    "file": ("file:///etc/passwd", UntrustedRealm),
    "relative": ("/token", UntrustedRealm),
    "empty": ("", UntrustedRealm),
    "known host of another registry": ("https://auth.docker.io/token", UntrustedRealm),
}


@pytest.mark.parametrize("variant", REALMS)
@pytest.mark.parametrize("anonymous", [False, True])
def test_a_realm_that_must_not_be_asked(scene: Scene, variant: str, anonymous: bool) -> None:
    realm, error = REALMS[variant]
    realm = realm.replace("{port}", str(scene.stranger.port))
    scene.registry.fault(lambda q: Response(401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="x"'}))
    client = Registry(scene.config()) if anonymous else scene.client()
    with client, names({}) as asked, pytest.raises(error):
        client.resolve(scene.ref, deadline=scene.deadline())
    assert not scene.stranger.requests
    assert not scene.tokens.requests
    assert set(asked) <= {"127.0.0.1"}
    scene.assert_calm(2)


def test_a_realm_that_redirects_is_refused(scene: Scene) -> None:
    scene.tokens.fault(lambda q: Response(307, {"Location": f"{scene.stranger.url}/token"}))
    client = scene.client(scene.config(plain=(scene.registry, scene.tokens, scene.stranger)))
    with pytest.raises(UnsafeRedirect):
        client.resolve(scene.ref, deadline=scene.deadline())
    scene.assert_no_leak()
    assert not scene.stranger.requests


def test_a_realm_on_an_allowlisted_host_is_asked(scene: Scene) -> None:
    with TokenServer(address="127.0.0.3", users={USER: PASSWORD}) as elsewhere:
        scene.registry.tokens = elsewhere
        config = scene.config(
            plain=(scene.registry, elsewhere), token_realm_allowlist=frozenset({elsewhere.host})
        )
        assert scene.client(config).resolve(scene.ref, deadline=scene.deadline()).descriptor == scene.image
        assert len(elsewhere.requests) == 1


SIBLINGS = {
    # registry, realm → allowed
    ("registry.example.test", "registry.example.test"): True,
    ("registry.example.test", "gitlab.example.test"): True,
    ("registry.example.test", "example.test"): True,
    ("registry.example.test", "sso.eu.example.test"): True,
    ("registry.example.test", "example.test.evil.test"): False,
    ("registry.example.test", "evilexample.test"): False,
    ("example.test", "auth.example.test"): False,
    ("shop.co.uk", "evil.co.uk"): False,
    ("mine.azurecr.io", "yours.azurecr.io"): False,
    ("me.github.io", "you.github.io"): False,
    ("a.eu-1.amazonaws.com", "b.eu-1.amazonaws.com"): False,
}


@pytest.mark.parametrize(("registry", "realm"), SIBLINGS)
def test_a_realm_among_siblings(tmp_path: Path, registry: str, realm: str) -> None:
    authority = Authority(str(tmp_path))
    users = {USER: PASSWORD}
    with (
        TokenServer(users=users, name=realm, tls=authority.server_context(realm)) as tokens,
        FakeRegistry(tokens=tokens, name=registry, tls=authority.server_context(registry)) as server,
        Scene(auth=None) as scene,
    ):
        image = server.put_image(REPO, "v1", [])
        config = scene.config(ca_files=(authority.ca,))
        credentials = StaticCredentials({server.host: scene.credential})
        with Registry(config, credentials) as client, names({registry: "127.0.0.1", realm: "127.0.0.1"}):
            ref = server.reference(REPO, "v1")
            if SIBLINGS[registry, realm]:
                assert client.resolve(ref, deadline=scene.deadline()).descriptor == image
            else:
                with pytest.raises(UntrustedRealm):
                    client.resolve(ref, deadline=scene.deadline())
                assert not tokens.requests


# Plain HTTP: allowlisted hosts only, never a fallback.


class _Recorder:
    """Accepts connections and keeps the first bytes of each: what a client really says."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.heard.append(connection.recv(4096))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.mark.parametrize("allowlist", [(), ("127.0.0.1",), ("localhost",), ("127.0.0.1:1",), ("*",)])
def test_plain_http_is_not_spoken_to_a_host_that_is_not_listed(allowlist: tuple[str, ...]) -> None:
    recorder = _Recorder()
    try:
        with Scene(auth=None) as scene:
            config = scene.config(plain=())
            credentials = StaticCredentials({recorder.host: scene.credential})
            with Registry(replace(config, plain_http=frozenset(allowlist)), credentials) as client:
                ref = scene.registry.reference(REPO, "v1")
                ref = type(ref)(recorder.host, REPO, "v1")
                with pytest.raises((TLSFailure, Unreachable)):
                    client.resolve(ref, deadline=scene.deadline())
    finally:
        recorder.close()
    assert recorder.heard
    assert all(heard[:1] == b"\x16" for heard in recorder.heard)  # a TLS handshake, every time
    assert len(recorder.heard) <= 3


def test_a_plain_registry_is_an_error_that_names_the_way_out(scene: Scene) -> None:
    client = scene.client(scene.config(plain=()))
    with pytest.raises(TLSFailure) as caught:
        client.resolve(scene.ref, deadline=scene.deadline())
    assert f"UNLADE_PLAIN_HTTP={scene.registry.host}" in caught.value.next_step
    assert not scene.registry.requests


# TLS: who is not trusted gets nothing.


def test_a_certificate_of_an_unknown_authority_ends_it(tmp_path: Path) -> None:
    authority = Authority(str(tmp_path))
    with (
        Scene(auth=None) as scene,
        FakeRegistry(tls=authority.server_context("127.0.0.1"), users={USER: PASSWORD}) as secure,
    ):
        client = Registry(scene.config(), StaticCredentials({secure.host: scene.credential}))
        with client, pytest.raises(TLSFailure):
            client.resolve(secure.reference(REPO, "v1"), deadline=scene.deadline())
        assert not secure.requests


def test_a_certificate_for_another_name_ends_it(tmp_path: Path) -> None:
    authority = Authority(str(tmp_path))
    with (
        Scene(auth=None) as scene,
        FakeRegistry(tls=authority.server_context("registry.example.test"), users={USER: PASSWORD}) as secure,
    ):
        config = scene.config(ca_files=(authority.ca,))
        client = Registry(config, StaticCredentials({secure.host: scene.credential}))
        with client, pytest.raises(TLSFailure):
            client.resolve(secure.reference(REPO, "v1"), deadline=scene.deadline())
        assert not secure.requests


# Mirrors get credentials of their own or none.


def test_a_mirror_never_gets_the_registrys_credentials(scene: Scene, tmp_path: Path) -> None:
    directory = tmp_path / scene.registry.host
    directory.mkdir()
    directory.joinpath("hosts.toml").write_text(
        f'server = "{scene.registry.url}"\n[host."{scene.stranger.url}"]\ncapabilities = ["pull", "resolve"]'
    )
    challenge = f'Bearer realm="{scene.tokens.realm}",service="x",scope="repository:{REPO}:pull"'
    scene.stranger.fault(lambda q: Response(401, {"WWW-Authenticate": challenge}))
    config = scene.config(certs_dirs=(str(tmp_path),))
    assert scene.client(config).resolve(scene.ref, deadline=scene.deadline()).descriptor == scene.image
    assert scene.stranger.requests
    scene.assert_no_leak()


def test_a_mirror_that_asks_for_basic_gets_nothing(scene: Scene, tmp_path: Path) -> None:
    directory = tmp_path / scene.registry.host
    directory.mkdir()
    directory.joinpath("hosts.toml").write_text(f'[host."{scene.stranger.url}"]\n')
    scene.stranger.fault(lambda q: Response(401, {"WWW-Authenticate": 'Basic realm="give"'}))
    config = scene.config(certs_dirs=(str(tmp_path),))
    assert read_layer(scene, scene.client(config)) == scene.data
    scene.assert_no_leak()


# Tokens: one scope, one credential, one repository each.


def test_a_token_for_a_wider_scope_is_used_only_where_it_was_asked_for(scene: Scene) -> None:
    wide = scene.tokens.issue(USER, [f"repository:{REPO}:pull,push", "repository:team/other:pull,push"])
    scene.tokens.fault(lambda q: Response(200, body=json.dumps({"token": wide}).encode()))
    other = scene.registry.put_image("team/other", "v1", [])
    client = scene.client()
    client.resolve(scene.ref, deadline=scene.deadline())
    client.resolve(scene.ref, deadline=scene.deadline())
    assert len(scene.tokens.requests) == 1
    ref = scene.registry.reference("team/other", "v1")
    assert client.resolve(ref, deadline=scene.deadline()).descriptor == other
    client.head_blob(scene.ref, scene.layer.digest, deadline=scene.deadline())
    scopes = [request.query["scope"] for request in scene.tokens.requests]
    assert scopes == [
        [f"repository:{REPO}:pull"],
        ["repository:team/other:pull"],
        [f"repository:{REPO}:pull,push"],
    ]


@pytest.mark.parametrize(
    "scope",
    [
        "repository:team/other:pull",
        f"repository:{REPO}:pull,push,delete",
        f"repository:{REPO}:*",
        "registry:catalog:*",
        f"repository:{REPO}:pull repository:team/other:push",
        f"repository:evil{REPO}:pull",
        "",
        "x" * 9000,
    ],
)
def test_a_challenge_cannot_widen_what_is_asked_for(scene: Scene, scope: str) -> None:
    challenge = f'Bearer realm="{scene.tokens.realm}",service="s",scope="{scope}"'
    scene.registry.fault(lambda q: Response(401, {"WWW-Authenticate": challenge}), times=1)
    scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert scene.tokens.requests[0].query["scope"] == [f"repository:{REPO}:pull"]


def test_a_challenge_may_name_the_repository_behind_a_proxys_path(scene: Scene) -> None:
    challenge = f'Bearer realm="{scene.tokens.realm}",service="s",scope="repository:cache/{REPO}:pull,push"'
    scene.registry.fault(lambda q: Response(401, {"WWW-Authenticate": challenge}), times=1)
    with pytest.raises(Unauthorized):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    assert scene.tokens.requests[0].query["scope"] == [f"repository:cache/{REPO}:pull"]


BAD_TOKENS = {
    "header injection": '{"token":"a\\r\\nX-Evil: 1"}',
    "a space": '{"token":"a b"}',
    "not ASCII": '{"token":"ü"}',
    "empty": '{"token":""}',
    "missing": "{}",
    "a number": '{"token":1}',
    "an array": "[]",
    "not JSON": "token",
    "huge": '{"token":"' + "x" * 70_000 + '"}',
}


@pytest.mark.parametrize("variant", BAD_TOKENS)
def test_a_token_that_cannot_be_one(scene: Scene, variant: str) -> None:
    scene.tokens.fault(lambda q: Response(200, body=BAD_TOKENS[variant].encode()))
    with pytest.raises(BadResponse):
        scene.client().resolve(scene.ref, deadline=scene.deadline())
    scene.assert_calm(3)


def test_two_tenants_never_share_a_token(scene: Scene) -> None:
    scene.tokens.users["bob"] = "bobs"
    scene.tokens.rights = lambda user, repository: frozenset({"pull"} if user == USER else ())
    alice = scene.client()
    alice.resolve(scene.ref, deadline=scene.deadline())
    with Registry(scene.config(), StaticCredentials({scene.registry.host: Credential("bob", "bobs")})) as bob:
        with pytest.raises(Unauthorized):
            bob.authorize(scene.ref, scene.image.digest, deadline=scene.deadline())
        assert alice.fingerprint(scene.ref) != bob.fingerprint(scene.ref)
    with Registry(scene.config()) as nobody, pytest.raises(Unauthorized):
        nobody.authorize(scene.ref, scene.image.digest, deadline=scene.deadline())
    alice.authorize(scene.ref, scene.image.digest, deadline=scene.deadline())


@pytest.mark.parametrize("status", [401, 403, 404])
def test_knowing_a_digest_grants_nothing(scene: Scene, status: int) -> None:
    alice = scene.client()
    alice.authorize(scene.ref, scene.image.digest, deadline=scene.deadline())
    scene.registry.fault(lambda q: Response(status) if q.method == "HEAD" else None)
    with pytest.raises(RegistryError):
        alice.authorize(scene.ref, scene.image.digest, deadline=scene.deadline())
    scene.assert_calm(12)


def test_no_error_shows_a_secret(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    redirect_blobs(scene, f"{scene.stranger.url}/blob?X-Signature=very-secret")
    scene.stranger.fault(lambda q: Response(403))
    client = scene.client(scene.config(plain=(scene.registry, scene.tokens, scene.stranger)))
    with pytest.raises(Unauthorized) as caught:
        read_layer(scene, client)
    shown = f"{caught.value!r} {caught.value} {caught.value.next_step} {scene.credential!r}"
    for secret in (PASSWORD, "very-secret", *scene.tokens.grants):
        assert secret not in shown
    assert PASSWORD not in caplog.text


def test_the_strangers_are_servers() -> None:
    """The scene itself: a request to the stranger is recorded with its headers."""
    with FakeServer(address="127.0.0.2") as server:
        with socket.create_connection(("127.0.0.2", server.port)) as connection:
            connection.sendall(b"GET /x HTTP/1.1\r\nHost: y\r\nAuthorization: z\r\nConnection: close\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 404")
        assert [request.authorization for request in server.requests] == ["z"]
