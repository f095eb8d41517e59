"""The works: what is asked of each contender, as commands, and how the results are compared.

Every contender starts from nothing and leaves a directory. Peers that do not sync are followed by a sync
(`durable`); ours syncs itself before its directory becomes visible.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from bench.content import Shape, make_blob, make_bundle, push_image
from unlade.library import connect, push
from unlade.model import Reference


@dataclass(frozen=True)
class Tools:
    """Where the peers are; a missing one is left out and named in the report."""

    crane: str | None
    skopeo: str | None
    umoci: str | None
    unlade: str


@dataclass
class Contender:
    """One way to do a work: a shell command that leaves its result in `result` below its directory."""

    name: str
    command: str
    result: str = "out"
    syncs: bool = False


@dataclass
class Work:
    """Something to be done, by whom, and the ratio that is wanted of ours: peer's seconds by ours."""

    name: str
    contenders: list[Contender]
    targets: dict[str, float] = field(default_factory=dict)


def same_tree(one: Path, two: Path) -> bool:
    """Names, types, modes and content are equal."""
    if one.is_file():
        return two.is_file() and filecmp.cmp(one, two, shallow=False)
    return _listed(one) == _listed(two) and not any(
        path.is_file() and not path.is_symlink() and not filecmp.cmp(path, two / path.relative_to(one), False)
        for path in one.rglob("*")
    )


def _listed(root: Path) -> list[tuple[str, int, str]]:
    found = []
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        target = os.readlink(path) if path.is_symlink() else ""
        found.append((str(path.relative_to(root)), mode, target))
    return sorted(found)


def image(host: str, tools: Tools, *, quick: bool, layers: int, name: str) -> Work:
    """A gzip image of a software tree."""
    scale = 8 if quick else 1
    shape = Shape(layers, 48_000 // scale, (900 << 20) // scale, (1000 << 20) // scale)
    ref = f"{host}/bench/{name}:1"
    with connect(plain_http=[host]) as registry:
        push_image(registry, Reference.parse(ref), shape)
    contenders = [
        Contender("unlade", f"{tools.unlade} pull -q --plain-http --set-id --store st {ref} out", syncs=True)
    ]
    if tools.crane:
        contenders.append(
            Contender("crane+tar", f"mkdir out && {tools.crane} export --insecure {ref} - | tar -xf - -C out")
        )
    if tools.skopeo and tools.umoci:
        copy = f"{tools.skopeo} copy -q --src-tls-verify=false docker://{ref} oci:layout:1"
        unpack = f"{tools.umoci} unpack --image layout:1 bundle"
        contenders.append(Contender("skopeo+umoci", f"{copy} && {unpack}", result="bundle/rootfs"))
    return Work(name, contenders, {"crane+tar": 2.0, "skopeo+umoci": 2.5})


def blob(host: str, tools: Tools, home: Path, *, quick: bool) -> Work:
    """One large raw file."""
    size = (512 << 20) if quick else (4 << 30)
    source = home / "weights.bin"
    make_blob(source, size)
    pushed = push(source, f"{host}/bench/blob:1", plain_http=[host])
    source.unlink()
    digest = pushed.layers[0].digest
    url = f"http://{host}/v2/bench/blob/blobs/{digest}"
    ours = f"{tools.unlade} pull -q --plain-http {host}/bench/blob:1 out && mv out/weights.bin result"
    piped = f"curl -sSL {url} | tee result | sha256sum -b | grep -q {digest.hex}"
    after = f"curl -sSL -o result {url} && echo '{digest.hex}  result' | sha256sum -c --status"
    return Work(
        "raw blob",
        [
            Contender("unlade", ours, result="result", syncs=True),
            Contender("curl, then sha256", after, result="result"),
            Contender("curl | tee | sha256", piped, result="result"),
        ],
        {"curl, then sha256": 1.0, "curl | tee | sha256": 1.0},
    )


def bundle(host: str, tools: Tools, home: Path) -> Work:
    """2,000 small files, 8 MB."""
    source = home / "bundle"
    make_bundle(source, 2000, 8 << 20)
    push(source, f"{host}/bench/bundle:1", plain_http=[host])
    shutil.rmtree(source)
    contenders = [
        Contender("unlade", f"{tools.unlade} pull -q --plain-http {host}/bench/bundle:1 out", syncs=True)
    ]
    if tools.crane:
        export = f"{tools.crane} export --insecure {host}/bench/bundle:1 - | tar -xf - -C out"
        contenders.append(Contender("crane+tar", f"mkdir out && {export}"))
    return Work("2,000 small files", contenders, {"crane+tar": 1 / 1.5})
