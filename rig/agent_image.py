"""Our own program as a container image: Debian's Python, this environment's packages, this checkout's source.

Two layers: the Python image's, and a tar of what `unlade[node]` needs, made anew when the source changes (a
second's work). Nothing is downloaded: packages are copied from the environment that runs the tests, so its
Python must be the one that Debian's image has.
"""

from __future__ import annotations

import re
import sys
import tarfile
from importlib import metadata
from pathlib import Path

from rig import RigError
from rig.images import PYTHON
from rig.oci import Pushed, Registry

SOURCE = Path(__file__).parents[1] / "src" / "unlade"
HOME = "opt/unlade"
# What the node's agent imports; the Kubernetes client is for events and secrets, and three times as large.
ROOT, EXTRAS = "unlade", ("node",)
# Debian's Python by release: packages with C code fit no other.
PYTHONS = {"bookworm": (3, 11), "trixie": (3, 13)}


def push(registry: Registry, directory: Path) -> Pushed:
    """Push the image as `unlade:1`; `directory` is for its layer."""
    layer = directory / "unlade.tar"
    with tarfile.open(layer, "w") as archive:
        archive.add(SOURCE, f"{HOME}/unlade", filter=_wanted)
        for package in sorted(_closure()):
            _add(archive, package)
    run = {
        "Entrypoint": ["/usr/bin/python3", "-m", "unlade"],
        "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", f"PYTHONPATH=/{HOME}", "PYTHONDONTWRITEBYTECODE=1"],
    }
    return registry.push_image("unlade", [PYTHON.layer(), layer], run=run)


def fits() -> bool:
    """Whether this environment's packages run on Debian's Python."""
    text = Path("/etc/os-release").read_text()
    return any(name in text and sys.version_info[:2] == version for name, version in PYTHONS.items())


def _closure() -> set[str]:
    """Every distribution that the program needs here, by name."""
    found: set[str] = set()
    pending: list[tuple[str, tuple[str, ...]]] = [(ROOT, EXTRAS)]
    while pending:
        name, extras = pending.pop()
        for line in metadata.requires(name) or ():
            requirement, _, marker = line.partition(";")
            asked = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
            if asked and asked[1] not in extras:
                continue
            other = re.split(r"[^\w.-]", requirement.strip())[0]
            try:
                metadata.version(other)
            except metadata.PackageNotFoundError:
                if not marker:
                    raise RigError(f"{name} needs {other}, which is not installed") from None
                continue  # for another platform or Python
            if other not in found:
                found.add(other)
                pending.append((other, ()))
    return found


def _add(archive: tarfile.TarFile, package: str) -> None:
    for path in metadata.files(package) or ():
        where = path.locate()
        if ".." not in path.parts and path.suffix != ".pyc" and Path(str(where)).is_file():
            archive.add(str(where), f"{HOME}/{path}", recursive=False)


def _wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry
