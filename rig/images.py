"""Container images made on this machine: pause, busybox, and a Python environment from Debian packages.

No image is ever pulled from outside. The layer of each image is a tar file in the cache, under a name that
holds a hash of what it is made from; a rig pushes it to its own registry. The Debian tree is made by
mmdebstrap from the machine's own apt sources, whatever mirror they name.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rig import RigError
from rig.engines import cache
from rig.machine import run

if TYPE_CHECKING:  # making a layer needs no HTTP client, so `python -m rig build` runs without one
    from rig.oci import Pushed, Registry

# The smallest init: waits for ever, ends on a signal, reaps what it inherits.
PAUSE_SOURCE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void stop(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) {
    signal(SIGTERM, stop);
    signal(SIGINT, stop);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
"""

# python3 and not -minimal: functions and agents import http, json, ssl and the like.
PYTHON_PACKAGES = ("python3", "ca-certificates")


@dataclass(frozen=True)
class Image:
    """An image of one layer: how to make its tar file, and what decides that file's content."""

    name: str
    make: Callable[[Path], None]
    inputs: Callable[[], bytes]
    config: dict[str, Any] = field(default_factory=dict)

    def layer(self) -> Path:
        """The layer's tar file in the cache, made when it is not there; put in place by a rename."""
        key = hashlib.sha256(self.inputs()).hexdigest()[:12]
        path = cache() / "images" / f"{self.name}-{key}.tar"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, staged = tempfile.mkstemp(prefix=f".{self.name}-", suffix=".tar", dir=path.parent)
            os.close(handle)
            try:
                self.make(Path(staged))
                os.rename(staged, path)
            finally:
                if os.path.exists(staged):
                    os.unlink(staged)
        return path

    def push(self, registry: Registry) -> Pushed:
        """Push the image as `<name>:1`."""
        return registry.push_image(self.name, [self.layer()], run=self.config)


def tar(members: dict[str, bytes | str], *, mode: int = 0o755) -> bytes:
    """A tar archive: bytes become files, a string a link to it, a name that ends in / a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name.rstrip("/"))
            entry.mode = mode
            if name.endswith("/"):
                entry.type = tarfile.DIRTYPE
                archive.addfile(entry)
            elif isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                archive.addfile(entry)
            else:
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _make_pause(target: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "pause")
        flags = ("-static", "-Os", "-s", "-x", "c", "-", "-o", str(program))
        run("gcc", *flags, stdin=PAUSE_SOURCE.encode())
        target.write_bytes(tar({"pause": program.read_bytes()}))


def _busybox() -> bytes:
    path = Path("/bin/busybox")
    if not path.exists():
        raise RigError("busybox is not installed; the Debian package is busybox-static")
    return path.read_bytes()


def _make_busybox(target: Path) -> None:
    applets = run("/bin/busybox", "--list").split()
    members: dict[str, bytes | str] = {"bin/": b"", "tmp/": b"", "etc/": b"", "bin/busybox": _busybox()}
    members |= {f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"}
    members["etc/passwd"] = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"
    target.write_bytes(tar(members))


def _apt_sources() -> list[Path]:
    """The machine's own apt source files that serve its release (vendors' need keys of their own)."""
    directory = Path("/etc/apt/sources.list.d")
    found = [Path("/etc/apt/sources.list")]
    if directory.is_dir():
        found += sorted(path for path in directory.iterdir() if path.suffix in (".list", ".sources"))
    return [path for path in found if path.is_file() and _suite() in path.read_text()]


def _suite() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip('"')
    raise RigError("/etc/os-release names no VERSION_CODENAME: the Python image needs a Debian machine")


def _python_inputs() -> bytes:
    sources = b"".join(path.read_bytes() for path in _apt_sources())
    return repr((PYTHON_PACKAGES, _suite(), sources)).encode()


def _make_python(target: Path) -> None:
    sources = [str(path) for path in _apt_sources()]
    if not sources:
        raise RigError("no apt sources under /etc/apt: the Python image is made from the machine's own")
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PYTHON_PACKAGES)}"]
    # Nothing in a container reads them, and they are a third of the tree.
    unread = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
    command += [f"--dpkgopt=path-exclude={path}" for path in unread]
    command += ["--customize-hook=rm -rf $1/var/lib/apt/lists/* $1/var/cache/apt/*", "--format=tar"]
    done = subprocess.run(
        [*command, _suite(), str(target), *sources], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RigError(f"mmdebstrap failed:\n{done.stderr[-3000:]}")


PAUSE = Image("pause", _make_pause, PAUSE_SOURCE.encode, {"Entrypoint": ["/pause"]})
BUSYBOX = Image("busybox", _make_busybox, _busybox, {"Cmd": ["/bin/sh"], "Env": ["PATH=/bin"]})
PYTHON = Image(
    "python", _make_python, _python_inputs, {"Cmd": ["/usr/bin/python3"], "Env": ["PATH=/usr/bin:/bin"]}
)

IMAGES = {image.name: image for image in (PAUSE, BUSYBOX, PYTHON)}
