"""Which registries a package's Kptfiles name, before anything is fetched.

`--plain-http` and credentials on a command line hold for the registries that the command names; for update
and diff those names stand in Kptfiles, not on the command line.
"""

import os

from unlade.packages.kptfile import Kptfile, Upstream
from unlade.packages.location import SCHEME
from unlade.packages.snapshot import KPTFILE


def _kptfile(path: str) -> Kptfile | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return Kptfile(file.read(), name=path)
    except OSError:
        return None


def upstreams_below(path: str) -> list[Upstream]:
    """The upstreams and locks of every Kptfile below a directory; links are not followed."""
    found: list[Upstream] = []
    for here, directories, files in os.walk(path):
        directories[:] = [name for name in directories if name != ".git"]
        if KPTFILE in files:
            kptfile = _kptfile(os.path.join(here, KPTFILE))
            if kptfile is not None:
                found += [upstream for upstream in (kptfile.upstream, kptfile.lock) if upstream is not None]
    return found


def origin_of(path: str) -> str:
    """The package's origin as a location, or an empty text."""
    kptfile = _kptfile(os.path.join(path, KPTFILE))
    return SCHEME + kptfile.origin if kptfile is not None and kptfile.origin else ""
