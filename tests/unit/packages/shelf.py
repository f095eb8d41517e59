"""Packages on a shelf: a source of packages without a registry, for tests of get, update and diff."""

from dataclasses import replace

from unlade.model import Digest
from unlade.packages.kptfile import GitUpstream, OciUpstream, Upstream, locked
from unlade.packages.snapshot import Snapshot, below, file_of
from unlade.packages.sources import Fetched


class Shelf:
    """Holds versions of packages by image name; what was put there can be fetched by tag and by digest."""

    def __init__(self) -> None:
        self.tags: dict[str, Digest] = {}
        self.content: dict[Digest, Snapshot] = {}
        self.fetched: list[str] = []

    def put(self, image: str, files: dict[str, str]) -> Digest:
        """Publish files under REPOSITORY:TAG."""
        digest = Digest.of(repr(sorted(files.items())).encode())
        self.tags[image] = digest
        self.content[digest] = {name: file_of(text) for name, text in files.items()}
        return digest

    def fetch(self, upstream: Upstream) -> Fetched:
        assert not isinstance(upstream, GitUpstream)
        self.fetched.append(upstream.image)
        reference = upstream.reference
        digest = reference.digest or self.tags[str(reference)]
        files = below(self.content[digest], upstream.directory.strip("/"))
        return Fetched(files, upstream, replace(upstream, image=locked(reference, digest)))


def oci(image: str, directory: str = "/") -> OciUpstream:
    return OciUpstream(image, directory)
