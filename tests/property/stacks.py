"""Random stacks of image layers, by seed: what build tools produce and what they would never dare to.

The generator keeps a model of the tree so far, so that overwrites, deletions and flips hit something. It
stays away from the cases in which containerd's answer (design, decision 9) differs from umoci's; those are
listed in `test_stacks_exceptions.py`. Directory times are compared only where an entry set them.
"""

from __future__ import annotations

import json
import os
import random
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.fakes.tars import Tar
from unlade.model import Digest

Kind = Literal["file", "dir", "link", "hard"]

_PLAIN = [b"a", b"b", b"c", b"bin", b"lib", b"etc", b"data", b"x.txt", b"y.conf"]
_ODD = [
    b"\xff\xfe\x80", "\u00e4\u00f6".encode(), "a\u0308".encode(), b"with space", b"new\nline", b"-rf",
    b"...", b"..x", b".wh", b".hidden", b"wh.x", b"q" * 200, b"tab\there", b"quote'\"",
    b"back\\slash", b"*", b"A", b"%41",
]  # fmt: skip


@dataclass
class Stack:
    """Layers, lowest first, and the directories whose times no entry has set."""

    layers: list[bytes] = field(default_factory=list)
    untimed: set[bytes] = field(default_factory=set)


class Generator:
    """Builds one stack from a seed; the same seed gives the same bytes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._tree: dict[bytes, Kind] = {}  # what the layers so far show
        self._stack = Stack()

    def stack(self) -> Stack:
        """Between one and six layers."""
        for _ in range(self._random.randint(1, 6)):
            self._stack.layers.append(_Layer(self._random, self._tree, self._stack.untimed).build())
        return self._stack


class _Layer:
    def __init__(self, rng: random.Random, tree: dict[bytes, Kind], untimed: set[bytes]) -> None:
        self._rng = rng
        self._tree = tree
        self._untimed = untimed
        self._lower = dict(tree)
        self._mine: dict[bytes, Kind] = {}  # this layer's names, parents without an entry included
        self._hidden: set[bytes] = set()
        self._tar = Tar()
        self._prefix = rng.choice([b"", b"", b"./", b"/"])

    def build(self) -> bytes:
        if self._rng.random() < 0.6:
            self._tar.dir(b"./", **self._attributes(0o755))
            self._untimed.discard(b"")
        else:
            self._untimed.add(b"")
        steps = [
            (8, self._add_file), (5, self._add_dir), (3, self._add_link), (2, self._add_hard_link),
            (3, self._overwrite), (4, self._delete), (2, self._opaque), (2, self._flip), (1, self._touch_dir),
            (2, self._through_own_link), (1, self._replace_deleted),
        ]  # fmt: skip
        for _ in range(self._rng.randint(1, 25)):
            self._rng.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()
        return bytes(self._tar)

    # What an entry is made of ------------------------------------------------------------------------

    def _attributes(self, mode: int) -> dict[str, object]:
        rng = self._rng
        pax: dict[bytes, bytes] = {}
        seconds = rng.randint(0, 2_000_000_000)
        if rng.random() < 0.3:
            pax[b"mtime"] = b"%d.%09d" % (seconds, rng.randrange(10**9))
        if rng.random() < 0.2:
            for _ in range(rng.randint(1, 3)):
                pax[b"SCHILY.xattr.user.k%d" % rng.randrange(4)] = rng.randbytes(rng.randint(1, 40))
        if rng.random() < 0.3:
            mode = rng.choice(
                [0o600, 0o644, 0o700, 0o755, 0o777, 0o640, 0o1777, 0o4755, 0o2755, 0o555, 0o500, 0]
            )
        return {
            "mode": mode,
            "uid": rng.choice([0, 0, 0, 1, 1000, 65534, 100_000]),
            "gid": rng.choice([0, 0, 0, 2, 1000, 65534]),
            "mtime": seconds,
            "pax": pax,
        }

    def _content(self) -> bytes:
        return self._rng.randbytes(self._rng.choice([0, 1, 5, 511, 512, 513, 3000]))

    def _name(self) -> bytes:
        return self._rng.choice(_ODD if self._rng.random() < 0.2 else _PLAIN)

    def _directory(self) -> bytes:
        """A directory of the tree that may get entries: not below a link, nor below what this layer hides."""
        known = [path for path, kind in sorted(self._tree.items()) if kind == "dir" and path.count(b"/") < 5]
        return self._rng.choice([b"", *known])

    def _free(self) -> bytes:
        parent = self._directory()
        return parent + b"/" + self._name() if parent else self._name()

    # Bookkeeping -------------------------------------------------------------------------------------

    def _set(self, path: bytes, kind: Kind) -> None:
        if kind != "dir" or self._tree.get(path) not in (None, "dir"):
            self._drop_below(path)
        parent = path.rpartition(b"/")[0]
        while parent and parent not in self._mine:
            self._mine[parent] = "dir"
            if parent not in self._tree:
                self._untimed.add(parent)
            self._tree[parent] = "dir"
            parent = parent.rpartition(b"/")[0]
        self._tree[path] = self._mine[path] = kind
        if kind == "dir":
            self._untimed.discard(path)

    def _drop_below(self, path: bytes) -> None:
        below = path + b"/"
        for table in (self._tree, self._mine):
            for known in [known for known in table if known.startswith(below)]:
                del table[known]
                self._untimed.discard(known)
        self._untimed.discard(path)

    def _usable(self, path: bytes) -> bool:
        """Whether umoci and containerd agree on an entry here: no parent may be anything but a directory."""
        parent = path.rpartition(b"/")[0]
        while parent:
            if self._tree.get(parent, "dir") != "dir":
                return False
            parent = parent.rpartition(b"/")[0]
        return True

    def _emit_file(self, path: bytes) -> None:
        self._tar.file(self._prefix + path, self._content(), **self._attributes(0o644))
        self._set(path, "file")

    # Steps -------------------------------------------------------------------------------------------

    def _add_file(self) -> None:
        path = self._free()
        if self._usable(path):
            self._emit_file(path)

    def _add_dir(self) -> None:
        path = self._free()
        if self._usable(path):
            self._tar.dir(self._prefix + path + self._rng.choice([b"", b"/"]), **self._attributes(0o755))
            self._set(path, "dir")

    def _add_link(self) -> None:
        path = self._free()
        if not self._usable(path):
            return
        target = self._rng.choice(
            [b"a", b"../b", b"/etc", b"/no/where", b"..", b".", b"lib/c", b"\xff", b"x" * 150]
        )
        attributes = self._attributes(0o777)
        attributes["mode"], attributes["pax"] = 0o777, {}
        self._tar.symlink(self._prefix + path, target, **attributes)
        self._set(path, "link")

    def _add_hard_link(self) -> None:
        files = [path for path, kind in sorted(self._mine.items()) if kind == "file"]
        path = self._free()
        if files and self._usable(path):
            target = self._rng.choice(files)
            if path != target and not target.startswith(path + b"/"):
                self._tar.link(self._prefix + path, self._rng.choice([b"", self._prefix]) + target)
                self._set(path, "hard")

    def _overwrite(self) -> None:
        files = [path for path, kind in sorted(self._tree.items()) if kind in ("file", "hard", "link")]
        if files:
            self._emit_file(self._rng.choice(files))

    def _touch_dir(self) -> None:
        known = [path for path, kind in sorted(self._tree.items()) if kind == "dir"]
        if known:
            path = self._rng.choice(known)
            self._tar.dir(self._prefix + path, **self._attributes(0o755))
            self._set(path, "dir")

    def _delete(self) -> None:
        # Only what lower layers brought and this layer has not touched, nor any parent it already hid.
        names = [path for path in sorted(self._lower) if path in self._tree and path not in self._mine]
        if not names:
            return
        path = self._rng.choice(names)
        if not self._usable(path) or any(known.startswith(path + b"/") for known in self._mine):
            return
        parent, _, name = path.rpartition(b"/")
        self._tar.file(self._prefix + (parent + b"/" if parent else b"") + b".wh." + name, mtime=1)
        if self._rng.random() < 0.2:
            self._tar.file(self._prefix + (parent + b"/" if parent else b"") + b".wh." + name, mtime=1)
        self._drop_below(path)
        del self._tree[path]
        self._hidden.add(path)

    def _replace_deleted(self) -> None:
        """A whiteout and a new thing of the same name in one layer, in either order."""
        names = [path for path in sorted(self._lower) if path in self._tree and path not in self._mine]
        if not names:
            return
        path = self._rng.choice(names)
        if not self._usable(path) or any(known.startswith(path + b"/") for known in self._mine):
            return
        parent, _, name = path.rpartition(b"/")
        whiteout = self._prefix + (parent + b"/" if parent else b"") + b".wh." + name
        self._drop_below(path)
        del self._tree[path]
        self._tar.file(whiteout)
        if self._rng.random() < 0.5:
            self._emit_file(path)
        else:
            self._tar.dir(self._prefix + path, **self._attributes(0o755))
            self._set(path, "dir")
            self._emit_file(path + b"/" + self._name())

    def _opaque(self) -> None:
        path = self._directory()
        if not path or path not in self._lower or path in self._hidden:
            return
        if any(known.startswith(path + b"/") for known in self._hidden):
            return
        # The marker may stand before or after its siblings, and more than once.
        children = [path + b"/" + self._name() for _ in range(self._rng.randint(0, 3))]
        marker = self._prefix + path + b"/.wh..wh..opq"
        below = path + b"/"
        for known in [known for known in self._tree if known.startswith(below)]:
            if known not in self._mine:
                del self._tree[known]
                self._untimed.discard(known)
            elif self._mine[known] == "dir":
                # umoci removes what lower layers had in it only now, and leaves the time to the clock.
                self._untimed.add(known)
        self._tar.dir(self._prefix + path, **self._attributes(0o755))
        self._set(path, "dir")
        first = self._rng.random() < 0.5
        if first:
            self._tar.file(marker)
        for child in children:
            if self._usable(child):
                self._emit_file(child)
        if not first or self._rng.random() < 0.3:
            self._tar.file(marker)

    def _flip(self) -> None:
        """File to directory or back, over a lower layer's or this layer's own."""
        names = sorted(self._tree)
        if not names:
            return
        path = self._rng.choice(names)
        if not self._usable(path):
            return
        if self._tree[path] == "dir":
            self._emit_file(path)
        else:
            self._tar.dir(self._prefix + path, **self._attributes(0o755))
            self._set(path, "dir")
            if self._rng.random() < 0.7:
                self._emit_file(path + b"/" + self._name())

    def _through_own_link(self) -> None:
        """An entry whose parent is a link of this same layer: resolved inside the layer by everybody."""
        name = b"l%d" % self._rng.randrange(1000)
        target = b"t%d" % self._rng.randrange(1000)
        if name in self._tree or target in self._tree:
            return
        self._tar.dir(self._prefix + target, **self._attributes(0o755))
        self._set(target, "dir")
        self._tar.symlink(self._prefix + name, self._rng.choice([target, b"/" + target]), mtime=7)
        self._set(name, "link")
        self._tar.file(self._prefix + name + b"/f", self._content(), **self._attributes(0o644))
        self._set(target + b"/f", "file")


def write_layout(directory: Path, layers: list[bytes]) -> None:
    """The stack as an OCI image layout with the tag `latest`, for other tools to read."""
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, media_type: str) -> dict[str, object]:
        digest = Digest.of(data)
        (blobs / digest.hex).write_bytes(data)
        return {"mediaType": media_type, "digest": str(digest), "size": len(data)}

    described = [put(layer, "application/vnd.oci.image.layer.v1.tar") for layer in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [str(Digest.of(layer)) for layer in layers]},
        "history": [{"created_by": "stack"} for _ in layers],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": described,
    }
    entry = put(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def describe(root: Path, untimed: set[bytes]) -> dict[bytes, tuple[object, ...]]:
    """Content, type, mode, owner, time, links and attributes of everything in a tree, by path."""
    base = os.fsencode(root)
    inodes: dict[int, bytes] = {}
    found: dict[bytes, tuple[object, ...]] = {}
    todo = [b""]
    while todo:
        path = todo.pop()
        full = base + b"/" + path if path else base
        info = os.lstat(full)
        kind = stat.S_IFMT(info.st_mode)
        content: object = None
        if kind == stat.S_IFLNK:
            content = os.readlink(full)
        elif kind == stat.S_IFREG:
            with open(full, "rb") as file:
                content = file.read()
        elif kind == stat.S_IFDIR:
            todo.extend(
                path + b"/" + name if path else name for name in sorted(os.listdir(full), reverse=True)
            )
        else:
            content = info.st_rdev
        # Names of one inode are one group, called after the first of them in order.
        same = inodes.setdefault(info.st_ino, path) if kind != stat.S_IFDIR else path
        time = None if path in untimed else info.st_mtime_ns
        xattrs = {
            name: os.getxattr(full, name, follow_symlinks=False)
            for name in os.listxattr(full, follow_symlinks=False)
        }
        found[path] = (
            kind,
            stat.S_IMODE(info.st_mode),
            info.st_uid,
            info.st_gid,
            time,
            content,
            same,
            xattrs,
        )
    return found
