"""References: how people name content in a registry.

The grammar is the distribution project's (reference/regexp); short names mean what they mean to Docker:
`nginx` is `docker.io/library/nginx:latest`. A `Reference` is canonical once made: two spellings of one
thing are equal. Nothing is looked up here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from unlade.errors import InvalidInput
from unlade.model.digest import Digest

DEFAULT_REGISTRY: Final = "docker.io"
_OFFICIAL_REPOSITORIES: Final = "library"
# docker.io answers to this older name too; both must give one reference, or caches and credentials split.
_DOCKER_ALIASES: Final = {"index.docker.io", "registry-1.docker.io"}

# The distribution project's limit on a repository name, which registries enforce.
_MAX_NAME: Final = 255
_DOMAIN_LABEL = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_REGISTRY: Final = re.compile(
    rf"(?:{_DOMAIN_LABEL}(?:\.{_DOMAIN_LABEL})*|\[[a-fA-F0-9:]+\])(?::[0-9]{{1,5}})?", re.ASCII
)
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY: Final = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*", re.ASCII)
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


class InvalidReference(InvalidInput):
    """Not a reference by the grammar."""

    code = "invalid-reference"


@dataclass(frozen=True, slots=True)
class Reference:
    """A registry, a repository, and a tag, a digest, both or neither."""

    registry: str
    repository: str
    tag: str | None = None
    digest: Digest | None = None

    def __post_init__(self) -> None:
        if not _REGISTRY.fullmatch(self.registry) or _port_too_large(self.registry):
            raise InvalidReference(
                f"{self.registry[:140]!r} is not a registry host",
                next_step="write HOST[:PORT]/REPOSITORY[:TAG]",
            )
        if not _REPOSITORY.fullmatch(self.repository):
            hint = (
                "repository names are lower case"
                if self.repository != self.repository.lower()
                else ("use lower-case letters, digits and single . _ - between them")
            )
            raise InvalidReference(f"{self.repository[:140]!r} is not a repository name", next_step=hint)
        if len(self.registry) + 1 + len(self.repository) > _MAX_NAME:
            raise InvalidReference(
                f"repository name is longer than {_MAX_NAME} characters", next_step="shorten the name"
            )
        if self.tag is not None and not _TAG.fullmatch(self.tag):
            raise InvalidReference(
                f"{self.tag[:140]!r} is not a tag",
                next_step="a tag has at most 128 letters, digits, . _ - and starts with a letter, digit or _",
            )

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse as Docker does: short names go to docker.io/library; raises InvalidReference."""
        if not text:
            raise InvalidReference("empty reference", next_step="write HOST[:PORT]/REPOSITORY[:TAG]")
        if "://" in text:
            raise InvalidReference(
                f"{text[:140]!r} has a scheme", next_step="leave out the scheme: HOST[:PORT]/REPOSITORY[:TAG]"
            )
        rest, at, digest_text = text.partition("@")
        digest = Digest.parse(digest_text) if at else None
        name, tag = _split_tag(rest)
        registry, repository = _split_registry(name)
        return cls(registry, repository, tag, digest)

    @property
    def name(self) -> str:
        """`registry/repository`, without tag and digest."""
        return f"{self.registry}/{self.repository}"

    @property
    def tag_or_latest(self) -> str:
        """The tag to ask for when there is no digest."""
        return self.tag or "latest"

    @property
    def wanted(self) -> str:
        """What the registry is asked for: the digest when there is one, else the tag."""
        return str(self.digest) if self.digest else self.tag_or_latest

    def with_digest(self, digest: Digest) -> Reference:
        """The same repository, pinned; the tag is dropped because the digest decides."""
        return replace(self, tag=None, digest=digest)

    def with_tag(self, tag: str) -> Reference:
        """The same repository at another tag."""
        return replace(self, tag=tag, digest=None)

    def __str__(self) -> str:
        text = self.name
        if self.tag is not None or self.digest is None:
            text += f":{self.tag_or_latest}"
        if self.digest is not None:
            text += f"@{self.digest}"
        return text


def _split_tag(rest: str) -> tuple[str, str | None]:
    # A colon after the last slash starts a tag; one before it belongs to a port.
    colon = rest.rfind(":")
    if colon > rest.rfind("/"):
        return rest[:colon], rest[colon + 1 :]
    return rest, None


def _split_registry(name: str) -> tuple[str, str]:
    first, slash, remainder = name.partition("/")
    # Docker's rule: the first part is a host only when it could not be a Hub user name.
    is_host = slash and ("." in first or ":" in first or first == "localhost" or first != first.lower())
    if is_host and "." not in first and ":" not in first and first.lower() != "localhost":
        # Docker takes "Team/app" for a host called Team. Hosts are lower case here, and "team/app" is a Hub
        # name: one text would mean two places.
        raise InvalidReference(
            f"{first[:140]!r} is neither a registry host nor a repository name",
            next_step="repository names are lower case; a host needs a dot or a port",
        )
    if not is_host:
        registry, repository = DEFAULT_REGISTRY, name
    else:
        registry, repository = first.lower(), remainder
    if registry in _DOCKER_ALIASES:
        registry = DEFAULT_REGISTRY
    if registry == DEFAULT_REGISTRY and "/" not in repository:
        repository = f"{_OFFICIAL_REPOSITORIES}/{repository}"
    return registry, repository


def _port_too_large(registry: str) -> bool:
    host, colon, port = registry.rpartition(":")
    return bool(colon and host and port.isdigit() and int(port) > 65535)
