"""The bundle: this very installation with all it needs, as one directory that runs without pip.

`lib/` holds the package and its dependencies as they are installed here, `bin/unlade` starts them with the
host's Python and nothing but its standard library, `bundle.json` says what is inside. Extension modules tie
a bundle to one version of CPython and one kind of machine; the start checks that (decision 0012).

Invariant: a bundle's directory is named by its version and its content, and never changes once it has its
name. A bundle can make itself again: that is how a node without pip is upgraded from one that was copied
there. Callers: `setup`.
"""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import py_compile
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import unlade
from unlade.host.errors import HostError, NotBundled
from unlade.kernel import failpoints
from unlade.tree.sync import sync_tree

PACKAGE: Final = "unlade"
FACTS: Final = "bundle.json"
_REQUIREMENT: Final = re.compile(r"\s*(?P<name>[A-Za-z0-9._-]+)\s*(?:\[(?P<extras>[^]]*)\])?")
_EXTRA: Final = re.compile(r"""extra\s*==\s*['"](?P<extra>[^'"]+)['"]""")
# Enough of the digest that two builds of one version never share a name.
_SHORT: Final = 12

# -I: no PYTHON* variables, no user's packages; -S: no packages of the host either.
_LAUNCHER: Final = '''#!{python} -IS
"""Starts the program of this bundle: the host's standard library, the bundle's packages, nothing else."""

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
if sys.implementation.cache_tag != {tag!r}:
    sys.exit(
        f"error: {{HOME}} was made for {tag}, and {{sys.executable}} is {{sys.implementation.cache_tag}}\\n"
        "next: install again with a Python of that version (--python)"
    )
sys.path.insert(0, os.path.join(HOME, "lib"))

from unlade.cli import main

main()
'''


@dataclass(frozen=True)
class Bundle:
    """What a bundle will consist of: paths below `lib/` and where their bytes are now."""

    version: str
    python: str
    files: Mapping[str, Path]
    distributions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Of every path and every byte, and of the interpreter: equal content has an equal name."""
        whole = hashlib.sha256(self.launcher().encode())
        for name, source in sorted(self.files.items()):
            whole.update(f"\n{name}\n".encode())
            with open(source, "rb") as stream:
                whole.update(hashlib.file_digest(stream, "sha256").digest())
        return whole.hexdigest()

    @property
    def name(self) -> str:
        """The directory's name: `VERSION-DIGEST`."""
        return f"{self.version}-{self.digest[:_SHORT]}"

    def launcher(self) -> str:
        """The text of `bin/unlade`."""
        return _LAUNCHER.format(python=self.python, tag=sys.implementation.cache_tag)

    def facts(self) -> dict[str, Any]:
        """What `bundle.json` says."""
        return {
            "version": self.version,
            "digest": f"sha256:{self.digest}",
            "python": self.python,
            "abi": sys.implementation.cache_tag,
            "platform": sysconfig.get_platform(),
            "distributions": dict(sorted(self.distributions.items())),
        }

    def write(self, target: Path) -> None:
        """Make the directory, whole or not at all, durable when this returns."""
        # One name, so that what a killed install left is found and replaced by the next.
        staging = target.with_name(".incoming")
        shutil.rmtree(staging, ignore_errors=True)
        try:
            self._fill(staging, target)
            fd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
            try:
                sync_tree(fd)
            finally:
                os.close(fd)
            failpoints.reach("host.bundle.filled")
            os.rename(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _fill(self, staging: Path, target: Path) -> None:
        library = staging / "lib"
        for name, source in self.files.items():
            path = library / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
            path.chmod(0o644)
        launcher = staging / "bin" / PACKAGE
        launcher.parent.mkdir(parents=True)
        launcher.write_text(self.launcher())
        launcher.chmod(0o755)
        (staging / FACTS).write_text(json.dumps(self.facts(), indent=2) + "\n")
        # Bytecode is never checked against its source again: a bundle does not change.
        compileall.compile_dir(
            library,
            quiet=2,
            stripdir=str(staging),
            prependdir=str(target),
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        for directory, _, _ in os.walk(staging):
            os.chmod(directory, 0o755)  # noqa: S103 - a program, readable whatever the caller's umask


def collect(extras: Iterable[str], *, python: str = "") -> Bundle:
    """This installation with these extras; `python` is the interpreter's path on the node.

    Raises NotBundled when a dependency is not installed, or not in a form that says which files it has.
    """
    found = _closure(frozenset(extras))
    version = found.pop(PACKAGE).version
    files = {name: path for one in found.values() for name, path in _installed(one)}
    package = Path(unlade.__file__).parent
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[f"{PACKAGE}/{path.relative_to(package)}"] = path
    described = _described()
    files[f"{PACKAGE}-{version}.dist-info/METADATA"] = described
    versions = {name: one.version for name, one in found.items()}
    return Bundle(version, python or this_python(), files, {PACKAGE: version, **versions})


def this_python() -> str:
    """The interpreter that runs us, as a node should name it: outside any virtual environment, by version."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def facts_of(directory: Path) -> dict[str, Any]:
    """What a bundle's directory says about itself; raises HostError when it is none."""
    try:
        told = json.loads((directory / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise HostError(
            f"{directory} is not a whole bundle: {error}", next_step="`unlade node install` again"
        ) from error
    if not isinstance(told, dict):
        raise HostError(f"{directory / FACTS} is not an object", next_step="`unlade node install` again")
    return told


def _closure(extras: frozenset[str]) -> dict[str, metadata.Distribution]:
    """The distributions that the package needs with these extras, by normalised name; itself included."""
    found: dict[str, metadata.Distribution] = {}
    asked: set[tuple[str, frozenset[str]]] = set()
    todo: list[tuple[str, frozenset[str], bool]] = [(PACKAGE, extras, True)]
    while todo:
        name, wanted, needed = todo.pop()
        if (name, wanted) in asked:
            continue
        asked.add((name, wanted))
        try:
            one = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            if not needed:
                continue
            raise NotBundled(
                f"{name} is needed and not installed here",
                next_step=f"pip install '{PACKAGE}[{','.join(sorted(extras))}]', then install again",
            ) from error
        found[name] = one
        todo += _requirements(one, wanted)
    return found


def _requirements(
    one: metadata.Distribution, extras: frozenset[str]
) -> Iterator[tuple[str, frozenset[str], bool]]:
    for text in one.requires or ():
        requirement, _, marker = text.partition(";")
        if (extra := _EXTRA.search(marker)) and extra["extra"] not in extras:
            continue
        match = _REQUIREMENT.match(requirement)
        assert match is not None, text
        name = re.sub(r"[-_.]+", "-", match["name"]).lower()
        inner = frozenset(word.strip() for word in (match["extras"] or "").split(",") if word.strip())
        # Other markers were decided when this environment was installed: what is not here was not meant.
        yield name, inner, not marker.strip() or bool(_EXTRA.fullmatch(marker.strip()))


def _installed(one: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """The files of a distribution that belong below a library directory."""
    if one.files is None:
        raise NotBundled(
            f"{one.name} does not say which files it has", next_step="install it from a wheel, with pip or uv"
        )
    for path in one.files:
        outside = path.is_absolute() or ".." in path.parts
        source = Path(str(path.locate()))
        if outside or "__pycache__" in path.parts or path.suffix == ".pth" or not source.is_file():
            continue  # programs for a virtual environment, bytecode, start-up hooks
        yield path.as_posix(), source


def _described() -> Path:
    """Our own METADATA file; an editable installation has nothing else of us."""
    for path in metadata.distribution(PACKAGE).files or ():
        if path.name == "METADATA":
            return Path(str(path.locate()))
    # A bundle keeps this one file, and no list of files.
    own = Path(unlade.__file__).parent.parent
    found = sorted(own.glob(f"{PACKAGE}-*.dist-info/METADATA"))
    if not found:
        raise NotBundled("unlade's own METADATA is not installed", next_step="install unlade with pip or uv")
    return found[0]
