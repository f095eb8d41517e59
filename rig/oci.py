"""Registries of a rig, and pushing to them: blobs, manifests, images, artifacts.

A small client of the distribution API on purpose: tests of the product's own push and pull need content that
did not come from the product. Content is pushed by digest, and the tag last, so a reference that resolves is
complete. Spec: OCI distribution 1.1 (end-2 … end-7), OCI image 1.1 (manifest, artifact guidance).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import urllib3

from rig import RigError

IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar"
EMPTY_CONFIG = "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"

# Blobs are hashed and sent in pieces of this size: a Python image has a layer of some 100 MB.
CHUNK = 1 << 20


@dataclass(frozen=True)
class Pushed:
    """Where something was pushed: by tag, and the digest of its manifest."""

    repository: str
    tag: str
    digest: str

    @property
    def reference(self) -> str:
        """host:port/name:tag"""
        return f"{self.repository}:{self.tag}"

    @property
    def pinned(self) -> str:
        """host:port/name@sha256:…"""
        return f"{self.repository}@{self.digest}"


class Registry:
    """One registry: its address (host:port), and what it takes to talk to it."""

    def __init__(
        self, address: str, *, ca: Path | None = None, credentials: tuple[str, str] | None = None
    ) -> None:
        self.address = address
        self.ca = ca
        self.credentials = credentials
        self._base = f"{'https' if ca else 'http'}://{address}"
        headers = urllib3.make_headers(basic_auth=":".join(credentials)) if credentials else {}
        self._http = urllib3.PoolManager(
            headers=headers, ca_certs=str(ca) if ca else None, retries=False, timeout=urllib3.Timeout(60)
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.clear()

    def ready(self) -> bool:
        """Whether the registry answers."""
        try:
            return self._http.request("GET", f"{self._base}/v2/").status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def push_blob(self, name: str, data: bytes | Path, media_type: str) -> dict[str, Any]:
        """Upload bytes or a file unless the registry has them; the descriptor."""
        digest, size = _measure(data)
        descriptor = {"mediaType": media_type, "digest": digest, "size": size}
        if self._http.request("HEAD", f"{self._base}/v2/{name}/blobs/{digest}").status == 200:
            return descriptor
        opened = self._http.request("POST", f"{self._base}/v2/{name}/blobs/uploads/")
        _expect(opened, 202)
        location = urljoin(self._base, opened.headers["Location"])
        location += ("&" if "?" in location else "?") + f"digest={digest}"
        headers = {
            **self._http.headers,
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size),
        }
        if isinstance(data, Path):
            with data.open("rb") as body:
                done = self._http.request("PUT", location, body=body, headers=headers)
        else:
            done = self._http.request("PUT", location, body=data, headers=headers)
        _expect(done, 201)
        return descriptor

    def push_manifest(self, name: str, tag: str, manifest: Mapping[str, Any]) -> Pushed:
        """Upload a manifest or index under a tag (or a digest as the tag)."""
        body = json.dumps(manifest, separators=(",", ":")).encode()
        headers = {**self._http.headers, "Content-Type": str(manifest["mediaType"])}
        done = self._http.request(
            "PUT", f"{self._base}/v2/{name}/manifests/{tag}", body=body, headers=headers
        )
        _expect(done, 201)
        return Pushed(f"{self.address}/{name}", tag, "sha256:" + hashlib.sha256(body).hexdigest())

    def push_image(
        self,
        name: str,
        layers: Sequence[bytes | Path],
        *,
        tag: str = "1",
        run: Mapping[str, Any] | None = None,
        media_type: str = IMAGE_LAYER,
    ) -> Pushed:
        """Push an image of uncompressed tar layers; `run` is the config's "config" (Entrypoint, Env, …)."""
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": dict(run or {}),
            "rootfs": {"type": "layers", "diff_ids": [_measure(layer)[0] for layer in layers]},
        }
        return self.push_manifest(
            name,
            tag,
            {
                "schemaVersion": 2,
                "mediaType": IMAGE_MANIFEST,
                "config": self.push_blob(name, json.dumps(config).encode(), IMAGE_CONFIG),
                "layers": [self.push_blob(name, layer, media_type) for layer in layers],
            },
        )

    def push_artifact(
        self,
        name: str,
        files: Mapping[str, bytes | Path],
        *,
        tag: str = "1",
        artifact_type: str = "application/vnd.unlade.test.v1",
        media_type: str = "application/octet-stream",
        annotations: Mapping[str, str] | None = None,
    ) -> Pushed:
        """Push an artifact of plain files, one titled layer each, with the empty config."""
        layers = []
        for title, data in files.items():
            layers.append({**self.push_blob(name, data, media_type), "annotations": {TITLE: title}})
        manifest: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": IMAGE_MANIFEST,
            "artifactType": artifact_type,
            "config": self.push_blob(name, b"{}", EMPTY_CONFIG),
            "layers": layers,
        }
        if annotations:
            manifest["annotations"] = dict(annotations)
        return self.push_manifest(name, tag, manifest)


def _measure(data: bytes | Path) -> tuple[str, int]:
    """Digest and size of bytes or a file."""
    if isinstance(data, bytes):
        return "sha256:" + hashlib.sha256(data).hexdigest(), len(data)
    sha = hashlib.sha256()
    with data.open("rb") as source:
        while piece := source.read(CHUNK):
            sha.update(piece)
    return "sha256:" + sha.hexdigest(), data.stat().st_size


def _expect(response: urllib3.BaseHTTPResponse, status: int) -> None:
    if response.status != status:
        text = response.data.decode(errors="replace")[:500]
        raise RigError(f"registry answered {response.status} to {response.url}, not {status}: {text}")
