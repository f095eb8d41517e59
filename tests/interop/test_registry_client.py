"""Our client on the real distribution registry: plain, TLS with htpasswd, and token authentication (V4,
V12).
"""

from __future__ import annotations

import base64
import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from rig.engines import binary
from tests.fakes.tls import Authority
from tests.fakes.tokens import TokenServer
from tests.interop.real_registry import PASSWORD, USER, RealRegistry
from unlade.model import Deadline, Descriptor, Digest, Reference
from unlade.model.mediatypes import EMPTY_JSON, OCI_EMPTY, OCI_MANIFEST
from unlade.registry import (
    Credential,
    HTTPFailure,
    NotFound,
    PullSecretCredentials,
    Registry,
    RegistryConfig,
    StaticCredentials,
    TLSFailure,
    Unauthorized,
    check_subject,
)
from unlade.registry.referrers import fallback_tag
from unlade.transfer.fetch import Fetcher

ALICE = Credential(USER, PASSWORD)
TYPE = "application/vnd.example.thing"


class JWTServer(TokenServer):
    """A token server whose tokens the real registry verifies: ES256, the certificate in x5c."""

    def __init__(self, directory: Path, *, service: str, **options: dict[str, str]) -> None:
        authority = Authority(str(directory), "Token CA")
        pair = authority.issue("tokens.example", client=True)
        self.root = authority.ca
        key = serialization.load_pem_private_key(Path(pair.key).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key = key
        leaf = x509.load_pem_x509_certificate(Path(pair.cert).read_bytes())
        self._x5c = base64.b64encode(leaf.public_bytes(serialization.Encoding.DER)).decode()
        self._service = service
        super().__init__(users=options.get("users"), address="127.0.0.1", name="localhost")

    def issue(self, user: str | None, scopes: list[str]) -> str:
        """The same grant as ever, written as a signed JWT."""
        opaque = super().issue(user, scopes)
        grant = self.grants.pop(opaque)
        actions: dict[str, list[str]] = {}
        for repository, action in sorted(grant.access):
            actions.setdefault(repository, []).append(action)
        now = int(time.time())
        claims = {
            "iss": "interop",
            "sub": user or "",
            "aud": self._service,
            "exp": now + 300,
            "nbf": now - 60,
            "iat": now,
            "jti": opaque,
            "access": [
                {"type": "repository", "name": name, "actions": what} for name, what in actions.items()
            ],
        }
        header = {"typ": "JWT", "alg": "ES256", "x5c": [self._x5c]}
        signed = f"{_b64(json.dumps(header).encode())}.{_b64(json.dumps(claims).encode())}"
        r, s = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        token = f"{signed}.{_b64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"
        self.grants[token] = grant
        return token


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JWTServer]:
    with JWTServer(
        tmp_path_factory.mktemp("tokens"), service="interop-registry", users={USER: PASSWORD}
    ) as server:
        yield server


@pytest.fixture(scope="module")
def token_registry(tmp_path_factory: pytest.TempPathFactory, tokens: JWTServer) -> Iterator[RealRegistry]:
    auth = (
        f"\nauth:\n  token:\n    realm: {tokens.realm}\n    service: interop-registry\n    issuer: interop\n"
        f"    rootcertbundle: {tokens.root}"
    )
    with RealRegistry(binary("registry"), tmp_path_factory.mktemp("token-registry"), auth=auth) as running:
        yield running


class Place:
    """A registry, a client for it, and a repository of one test."""

    def __init__(
        self, server: RealRegistry, config: RegistryConfig, credential: Credential | None, name: str
    ):
        self.server, self.config = server, config
        credentials = StaticCredentials({server.host: credential} if credential else {})
        self.client = Registry(config, credentials)
        self.ref = Reference(server.host, f"client/{name}", "v1")
        self.deadline = Deadline.after(120)

    def push(self, data: bytes, chunk_size: int | None = None) -> Descriptor:
        digest = Digest.of(data)
        self.client.upload_blob(
            self.ref,
            digest,
            len(data),
            lambda offset: io.BytesIO(data[offset:]),
            chunk_size=chunk_size,
            deadline=self.deadline,
        )
        return Descriptor(media_type="application/octet-stream", digest=digest, size=len(data))

    def artifact(self, layers: list[Descriptor], subject: Descriptor | None = None) -> bytes:
        config = replace_media(self.push(EMPTY_JSON), OCI_EMPTY)
        document: dict[str, object] = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": TYPE,
            "config": config.to_json(),
            "layers": [layer.to_json() for layer in layers],
        }
        if subject is not None:
            document["subject"] = subject.to_json()
        return json.dumps(document).encode()


def replace_media(descriptor: Descriptor, media_type: str) -> Descriptor:
    return Descriptor(media_type=media_type, digest=descriptor.digest, size=descriptor.size)


@pytest.fixture(params=["plain", "htpasswd", "token"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    kind = request.param
    name = "".join(char if char.isalnum() else "-" for char in request.node.originalname.lower())
    if kind == "plain":
        server = request.getfixturevalue("registry")
        made = Place(server, RegistryConfig(plain_http=frozenset({server.host})), None, name)
    elif kind == "htpasswd":
        server = request.getfixturevalue("secure_registry")
        made = Place(server, RegistryConfig(ca_files=(server.ca_file,)), ALICE, name)
    else:
        server, realm = request.getfixturevalue("token_registry"), request.getfixturevalue("tokens")
        plain = frozenset({server.host, realm.host})
        made = Place(server, RegistryConfig(plain_http=plain), ALICE, name)
    with made.client:
        yield made


def test_push_and_pull(place: Place) -> None:
    data = os.urandom(3 << 20)
    blob = place.push(data)
    raw = place.artifact([blob])
    digest = place.client.put_manifest(place.ref, raw, OCI_MANIFEST, tag="v1", deadline=place.deadline)
    resolved = place.client.resolve(place.ref, deadline=place.deadline)
    assert (resolved.descriptor.digest, resolved.raw) == (digest, raw)
    assert place.client.manifest(place.ref, resolved.descriptor, deadline=place.deadline) == raw
    assert Fetcher(place.client).read(place.ref, blob, limit=1 << 30, deadline=place.deadline) == data
    with place.client.blob(
        place.ref, blob, offset=1 << 20, end=(1 << 20) + 5, deadline=place.deadline
    ) as stream:
        view = memoryview(bytearray(10))
        assert (stream.offset, stream.readinto(view)) == (1 << 20, 5)
        assert bytes(view[:5]) == data[1 << 20 : (1 << 20) + 5]
    place.client.authorize(place.ref, digest, deadline=place.deadline)
    assert list(place.client.tags(place.ref, deadline=place.deadline)) == ["v1"]


@pytest.mark.parametrize("chunk_size", [1 << 20, 700_001])
def test_chunks(place: Place, chunk_size: int) -> None:
    data = os.urandom(3 << 20)
    blob = place.push(data, chunk_size)
    assert place.client.head_blob(place.ref, blob.digest, deadline=place.deadline) == len(data)


def test_a_mount_moves_no_bytes(place: Place) -> None:
    blob = place.push(os.urandom(100_000))
    target = Reference(place.server.host, f"{place.ref.repository}-copy", "v1")
    before = place.server.sent_blobs()
    assert place.client.mount_blob(target, blob.digest, source=place.ref, deadline=place.deadline)
    assert place.client.head_blob(target, blob.digest, deadline=place.deadline) == blob.size
    assert place.server.sent_blobs() == before


def test_a_mount_of_nothing(place: Place) -> None:
    target = Reference(place.server.host, f"{place.ref.repository}-copy", "v1")
    absent = Digest.of(os.urandom(10))
    assert not place.client.mount_blob(target, absent, source=place.ref, deadline=place.deadline)


def test_referrers_by_the_tag_schema(place: Place) -> None:
    """The distribution registry has no referrers API: the list is ours to keep."""
    subject_raw = place.artifact([place.push(os.urandom(10))])
    subject = Descriptor(media_type=OCI_MANIFEST, digest=Digest.of(subject_raw), size=len(subject_raw))
    place.client.put_manifest(place.ref, subject_raw, OCI_MANIFEST, tag="v1", deadline=place.deadline)
    assert place.client.referrers(place.ref, subject.digest, deadline=place.deadline) == []
    digests = []
    for _ in range(3):
        raw = place.artifact([place.push(os.urandom(10))], subject)
        digests.append(
            place.client.put_manifest(place.ref, raw, OCI_MANIFEST, tag=None, deadline=place.deadline)
        )
    found = place.client.referrers(place.ref, subject.digest, artifact_type=TYPE, deadline=place.deadline)
    assert [entry.digest for entry in found] == digests
    for entry in found:
        pinned = place.ref.with_digest(entry.digest)
        document = place.client.resolve(pinned, deadline=place.deadline).document
        check_subject(document, entry, subject.digest, artifact_type=TYPE)
    assert fallback_tag(subject.digest) in place.client.tags(place.ref, deadline=place.deadline)
    place.client.delete_manifest(place.ref, digests[0], deadline=place.deadline)
    found = place.client.referrers(place.ref, subject.digest, deadline=place.deadline)
    assert [entry.digest for entry in found] == digests[1:]


def test_what_is_not_there(place: Place) -> None:
    with pytest.raises(NotFound):
        place.client.resolve(Reference(place.server.host, "client/none", "v1"), deadline=place.deadline)
    assert place.client.head_blob(place.ref, Digest.of(b"none"), deadline=place.deadline) is None


def test_a_manifest_without_its_blobs_is_refused_with_the_registrys_code(place: Place) -> None:
    absent = Descriptor(media_type="x/y", digest=Digest.of(os.urandom(10)), size=10)
    raw = place.artifact([absent])
    with pytest.raises(HTTPFailure) as caught:
        place.client.put_manifest(place.ref, raw, OCI_MANIFEST, tag="bad", deadline=place.deadline)
    assert "MANIFEST_BLOB_UNKNOWN" in caught.value.codes


def test_who_may_not(place: Place, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["place"] == "plain":
        with Registry(replace(place.config, plain_http=frozenset())) as client, pytest.raises(TLSFailure):
            client.resolve(place.ref, deadline=place.deadline)
        return
    wrong = StaticCredentials({place.server.host: Credential(USER, "wrong")})
    for client in (Registry(place.config), Registry(place.config, wrong)):
        with client:
            with pytest.raises(Unauthorized):
                client.resolve(place.ref, deadline=place.deadline)
            with pytest.raises(Unauthorized):
                client.authorize(place.ref, Digest.of(b"known"), deadline=place.deadline)
            with pytest.raises(Unauthorized):
                client.check_login(place.server.host, Credential(USER, "wrong"), deadline=place.deadline)
            client.check_login(place.server.host, ALICE, deadline=place.deadline)


def test_a_pull_secret(place: Place) -> None:
    raw = place.artifact([place.push(b"x")])
    place.client.put_manifest(place.ref, raw, OCI_MANIFEST, tag="v1", deadline=place.deadline)
    pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    secret = json.dumps({"auths": {place.server.host: {"auth": pair}}}).encode()
    with Registry(place.config, PullSecretCredentials(secret)) as client:
        assert client.resolve(place.ref, deadline=place.deadline).raw == raw


def test_a_plain_mirror_in_hosts_toml(registry: RealRegistry, tmp_path: Path) -> None:
    """The real registry as a mirror of one that does not exist: reached by hosts.toml alone."""
    config = RegistryConfig(plain_http=frozenset({registry.host}))
    place = Place(registry, config, None, "mirrored")
    raw = place.artifact([place.push(os.urandom(1000))])
    place.client.put_manifest(place.ref, raw, OCI_MANIFEST, tag="v1", deadline=place.deadline)
    place.client.close()
    directory = tmp_path / "upstream.invalid"
    directory.mkdir()
    (directory / "hosts.toml").write_text(
        f'server = "https://upstream.invalid"\n[host."http://{registry.host}"]\ncapabilities = ["resolve"]'
    )
    with Registry(RegistryConfig(certs_dirs=(str(tmp_path),))) as client:
        ref = Reference("upstream.invalid", place.ref.repository, "v1")
        assert client.resolve(ref, deadline=place.deadline).raw == raw
