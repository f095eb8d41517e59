"""An engine on a fake registry and a fresh store, and small images and artifacts to deliver."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from unlade.delivery import Engine
from unlade.model import Descriptor, Digest
from unlade.model.mediatypes import ANNOTATION_TITLE, OCI_LAYER_GZIP
from unlade.registry import Registry, RegistryConfig, StaticCredentials
from unlade.store import DirStore
from unlade.tree.checking import fsck

ARTIFACT = "application/vnd.example.content.v1"


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        yield registry


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirStore]:
    with DirStore(tmp_path / "store") as opened:
        yield opened
        assert fsck(opened) == [], "whatever was delivered or failed, the store is sound"


@pytest.fixture
def client(fake: FakeRegistry) -> Iterator[Registry]:
    config = RegistryConfig(plain_http=frozenset({fake.host}))
    with Registry(config, StaticCredentials({})) as registry:
        yield registry


@pytest.fixture
def engine(client: Registry, store: DirStore) -> Iterator[Engine]:
    with Engine(client, store, jobs=4) as made:
        yield made


def tar(files: Mapping[str, bytes | None]) -> bytes:
    """A tar archive: None is a directory, names ending in `@target` are links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.mode = 0o644
            if content is None:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            else:
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content) if content is not None else None)
    return out.getvalue()


PutImage = Callable[..., Descriptor]


@pytest.fixture
def put_image(fake: FakeRegistry) -> PutImage:
    def put(
        repository: str, tag: str, *layers: Mapping[str, bytes | None], diff_ids: list[str] | None = None
    ) -> Descriptor:
        archives = [tar(files) for files in layers]
        blobs = [fake.put_blob(repository, gzip.compress(data, mtime=0), OCI_LAYER_GZIP) for data in archives]
        rootfs = {"type": "layers", "diff_ids": diff_ids or [str(Digest.of(data)) for data in archives]}
        config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
        return fake.put_image(repository, tag, blobs, config)

    return put


@pytest.fixture
def put_files(fake: FakeRegistry) -> PutImage:
    def put(repository: str, tag: str | None, files: Mapping[str, bytes]) -> Descriptor:
        blobs = [
            fake.put_blob(repository, data, "application/octet-stream", {ANNOTATION_TITLE: name})
            for name, data in files.items()
        ]
        return fake.put_artifact(repository, tag, blobs, ARTIFACT)

    return put
