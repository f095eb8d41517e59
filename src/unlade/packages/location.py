"""How people name packages: images, git directories, local directories, and versions behind an @.

`oci://HOST/REPO[//SUB][:TAG|@sha256:…]`: the double slash ends the repository and begins a directory inside
the package. `REPO.git[/SUB][@REF]`: as kpt reads it, `.git` ends the repository. Anything else is a local
path. A version behind a directory (`DIR@v2`, `DIR@sha256:…`) is split at its last @.
"""

import os
import re
from dataclasses import dataclass, replace

from unlade.errors import InvalidInput
from unlade.model import Digest, Reference
from unlade.packages.kptfile import GitUpstream, OciUpstream, Upstream

SCHEME = "oci://"
_VERSION = re.compile(r"^(v?)((?:0|[1-9]\d*)(?:\.(?:0|[1-9]\d*)){0,2})(-[0-9A-Za-z.-]+)?$")


class BadLocation(InvalidInput):
    """The text names no package that can be reached."""

    code = "bad-location"


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    """A directory on this machine."""

    path: str

    kind = "directory"


Location = OciUpstream | GitUpstream | LocalDirectory


def parse_oci(text: str) -> OciUpstream:
    """An image with an optional directory inside it."""
    body = text.removeprefix(SCHEME)
    repository, double, rest = body.partition("//")
    if not double:
        return OciUpstream(str(Reference.parse(body)))
    inside, at, digest = rest.partition("@")
    tag = ""
    head, slash, last = inside.rpartition("/")
    name, colon, after = last.partition(":")
    if colon:
        tag, inside = ":" + after, head + slash + name
    parts = [part for part in inside.split("/") if part]
    if not parts or "." in parts or ".." in parts:
        raise BadLocation(
            f"{text!r}: the directory behind // is empty or leaves the package",
            next_step="write oci://HOST/REPO//SUB:TAG",
        )
    reference = Reference.parse(repository + tag + at + digest)
    return OciUpstream(str(reference), "/" + "/".join(parts))


def parse_git(text: str) -> GitUpstream:
    """A directory of a git repository; ref is empty for the default branch."""
    before, _, after = text.partition(".git")
    if after.count("@") > 1:
        raise BadLocation(f"{text!r}: at most 1 version permitted")
    directory, _, ref = after.partition("@")
    if before.startswith("-") or ref.startswith("-"):
        raise BadLocation(f"{text!r} starts with a dash")
    parts = [part for part in directory.split("/") if part]
    if ".." in parts or "." in parts:
        raise BadLocation(f"{text!r}: the directory leaves the repository")
    return GitUpstream(before, "/" + "/".join(parts), ref)


def parse_location(text: str) -> Location:
    """Image, git directory or local path, by how the text looks."""
    if text.startswith(SCHEME):
        return parse_oci(text)
    if re.search(r"\.git(?:$|[/@])", text) and not os.path.isdir(text):
        return parse_git(text)
    if "://" in text or (text.startswith("git@") and ":" in text):
        raise BadLocation(
            f"ambiguous repo/dir@version: {text!r}",
            next_step="end the repository with '.git', as in REPO.git/DIR@REF",
        )
    return LocalDirectory(text)


def parse_remote(text: str) -> Upstream:
    """As parse_location, but a local path is an error."""
    location = parse_location(text)
    if isinstance(location, LocalDirectory):
        raise BadLocation(
            f"{text!r} names no image and no git repository",
            next_step="write oci://HOST/REPO:TAG, or REPO.git/DIR@REF",
        )
    return location


def split_version(text: str) -> tuple[str, str]:
    """A directory and the version behind its @; either may be empty."""
    directory, at, version = text.rpartition("@")
    if not at:
        return text or ".", ""
    if "@" in directory and not os.path.isdir(directory):
        raise BadLocation(f"{text!r}: at most 1 version permitted")
    if not version:
        raise BadLocation(f"{text!r}: no version behind the @")
    return directory or ".", version


def at_version(upstream: Upstream, version: str) -> Upstream:
    """The same upstream at another tag, digest or ref."""
    if isinstance(upstream, GitUpstream):
        return replace(upstream, ref=version, commit="")
    reference = upstream.reference
    if version.startswith("sha256:") or version.startswith("sha512:"):
        fresh = Reference(reference.registry, reference.repository, None, Digest.parse(version))
    else:
        fresh = Reference(reference.registry, reference.repository, version)
    return replace(upstream, image=str(fresh))


def default_directory(location: Upstream) -> str:
    """The directory name that get and pull use when none is given: the last part of the location."""
    if location.directory != "/":
        return location.directory.rsplit("/", 1)[-1]
    if isinstance(location, OciUpstream):
        return location.reference.repository.rsplit("/", 1)[-1]
    return location.repo.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1]


def increment(tag: str) -> str:
    """The next version: the last number plus one, prefix and pre-release kept."""
    match = _VERSION.match(tag)
    if match is None:
        raise BadLocation(
            f"{tag!r} is not a version that can be incremented",
            next_step="use a tag like v1, 1.2 or v1.2.3-rc.1, or push without --increment",
        )
    prefix, numbers, suffix = match.group(1), match.group(2), match.group(3) or ""
    head, dot, last = numbers.rpartition(".")
    return f"{prefix}{head}{dot}{int(last) + 1}{suffix}"
