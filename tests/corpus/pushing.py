"""Puts an artifact of the corpus into a registry by plain HTTP: our own client is not its own judge."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

from tests.corpus.artifact import Artifact, Document, compact
from unlade.model.mediatypes import OCI_INDEX


def push(host: str, repository: str, artifact: Artifact, tag: str = "v1") -> None:
    """Blobs first, then documents, children before parents; the last one is tagged."""
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        for digest, data in artifact.blobs.items():
            location = _request(connection, "POST", f"/v2/{repository}/blobs/uploads/", b"", 202)
            where = urlsplit(location)
            query = f"{where.query}&" if where.query else ""
            target = f"{where.path}?{query}digest={digest}"
            _request(connection, "PUT", target, data, 201, "application/octet-stream")
        for document in artifact.documents:
            name = tag if document is artifact.top else str(document.digest)
            _manifest(connection, repository, name, document)
            if subject := json.loads(document.raw).get("subject"):
                # Distribution has no referrers API: whoever pushes keeps the index (the tag schema).
                _manifest(connection, repository, subject["digest"].replace(":", "-"), _referrers(document))
    finally:
        connection.close()


def _manifest(connection: http.client.HTTPConnection, repository: str, name: str, document: Document) -> None:
    path = f"/v2/{repository}/manifests/{name}"
    _request(connection, "PUT", path, document.raw, 201, document.media_type)


def _referrers(document: Document) -> Document:
    """The fallback index with this one referrer in it."""
    value = json.loads(document.raw)
    entry = document.descriptor(
        artifactType=value.get("artifactType") or value["config"]["mediaType"],
        annotations=value.get("annotations", {}),
    )
    return Document(compact({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}), OCI_INDEX)


def _request(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes,
    expected: int,
    content_type: str | None = None,
) -> str:
    headers = {"Content-Length": str(len(body))} | ({"Content-Type": content_type} if content_type else {})
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status == expected, f"{method} {path}: {answer.status} {text[:300]!r}"
    return answer.headers.get("Location", "")
