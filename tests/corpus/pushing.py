"""Puts an artifact of the corpus into a registry by plain HTTP: our own client is not its own judge."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from tests.corpus.artifact import Artifact


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
            _request(
                connection,
                "PUT",
                f"/v2/{repository}/manifests/{name}",
                document.raw,
                201,
                document.media_type,
            )
    finally:
        connection.close()


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
