"""One digest for a tree, so that what contenders made can be compared without keeping it.

Covered: names, types, permissions, owners, sizes, link targets, times of files, which names are one file,
and every byte. Not covered: the root directory itself and times of directories, which are the tools' own
business when a tree is unpacked into a directory that somebody else made.
"""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def fingerprint(root: Path, *, metadata: bool = True) -> str:
    """The digest of all below a directory, or of one file; without `metadata`, of names and bytes alone."""
    found: list[tuple[bytes, os.stat_result]] = []
    top = os.fsencode(root)
    if not os.path.isdir(top):
        return _content(top)
    _list(top, found)
    found.sort(key=lambda one: one[0])
    files = [path for path, info in found if stat.S_ISREG(info.st_mode)]
    # Reading and hashing release the lock: two threads are two cores.
    with ThreadPoolExecutor(2) as pool:
        contents = dict(zip(files, pool.map(_content, files, chunksize=64), strict=True))
    first: dict[tuple[int, int], bytes] = {}
    whole = hashlib.sha256()
    for path, info in found:
        name = path[len(top) :]
        facts: list[object] = [name, stat.S_IFMT(info.st_mode), contents.get(path, "")]
        if stat.S_ISLNK(info.st_mode):
            facts.append(os.readlink(path))
        if metadata:
            facts += [stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid]
        if stat.S_ISREG(info.st_mode):
            facts.append(info.st_size)
            if metadata:
                facts += [int(info.st_mtime), first.setdefault((info.st_dev, info.st_ino), name)]
        whole.update(repr(facts).encode())
    return whole.hexdigest()


def _list(directory: bytes, found: list[tuple[bytes, os.stat_result]]) -> None:
    with os.scandir(directory) as entries:
        for entry in entries:
            found.append((entry.path, entry.stat(follow_symlinks=False)))
            if entry.is_dir(follow_symlinks=False):
                _list(entry.path, found)


def _content(path: bytes) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
