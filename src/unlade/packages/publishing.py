"""`pkg push` and `pkg copy`: packages become images, the same bytes on every machine (P4-P6).

An image holds one layer with the Kptfile at its root: files only, sorted, without owners and times, modes
reduced to the execute bit. What belongs to the working copy (the origin) is left out. A tag that exists is
not moved without force. Between registries manifests and blobs are copied as they are.
"""

import os
import tempfile
from dataclasses import dataclass

from unlade.errors import InvalidInput
from unlade.model import Reference
from unlade.pack import PushOptions
from unlade.pack import push as push_image
from unlade.packages.kptfile import GitUpstream, Kptfile, OciUpstream
from unlade.packages.location import SCHEME, LocalDirectory, Location, increment
from unlade.packages.ondisk import locked_package, replace_package, write_new
from unlade.packages.snapshot import KPTFILE, NotAPackage, Snapshot, file_of, read_directory
from unlade.packages.sources import Sources
from unlade.registry import NotFound
from unlade.transfer.copy import RegistryEnd
from unlade.transfer.copy import copy as copy_content


class NoOrigin(InvalidInput):
    """Nothing says where to push the package."""

    code = "no-origin"


class TagExists(InvalidInput):
    """The tag is taken by other content."""

    code = "tag-exists"


@dataclass(frozen=True, slots=True)
class Published:
    """Where a package was published: name with digest, and with its tag."""

    name: str
    tagged: str
    bytes_sent: int
    unchanged: bool = False


def _target(kptfile: Kptfile, origin: str, version: str, bump: bool) -> Reference:
    named = origin.removeprefix(SCHEME) or kptfile.origin
    if not named:
        raise NoOrigin(
            f"{kptfile.label}: the package has no origin to push to",
            next_step="name one with --origin oci://HOST/REPO[:TAG]",
        )
    reference = Reference.parse(named)
    if reference.digest is not None:
        raise InvalidInput(f"{named}: a digest is not a place to push to", next_step="name a tag")
    if version.startswith(("sha256:", "sha512:")):
        raise InvalidInput(f"@{version}: a digest is not a version to push", next_step="name a tag")
    tag = version or reference.tag
    if bump:
        if not tag:
            raise InvalidInput("nothing to increment: no version is known", next_step="name one: DIR@v1")
        tag = increment(tag)
    return Reference(reference.registry, reference.repository, tag or "latest")


def publishable(path: str) -> Snapshot:
    """The files of a working copy as they are published."""
    read = read_directory(path)
    if read.links:
        raise NotAPackage(
            f"{path} contains links ({', '.join(read.links[:3])}): a package holds only files",
            next_step="replace them by files, or leave them out of the package",
        )
    if KPTFILE not in read.files:
        raise NotAPackage(f"no Kptfile found at {path!r}", next_step="make one with `unlade pkg init`")
    files = dict(read.files)
    for name, file in read.files.items():
        if name == KPTFILE or name.endswith("/" + KPTFILE):
            kptfile = Kptfile(file.text, name=os.path.join(path, name))
            if kptfile.origin:
                kptfile.set_origin("")
                files[name] = file_of(kptfile.render(), file.mode)
    return files


def _send(files: Snapshot, target: Reference, sources: Sources, *, force: bool, dry_run: bool) -> Published:
    with tempfile.TemporaryDirectory(prefix="unlade-push-") as scratch:
        directory = os.path.join(scratch, "package")
        write_new(directory, files)

        def send(*, dry: bool) -> tuple[str, str, int]:
            pushed = push_image(
                [directory],
                target,
                registry=sources.registry,
                options=PushOptions(image=True),
                dry_run=dry,
                deadline=sources.deadline,
                progress=sources.progress,
            )
            return (
                str(pushed.manifest.digest),
                f"{target.name}@{pushed.manifest.digest}",
                pushed.sent.bytes_sent,
            )

        digest, name, _ = send(dry=True)
        try:
            present = str(sources.registry.resolve(target, deadline=sources.deadline).descriptor.digest)
        except NotFound:
            present = ""
        if present == digest:
            return Published(name, str(target), 0, unchanged=True)
        if present and not force:
            raise TagExists(
                f"{target} exists with other content ({present})",
                next_step="push another version (DIR@VERSION or --increment), or move the tag with --force",
            )
        sent = 0 if dry_run else send(dry=False)[2]
    return Published(name, str(target), sent)


def push(
    path: str,
    sources: Sources,
    *,
    version: str = "",
    origin: str = "",
    bump: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> Published:
    """Publish a package and remember where; the Kptfile is written only after the registry has it all."""
    with locked_package(path) as package_fd:
        files = publishable(path)
        kptfile = Kptfile(read_directory(path).files[KPTFILE].text, name=os.path.join(path, KPTFILE))
        target = _target(kptfile, origin, version, bump)
        published = _send(files, target, sources, force=force, dry_run=dry_run)
        if not dry_run and kptfile.origin != str(target):
            before = read_directory(path).files
            kptfile = Kptfile(before[KPTFILE].text, name=os.path.join(path, KPTFILE))
            kptfile.set_origin(str(target))
            after = {**before, KPTFILE: file_of(kptfile.render(), before[KPTFILE].mode)}
            replace_package(path, package_fd, before, after)
    return published


def copy(
    source: Location, target: Location, sources: Sources, *, force: bool = False, dry_run: bool = False
) -> Published:
    """A package to another place, content unchanged: directory, image or git to directory or image."""
    if isinstance(target, GitUpstream):
        raise InvalidInput("git is a source only", next_step="copy to a directory, then commit it with git")
    if isinstance(source, OciUpstream) and isinstance(target, OciUpstream) and source.directory == "/":
        return _copy_image(source, target, sources, force=force, dry_run=dry_run)
    files = publishable(source.path) if isinstance(source, LocalDirectory) else sources.fetch(source).files
    if KPTFILE not in files:
        raise NotAPackage(f"{source} has no Kptfile at its root")
    if isinstance(target, LocalDirectory):
        if not dry_run:
            write_new(target.path, files)
        return Published(target.path, target.path, 0)
    reference = _image_target(target)
    return _send(files, reference, sources, force=force, dry_run=dry_run)


def _image_target(target: OciUpstream) -> Reference:
    if target.directory != "/":
        raise InvalidInput(
            f"{target}: an image is written whole", next_step="leave out the directory behind //"
        )
    reference = target.reference
    if reference.digest is not None:
        raise InvalidInput(f"{target}: a digest is not a place to write to", next_step="name a tag")
    return Reference(reference.registry, reference.repository, reference.tag or "latest")


def _copy_image(
    source: OciUpstream, target: OciUpstream, sources: Sources, *, force: bool, dry_run: bool
) -> Published:
    origin, reference = source.reference, _image_target(target)
    digest = str(sources.registry.resolve(origin, deadline=sources.deadline).descriptor.digest)
    try:
        present = str(sources.registry.resolve(reference, deadline=sources.deadline).descriptor.digest)
    except NotFound:
        present = ""
    if present and present != digest and not force:
        raise TagExists(
            f"{reference} exists with other content ({present})", next_step="move the tag with --force"
        )
    copied = copy_content(
        RegistryEnd(sources.registry, origin),
        RegistryEnd(sources.registry, reference),
        referrers=False,
        dry_run=dry_run,
        deadline=sources.deadline,
        progress=sources.progress,
    )
    return Published(
        f"{reference.name}@{digest}", str(reference), copied.sent.bytes_sent, unchanged=present == digest
    )
