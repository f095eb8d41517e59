"""An in-process registry (distribution-spec 1.1) for tests: pull, push, mount, referrers, tags, auth, faults.

    with FakeRegistry() as reg:
        layer = reg.put_blob("a/b", b"content")
        image = reg.put_image("a/b", "v1", [layer])
        reg.fault(lambda r: Response(503) if "/blobs/" in r.path else None, times=2)
        ...
        assert len(reg.seen("GET", "/blobs/")) == 1

Owns the plain behaviour; misbehaviour comes from the hooks of `FakeServer`. It checks what a real registry
checks (digests of uploads, chunk order, presence of what a manifest names).
`strict=False` lets a test push manifests that name missing or absurd content.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.httpd import FakeServer, FileSlice, Request, Response
from tests.fakes.tokens import TokenServer, basic_user
from unlade.model import Descriptor, Digest, Reference
from unlade.model.mediatypes import EMPTY_JSON, OCI_CONFIG, OCI_EMPTY, OCI_INDEX, OCI_LAYER_GZIP, OCI_MANIFEST

_ROUTE = re.compile(
    r"/v2/(?P<name>.+?)/(?P<kind>manifests|blobs/uploads|blobs|referrers|tags)/(?P<rest>[^/]*)"
)
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Repository:
    """What one repository holds: blobs (bytes, or the path of a file), manifests by digest, tags."""

    blobs: dict[str, bytes | str] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class FakeRegistry(FakeServer):
    """A context manager. Options are attributes and may be changed while it runs."""

    def __init__(
        self,
        *,
        users: dict[str, str] | None = None,
        tokens: TokenServer | None = None,
        anonymous_pull: bool = False,
        referrers: bool = True,
        ranges: bool = True,
        strict: bool = True,
        page_size: int = 1000,
        blob_redirect: str | None = None,
        share: FakeRegistry | None = None,
        address: str = "127.0.0.1",
        name: str | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.users = users  # Basic auth when given
        self.tokens = tokens  # token auth when given
        self.anonymous_pull = anonymous_pull
        self.referrers = referrers
        self.ranges = ranges
        self.strict = strict
        self.page_size = page_size
        self.blob_redirect = blob_redirect  # e.g. another server's url: GET of a blob is sent there
        self.repositories: dict[str, Repository] = share.repositories if share else {}
        self.uploads: dict[str, bytearray] = {}
        super().__init__(address=address, name=name, tls=tls)

    # Filling it, from a test.

    def reference(self, repository: str, wanted: str | Digest | Descriptor = "latest") -> Reference:
        """The reference of something in this registry, by tag, digest or descriptor."""
        if isinstance(wanted, Descriptor):
            wanted = wanted.digest
        if isinstance(wanted, Digest):
            return Reference(self.host, repository, None, wanted)
        return Reference(self.host, repository, wanted)

    def repository(self, name: str) -> Repository:
        """The repository, made when it is not there."""
        with self._lock:
            return self.repositories.setdefault(name, Repository())

    def put_blob(
        self,
        repository: str,
        data: bytes,
        media_type: str = OCI_LAYER_GZIP,
        annotations: Mapping[str, str] | None = None,
    ) -> Descriptor:
        """Store bytes and describe them."""
        digest = Digest.of(data)
        self.repository(repository).blobs[str(digest)] = data
        return Descriptor(media_type=media_type, digest=digest, size=len(data), annotations=annotations or {})

    def put_blob_file(
        self, repository: str, path: str, digest: Digest, media_type: str = "application/octet-stream"
    ) -> Descriptor:
        """Serve a file as a blob (by sendfile); the caller gives its digest, which is not checked."""
        self.repository(repository).blobs[str(digest)] = path
        return Descriptor(media_type=media_type, digest=digest, size=os.stat(path).st_size)

    def put_manifest(
        self,
        repository: str,
        tag: str | None,
        document: Mapping[str, Any] | bytes,
        media_type: str | None = None,
    ) -> Descriptor:
        """Store a manifest or index (an object or raw bytes), tag it, and describe it."""
        raw = (
            document if isinstance(document, bytes) else json.dumps(document, separators=(",", ":")).encode()
        )
        if media_type is None:
            media_type = json.loads(raw).get("mediaType") or OCI_MANIFEST
        digest = Digest.of(raw)
        home = self.repository(repository)
        home.manifests[str(digest)] = (media_type, raw)
        if tag is not None:
            home.tags[tag] = str(digest)
        return Descriptor(media_type=media_type, digest=digest, size=len(raw))

    def put_image(
        self, repository: str, tag: str | None, layers: Sequence[Descriptor], config: bytes | None = None
    ) -> Descriptor:
        """An image manifest over layers that are already here."""
        if config is None:
            config = json.dumps(
                {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers"}}
            ).encode()
        return self.put_manifest(
            repository,
            tag,
            {
                "schemaVersion": 2,
                "mediaType": OCI_MANIFEST,
                "config": self.put_blob(repository, config, OCI_CONFIG).to_json(),
                "layers": [layer.to_json() for layer in layers],
            },
        )

    def put_artifact(
        self,
        repository: str,
        tag: str | None,
        layers: Sequence[Descriptor],
        artifact_type: str,
        *,
        subject: Descriptor | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> Descriptor:
        """An artifact with the empty config, perhaps a referrer of `subject`."""
        document: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": artifact_type,
            "config": self.put_blob(repository, EMPTY_JSON, OCI_EMPTY).to_json(),
            "layers": [layer.to_json() for layer in layers],
        }
        if subject is not None:
            document["subject"] = subject.to_json()
        if annotations:
            document["annotations"] = dict(annotations)
        return self.put_manifest(repository, tag, document)

    # Answering.

    def answer(self, request: Request) -> Response:
        """The distribution API."""
        if request.path.rstrip("/") == "/v2":
            return self._challenge(request, None, None) or Response(200, body=b"{}")
        match = _ROUTE.fullmatch(request.path)
        if match is None:
            return _error(404, "UNSUPPORTED", "no such route")
        name, kind, rest = match["name"], match["kind"], match["rest"]
        action = {"GET": "pull", "HEAD": "pull", "DELETE": "delete"}.get(request.method, "push")
        if kind == "blobs/uploads":
            action = "push"
        refused = self._challenge(request, name, action)
        if refused is not None:
            return refused
        with self._lock:
            if kind == "blobs/uploads":
                return self._upload(request, name, rest)
            if kind == "tags":
                return self._tags(request, name)
            if kind == "referrers":
                return self._referrers(request, name, rest)
            if kind == "blobs":
                return self._blob(request, name, rest)
            return self._manifest(request, name, rest)

    def _challenge(self, request: Request, repository: str | None, action: str | None) -> Response | None:
        if self.users is None and self.tokens is None:
            return None
        if action == "pull" and self.anonymous_pull and request.authorization is None:
            return None
        header = request.authorization or ""
        if self.users is not None and self.tokens is None:
            if basic_user(header, self.users) is not None:
                return None
            return _error(401, "UNAUTHORIZED", "log in", {"WWW-Authenticate": 'Basic realm="fake registry"'})
        assert self.tokens is not None
        token = header[7:] if header.startswith("Bearer ") else ""
        known = token in self.tokens.grants
        if known and (repository is None or self.tokens.check(token, repository, action or "")):
            return None
        challenge = f'Bearer realm="{self.tokens.realm}",service="{self.host}"'
        if repository is not None:
            asked = "pull,push" if action == "push" else str(action)
            challenge += f',scope="repository:{repository}:{asked}"'
            if known:
                challenge += ',error="insufficient_scope"'
        return _error(401, "UNAUTHORIZED", "authentication required", {"WWW-Authenticate": challenge})

    def _manifest(self, request: Request, name: str, wanted: str) -> Response:
        if request.method == "PUT":
            return self._put_manifest(request, name, wanted)
        home = self.repositories.get(name)
        if home is None:
            return _error(404, "NAME_UNKNOWN", "repository name not known to registry")
        digest = wanted if ":" in wanted else home.tags.get(wanted, "")
        if digest not in home.manifests:
            return _error(404, "MANIFEST_UNKNOWN", "manifest unknown")
        if request.method == "DELETE":
            if ":" in wanted:
                del home.manifests[digest]
                home.tags = {tag: target for tag, target in home.tags.items() if target != digest}
            else:
                del home.tags[wanted]
            return Response(202)
        media_type, raw = home.manifests[digest]
        headers = {"Content-Type": media_type, "Docker-Content-Digest": digest, "ETag": f'"{digest}"'}
        return Response(200, headers, raw)

    def _put_manifest(self, request: Request, name: str, wanted: str) -> Response:
        raw, media_type = request.body, request.headers.get("Content-Type", "")
        digest = str(Digest.of(raw))
        if ":" in wanted and wanted != digest:
            return _error(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
        try:
            document = json.loads(raw)
        except ValueError:
            return _error(400, "MANIFEST_INVALID", "not JSON")
        home = self.repository(name)
        if self.strict:
            named = [document.get("config"), *document.get("layers", [])]
            missing = [
                d["digest"] for d in named if d and d["digest"] not in home.blobs and not d.get("urls")
            ]
            missing += [
                d["digest"] for d in document.get("manifests", []) if d["digest"] not in home.manifests
            ]
            if missing:
                return _error(400, "MANIFEST_BLOB_UNKNOWN", f"blob unknown to registry: {missing[0]}")
        home.manifests[digest] = (media_type, raw)
        if ":" not in wanted:
            home.tags[wanted] = digest
        headers = {"Location": f"/v2/{name}/manifests/{digest}", "Docker-Content-Digest": digest}
        if self.referrers and document.get("subject"):
            headers["OCI-Subject"] = document["subject"]["digest"]
        return Response(201, headers)

    def _blob(self, request: Request, name: str, digest: str) -> Response:
        home = self.repositories.get(name)
        if home is None or digest not in home.blobs:
            return _error(404, "BLOB_UNKNOWN", "blob unknown to registry")
        if request.method == "DELETE":
            del home.blobs[digest]
            return Response(202)
        if self.blob_redirect is not None:
            return Response(307, {"Location": f"{self.blob_redirect}/v2/{name}/blobs/{digest}"})
        content = home.blobs[digest]
        total = len(content) if isinstance(content, bytes) else os.stat(content).st_size
        headers = {
            "Content-Type": "application/octet-stream",
            "Docker-Content-Digest": digest,
            "ETag": f'"{digest}"',
        }
        start, end, status = 0, total, 200
        if self.ranges:
            headers["Accept-Ranges"] = "bytes"
            asked = _RANGE.fullmatch(request.headers.get("Range", ""))
            if asked is not None:
                start = int(asked[1])
                end = min(int(asked[2]) + 1, total) if asked[2] else total
                if start >= total:
                    return Response(416, {"Content-Range": f"bytes */{total}"})
                status = 206
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
        if isinstance(content, bytes):
            body: bytes | FileSlice = content if status == 200 else content[start:end]
        else:
            body = FileSlice(content, start, end - start)
        return Response(status, headers, body)

    def _upload(self, request: Request, name: str, session: str) -> Response:
        digest = request.first("digest")
        if request.method == "POST":
            mounted, source = request.first("mount"), request.first("from")
            if mounted and source:
                content = self.repositories.get(source, Repository()).blobs.get(mounted)
                if content is not None:
                    self.repository(name).blobs[mounted] = content
                    return self._created(name, mounted)
            session = secrets.token_hex(8)
            self.uploads[session] = bytearray()
            if digest is None:
                return Response(202, self._progress(name, session))
        upload = self.uploads.get(session)
        if upload is None:
            return _error(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
        if request.method == "GET":
            return Response(204, self._progress(name, session))
        if request.method == "DELETE":
            del self.uploads[session]
            return Response(204)
        declared = request.headers.get("Content-Range")
        if declared is not None and int(declared.partition("-")[0]) != len(upload):
            return Response(416, self._progress(name, session))
        upload += request.body
        if request.method == "PATCH":
            return Response(202, self._progress(name, session))
        del self.uploads[session]
        if digest != str(Digest.of(upload)):
            return _error(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
        self.repository(name).blobs[digest] = bytes(upload)
        return self._created(name, digest)

    def _created(self, name: str, digest: str) -> Response:
        return Response(201, {"Location": f"/v2/{name}/blobs/{digest}", "Docker-Content-Digest": digest})

    def _progress(self, name: str, session: str) -> dict[str, str]:
        have = len(self.uploads[session])
        return {
            "Location": f"{self.url}/v2/{name}/blobs/uploads/{session}?_state={secrets.token_hex(4)}",
            "Range": f"0-{max(have - 1, 0)}",
            "Docker-Upload-UUID": session,
        }

    def _tags(self, request: Request, name: str) -> Response:
        home = self.repositories.get(name)
        if home is None:
            return _error(404, "NAME_UNKNOWN", "repository name not known to registry")
        count = min(int(request.first("n") or self.page_size), self.page_size)
        tags = sorted(tag for tag in home.tags if tag > (request.first("last") or ""))
        headers = {"Content-Type": "application/json"}
        if len(tags) > count:
            tags = tags[:count]
            headers["Link"] = f'</v2/{name}/tags/list?n={count}&last={tags[-1]}>; rel="next"'
        return Response(200, headers, json.dumps({"name": name, "tags": tags}).encode())

    def _referrers(self, request: Request, name: str, subject: str) -> Response:
        if not self.referrers:
            return _error(404, "UNSUPPORTED", "no referrers here")
        wanted = request.first("artifactType")
        entries = []
        home = self.repositories.get(name, Repository())
        for digest, (media_type, raw) in home.manifests.items():
            document = json.loads(raw)
            if (document.get("subject") or {}).get("digest") != subject:
                continue
            artifact_type = document.get("artifactType") or document.get("config", {}).get("mediaType", "")
            if wanted in (None, artifact_type):
                entry = {
                    "mediaType": media_type,
                    "digest": digest,
                    "size": len(raw),
                    "artifactType": artifact_type,
                }
                if document.get("annotations"):
                    entry["annotations"] = document["annotations"]
                entries.append(entry)
        headers = {"Content-Type": OCI_INDEX}
        if wanted is not None:
            headers["OCI-Filters-Applied"] = "artifactType"
        start = int(request.first("start") or 0)
        if len(entries) > start + self.page_size:
            query = f"start={start + self.page_size}" + (f"&artifactType={wanted}" if wanted else "")
            headers["Link"] = f'</v2/{name}/referrers/{subject}?{query}>; rel="next"'
        page = entries[start : start + self.page_size]
        document = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": page}
        return Response(200, headers, json.dumps(document).encode())


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps({"errors": [{"code": code, "message": message, "detail": None}]}).encode()
    return Response(status, {"Content-Type": "application/json", **(headers or {})}, body)
