"""An OCI image layout directory as one end of a copy (image-spec, "image layout").

Reads and writes layouts of any tool: `oci:DIR[:NAME]` as skopeo spells it. Every blob is verified when
read; a written one is verified, synced and renamed into place, and index.json is replaced whole under a
lock, so that a layout is valid at every moment. A directory that is a store of ours is read like any
other but never written: its index.json is a projection of records, and `unlade pull` is the way in.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from unlade.errors import InvalidInput, StoreError
from unlade.model import (
    MAX_MANIFEST_BYTES,
    Deadline,
    Descriptor,
    Digest,
    InvalidManifest,
    Reference,
    decode_manifest,
    mediatypes,
)
from unlade.transfer.fetch import Readable, Verifier
from unlade.transfer.progress import Progress, ProgressEvent
from unlade.transfer.push import Blob, Sent, Stopped, VerifiedReader, distinct, in_parallel

if TYPE_CHECKING:
    from unlade.registry import Registry
    from unlade.transfer.copy import End

_VERSION: Final = {"imageLayoutVersion": "1.0.0"}
_CHUNK: Final = 1 << 20


class NotALayout(StoreError):
    """The directory is no image layout, or not one that may be written."""

    code = "not-a-layout"


class NotInLayout(InvalidInput):
    """The layout has no such name or blob."""

    code = "not-in-layout"


class LayoutEnd:
    """An image layout and a name in it; without a name, its only manifest."""

    def __init__(self, directory: str, name: str | None = None) -> None:
        self.directory = directory
        self.name = name

    @classmethod
    def parse(cls, text: str) -> LayoutEnd:
        """`DIR[:NAME]`: everything after the first colon is the name, as skopeo reads it."""
        directory, _, name = text.partition(":")
        if not directory:
            raise InvalidInput("oci: needs a directory", next_step="write oci:DIR or oci:DIR:NAME")
        return cls(directory, name or None)

    def root(self, *, deadline: Deadline) -> tuple[Descriptor, bytes]:
        """The named manifest of index.json, else the only one."""
        entries = self._index()
        if self.name is not None:
            chosen = [entry for entry in entries if _called(entry, self.name)]
        else:
            chosen = entries
        if len({entry.digest for entry in chosen}) != 1:
            names = sorted({_name(entry) or str(entry.digest) for entry in entries})
            problem = "more than one manifest" if len(chosen) > 1 else f"nothing called {self.name}"
            raise NotInLayout(
                f"{self.directory} has {problem}",
                next_step=f"name one of: {', '.join(names) or '(it is empty)'}",
            )
        return chosen[0], self.manifest(chosen[0], deadline=deadline)

    def manifest(self, descriptor: Descriptor, *, deadline: Deadline) -> bytes:
        """A manifest's bytes, verified."""
        deadline.check()
        if descriptor.size > MAX_MANIFEST_BYTES:
            raise InvalidManifest(f"manifest of {descriptor.size} bytes is larger than {MAX_MANIFEST_BYTES}")
        with self.open_blob(descriptor) as file:
            raw = file.read(descriptor.size + 1)
        verifier = Verifier(descriptor)
        verifier.update(raw)
        verifier.finish()
        return raw

    def blob(self, descriptor: Descriptor, *, deadline: Deadline, progress: Progress) -> Blob:
        """A file of the layout; its digest is checked when it is read."""
        del deadline, progress  # whoever takes the blob checks the one and tells the other
        return _LocalBlob(self, descriptor)

    def referrers(self, subject: Digest, *, deadline: Deadline) -> Sequence[Descriptor]:
        """Manifests of index.json whose subject this is."""
        found = []
        for entry in self._index():
            raw = self.manifest(entry, deadline=deadline)
            named = decode_manifest(raw, content_type=entry.media_type).subject
            if named is not None and named.digest == subject:
                found.append(entry)
        return found

    def put_blobs(
        self, blobs: Iterable[Blob], *, origin: End, jobs: int, deadline: Deadline, progress: Progress
    ) -> Sent:
        """Write every blob that is not there yet."""
        del origin
        self._prepare()
        stop = threading.Event()
        tasks = [partial(self._take, blob, deadline, progress, stop) for blob in distinct(blobs)]
        return in_parallel(tasks, jobs, stop)

    def put_manifest(self, raw: bytes, descriptor: Descriptor, *, named: bool, deadline: Deadline) -> None:
        """Write the manifest; name it in index.json, or list it there when it refers to something."""
        deadline.check()
        self._prepare()
        verifier = Verifier(descriptor)
        verifier.update(raw)
        verifier.finish()
        path = self._path(descriptor.digest)
        if not os.path.exists(path):
            self._write(path, [raw])
        refers = decode_manifest(raw, content_type=descriptor.media_type).subject is not None
        if named or refers:
            self._record(descriptor, self.name if named else None)

    def called(self, origin: End, digest: Digest) -> LayoutEnd:
        """The name that was asked for; a layout's entry needs none."""
        del origin, digest
        if os.path.isdir(os.path.join(self.directory, ".unlade")):
            raise NotALayout(
                f"{self.directory} is an Unlade store: its index is written from its records",
                next_step=f"fill it with: unlade --store {self.directory} pull REF",
            )
        return self

    def describe(self, digest: Digest) -> str:
        """`oci:DIR@digest`, or with the name."""
        return f"oci:{self.directory}{':' + self.name if self.name else ''}@{digest}"

    def _take(self, blob: Blob, deadline: Deadline, progress: Progress, stop: threading.Event) -> Sent:
        descriptor = blob.descriptor
        path = self._path(descriptor.digest)

        def tell(kind: Any, done: int) -> None:
            progress(
                ProgressEvent(
                    kind, self.directory, descriptor.digest, done, descriptor.size, descriptor.title or ""
                )
            )

        try:
            if os.path.getsize(path) == descriptor.size:
                tell("present", descriptor.size)
                return Sent(present=1)
        except FileNotFoundError:
            pass

        def chunks(stream: BinaryIO) -> Iterator[bytes]:
            verifier = Verifier(descriptor)
            tell("start", 0)
            while data := stream.read(_CHUNK):
                deadline.check()
                if stop.is_set():
                    raise Stopped("given up because another blob failed")
                verifier.update(data)
                tell("bytes", verifier.done)
                yield data
            verifier.finish()

        with blob.open(0) as stream:
            self._write(path, chunks(stream))
        tell("done", descriptor.size)
        return Sent(bytes_sent=descriptor.size, sent=1)

    def _path(self, digest: Digest) -> str:
        return os.path.join(self.directory, "blobs", digest.algorithm, digest.hex)

    def open_blob(self, descriptor: Descriptor) -> BinaryIO:
        """A blob's file, unverified; raises NotInLayout."""
        try:
            return open(self._path(descriptor.digest), "rb")
        except FileNotFoundError as error:
            raise NotInLayout(
                f"{self.directory} does not have {descriptor.digest}",
                next_step="copy it into the layout again: it is incomplete",
            ) from error

    def _index(self) -> list[Descriptor]:
        path = os.path.join(self.directory, "index.json")
        try:
            with open(path, "rb") as file:
                raw = file.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            raise NotALayout(
                f"{self.directory} is not an OCI image layout: {error.strerror}",
                next_step="name a directory that has an index.json",
            ) from error
        document = decode_manifest(raw, content_type=mediatypes.OCI_INDEX)
        return list(getattr(document, "manifests", ()))

    def _prepare(self) -> None:
        marker = os.path.join(self.directory, "oci-layout")
        if os.path.exists(marker):
            return
        if os.path.isdir(self.directory) and os.listdir(self.directory):
            raise NotALayout(
                f"{self.directory} is not empty and is not an OCI image layout",
                next_step="name an empty or missing directory",
            )
        os.makedirs(os.path.join(self.directory, "blobs", "sha256"), exist_ok=True)
        self._write(os.path.join(self.directory, "index.json"), [_encode_index([], {})])
        self._write(marker, [json.dumps(_VERSION).encode()])

    def _record(self, descriptor: Descriptor, name: str | None) -> None:
        path = os.path.join(self.directory, "index.json")
        with _locked(self.directory):
            with open(path, "rb") as file:
                document = json.load(file)
            entries = [
                entry
                for entry in document.get("manifests", [])
                # One name, one manifest; and one entry for a manifest without a name.
                if not _same(entry, descriptor, name)
            ]
            entry = Descriptor(
                media_type=descriptor.media_type,
                digest=descriptor.digest,
                size=descriptor.size,
                artifact_type=descriptor.artifact_type,
                annotations={mediatypes.ANNOTATION_REF_NAME: name} if name else {},
            ).to_json()
            self._write(path, [_encode_index([*entries, entry], document)])

    def _write(self, path: str, chunks: Iterable[bytes]) -> None:
        parent = os.path.dirname(path)
        os.makedirs(parent, exist_ok=True)
        fd, temporary = tempfile.mkstemp(prefix=".incoming-", dir=parent)
        try:
            with os.fdopen(fd, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        directory = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def is_layout(text: str) -> bool:
    """Whether a name of one end of a copy means a layout; `oci://` is how Helm and kpt spell a registry."""
    return text.startswith("oci:") and not text.startswith("oci://")


def parse_end(text: str, registry: Registry) -> End:
    """One end of a copy as people write it: `oci:DIR[:NAME]`, or a reference with or without `oci://`."""
    from unlade.transfer.copy import RegistryEnd

    if is_layout(text):
        return LayoutEnd.parse(text.removeprefix("oci:"))
    return RegistryEnd(registry, Reference.parse(text.removeprefix("oci://")))


class _LocalBlob:
    def __init__(self, layout: LayoutEnd, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self._layout = layout

    def open(self, offset: int = 0, /) -> BinaryIO:
        """The file, verified when it is read from the start."""
        file = self._layout.open_blob(self.descriptor)
        file.seek(offset)
        stack = ExitStack()
        stack.callback(file.close)
        source = cast("Readable", file)
        return io.BufferedReader(VerifiedReader(source, self.descriptor, stack, offset=offset), _CHUNK)


def _name(entry: Descriptor) -> str:
    return entry.annotations.get(mediatypes.ANNOTATION_REF_NAME, "")


def _called(entry: Descriptor, name: str) -> bool:
    return name in (_name(entry), str(entry.digest), f"@{entry.digest}")


def _same(entry: dict[str, Any], descriptor: Descriptor, name: str | None) -> bool:
    recorded = (entry.get("annotations") or {}).get(mediatypes.ANNOTATION_REF_NAME)
    if name is not None:
        return bool(recorded == name)
    return recorded is None and entry.get("digest") == str(descriptor.digest)


def _encode_index(entries: Sequence[dict[str, Any]], document: dict[str, Any]) -> bytes:
    merged = {"schemaVersion": 2, "mediaType": mediatypes.OCI_INDEX, **document, "manifests": list(entries)}
    return json.dumps(merged, separators=(",", ":")).encode()


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
