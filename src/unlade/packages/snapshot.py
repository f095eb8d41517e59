"""A package's files in memory, and where its sub-packages begin.

Packages are configuration: kilobytes, rarely megabytes. Holding the three sides of a merge in memory keeps
every rule a function of plain values, and nothing touches the disk until the outcome is complete. Paths are
relative, with slashes; only regular files are content. Reading a directory skips symbolic links, as kpt
does, and reports them; what is not a file, a directory or a link is refused.
"""

import os
import stat
from collections.abc import Mapping, Set
from dataclasses import dataclass

from unlade.errors import InvalidInput

KPTFILE = "Kptfile"
# A package is text; whoever stores more in one has mistaken it for an image.
MAX_FILES = 100_000
MAX_BYTES = 512 * 1024 * 1024
# Each sub-package is merged on its own, against a look at every file.
MAX_PACKAGES = 2000


@dataclass(frozen=True, slots=True)
class File:
    """One regular file; only the permission bits of its mode are kept."""

    data: bytes
    mode: int = 0o644

    @property
    def text(self) -> str:
        """The content as UTF-8; bytes that are not are kept by surrogates."""
        return self.data.decode("utf-8", "surrogateescape")


Snapshot = dict[str, File]


def file_of(text: str, mode: int = 0o644) -> File:
    """A file with this text; the reverse of File.text."""
    return File(text.encode("utf-8", "surrogateescape"), mode)


class NotAPackage(InvalidInput):
    """The directory has no Kptfile, or holds what no package may hold."""

    code = "not-a-package"


@dataclass(frozen=True, slots=True)
class DirectoryRead:
    """A directory's files, and the links that were left out."""

    files: Snapshot
    links: tuple[str, ...]


def read_directory(path: str, *, skip: frozenset[str] = frozenset({".git"})) -> DirectoryRead:
    """Every regular file below the directory, links not followed; directories named in skip are left out."""
    files: Snapshot = {}
    links: list[str] = []
    total = 0
    stack = [""]
    while stack:
        here = stack.pop()
        with os.scandir(os.path.join(path, here) if here else path) as entries:
            for entry in entries:
                rel = f"{here}/{entry.name}" if here else entry.name
                if entry.is_symlink():
                    links.append(rel)
                elif entry.is_dir(follow_symlinks=False):
                    if entry.name not in skip:
                        stack.append(rel)
                elif entry.is_file(follow_symlinks=False):
                    data, mode = _read(entry.path)
                    total += len(data)
                    if total > MAX_BYTES or len(files) >= MAX_FILES:
                        raise NotAPackage(
                            f"{path}: more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB",
                            next_step="packages hold configuration; push large content with `unlade push`",
                        )
                    files[rel] = File(data, mode)
                else:
                    raise NotAPackage(f"{path}/{rel} is a device, a socket or a pipe")
    return DirectoryRead(files, tuple(sorted(links)))


def _read(path: str) -> tuple[bytes, int]:
    # O_NOFOLLOW and O_NONBLOCK: the entry may have been swapped for a link or a pipe since scandir.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotAPackage(f"{path} is not a regular file")
        return file.read(MAX_BYTES + 1), stat.S_IMODE(status.st_mode) & 0o777


def below(files: Mapping[str, File], directory: str) -> Snapshot:
    """The files below a directory, with paths relative to it."""
    if directory in ("", "."):
        return dict(files)
    prefix = directory.rstrip("/") + "/"
    return {path[len(prefix) :]: file for path, file in files.items() if path.startswith(prefix)}


def has_directory(files: Mapping[str, File], directory: str) -> bool:
    """Whether any file lies below the directory."""
    if directory in ("", "."):
        return True
    prefix = directory + "/"
    return any(path.startswith(prefix) for path in files)


def package_directories(files: Mapping[str, File]) -> list[str]:
    """Every directory below the root with a Kptfile, parents first; the root is not listed."""
    suffix = "/" + KPTFILE
    found = sorted(path[: -len(suffix)] for path in files if path.endswith(suffix))
    if len(found) > MAX_PACKAGES:
        raise NotAPackage(
            f"{len(found)} sub-packages; at most {MAX_PACKAGES} are handled", next_step="split the package"
        )
    return found


def inside_any(path: str, directories: Set[str]) -> bool:
    """Whether the path lies below one of the directories; names that merely start alike do not count."""
    if not directories:
        return False
    slash = path.find("/")
    while slash >= 0:
        if path[:slash] in directories:
            return True
        slash = path.find("/", slash + 1)
    return False


def own_files(files: Mapping[str, File], extra: list[str] | None = None) -> Snapshot:
    """The root package's own files: nothing below a sub-package, here or in extra."""
    boundaries = set(package_directories(files)) | set(extra or [])
    if not boundaries:
        return dict(files)
    return {path: file for path, file in files.items() if not inside_any(path, boundaries)}


def is_krm(path: str) -> bool:
    """Whether kpt reads the file as resources: by its name alone."""
    name = path.rsplit("/", 1)[-1]
    return name == KPTFILE or name.endswith((".yaml", ".yml"))
