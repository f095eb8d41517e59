"""Where the peers are, their versions, and what must be made before they can run.

oras-py is installed into an environment of its own in the cache, by the name and range that pyproject.toml's
group `bench` gives it: nothing of the product needs it. The shim that makes syncs do nothing, for the column
in which nobody syncs, is compiled when a compiler is there.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rig.engines import binary, cache, version

ROOT: Final = Path(__file__).resolve().parents[1]

_SHIM = """
int fsync(int fd) { (void)fd; return 0; }
int fdatasync(int fd) { (void)fd; return 0; }
int syncfs(int fd) { (void)fd; return 0; }
void sync(void) {}
int sync_file_range(int fd, long long offset, long long count, unsigned flags)
{ (void)fd; (void)offset; (void)count; (void)flags; return 0; }
"""


@dataclass(frozen=True)
class Tools:
    """Paths; a peer that is missing is None, left out, and named in the report."""

    unlade: str
    python: str
    crane: str
    containerd: str | None
    ctr: str | None
    skopeo: str | None
    umoci: str | None
    igzip: str | None
    oras: str | None
    shim: str | None

    def missing(self) -> list[str]:
        """Names of peers that are not here."""
        return [name for name in ("ctr", "skopeo", "umoci", "igzip", "oras") if getattr(self, name) is None]


def find(home: Path, *, oras: bool = True) -> Tools:
    """Look for everything; makes the environment of oras-py when it is asked for and missing."""
    return Tools(
        unlade=str(Path(sys.executable).with_name("unlade")),
        python=sys.executable,
        crane=str(binary("crane")),
        containerd=_built("containerd"),
        ctr=_built("ctr"),
        skopeo=shutil.which("skopeo"),
        umoci=shutil.which("umoci"),
        igzip=shutil.which("igzip"),
        oras=_oras() if oras else None,
        shim=_shim(home),
    )


def machine(tools: Tools) -> dict[str, Any]:
    """Date, machine and versions: what a figure means nothing without."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        memory = int(meminfo.readline().split()[1]) >> 20
    with open("/proc/loadavg", encoding="ascii") as load:
        busy = load.read().split()[0]
    commit = _said(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    kernel = platform.release().partition("-")[0]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": f"{len(_cpus())} cores ({_cpus()[0]}), {memory} GB, Linux {kernel}",
        "load": busy,
        "versions": {
            "python": platform.python_version(),
            "registry": version("registry"),
            "containerd": version("containerd"),
            "crane": version("crane"),
            "skopeo": _number(tools.skopeo),
            "umoci": _number(tools.umoci),
            "igzip": _number(tools.igzip),
            "curl": _number(shutil.which("curl")),
            "oras-py": _said([tools.oras, "-c", "import oras; print(oras.__version__)"])
            if tools.oras
            else "",
        },
        "missing": tools.missing(),
    }


def _cpus() -> list[str]:
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        return re.findall(r"model name\s*: (.*)", info.read()) or [platform.machine()]


def _built(name: str) -> str | None:
    path = binary(name)
    return str(path) if path.exists() else None


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _number(tool: str | None) -> str:
    if tool is None:
        return ""
    found = re.search(r"\d+\.\d+(\.\d+)?", _said([tool, "--version"]))
    return found[0] if found else ""


def _shim(home: Path) -> str | None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source, shim = home / "unsynced.c", home / "unsynced.so"
    source.write_text(_SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(source)], check=True)
    return str(shim)


def _oras() -> str | None:
    """oras-py's own interpreter; None when it cannot be installed here."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    place = cache() / "bench" / f"oras-py-{sys.version_info[0]}.{sys.version_info[1]}"
    python = place / "bin" / "python"
    if python.exists() and _said([str(python), "-c", "import oras; print(1)"]) == "1":
        return str(python)
    uv = shutil.which("uv")
    if uv is None:
        return None
    made = subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(place)], check=False)
    command = [uv, "pip", "install", "-q", "--compile-bytecode", "--python", str(python), *groups["bench"]]
    if made.returncode or subprocess.run(command, check=False).returncode:
        return None
    return str(python)
