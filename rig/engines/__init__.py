"""Build the real engines the tests run against, once, into a cache outside the checkout.

Each engine has a Go module of its own beside this file (their dependency graphs disagree with one another):
`go.mod` and `go.sum` pin every byte, `tools.go` names the commands. A build never changes them: `go build
-mod=readonly` fails where they do not suffice. The result is a directory whose name holds a hash of all that
decides its content, put in place by one rename: a directory that exists is complete and is never built again,
and two builders at once do no harm to each other.

Only the standard library is used here: the builder runs before the project's environment exists.
Callers: `python -m rig build|which`, the rig's own start, the interoperability tests (through `binary`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rig import RigError

MODULES = Path(__file__).resolve().parent

# The oldest Go that builds every pinned engine; containerd 2.4.2 asks for it in its go.mod.
MINIMUM_GO = (1, 26, 6)


class EngineError(RigError):
    """An engine cannot be built or found; the message says what to run or install."""


@dataclass(frozen=True)
class Engine:
    """One pinned Go module and the commands built from it (binary name → import path)."""

    name: str
    module: str
    version: str
    commands: dict[str, str]
    tags: str = ""
    ldflags: str = "-s -w"
    cgo: bool = False
    # Debian packages beside Go itself, named in the error when the build fails.
    needs: tuple[str, ...] = field(default=())

    @property
    def directory(self) -> Path:
        """Where the committed go.mod, go.sum and tools.go are."""
        return MODULES / self.name

    def fingerprint(self) -> str:
        """A hash over all that decides the binaries: pinned modules, commands, flags."""
        sha = hashlib.sha256()
        for name in ("go.mod", "go.sum"):
            sha.update((self.directory / name).read_bytes())
        sha.update(repr((sorted(self.commands.items()), self.tags, self.ldflags, self.cgo)).encode())
        return sha.hexdigest()[:12]

    @property
    def output(self) -> Path:
        """The directory in the cache where the built binaries are or will be."""
        return cache() / "engines" / f"{self.name}-{self.version}-{self.fingerprint()}"

    @property
    def built(self) -> bool:
        """Whether the binaries are in the cache (the rename that put them there was the last step)."""
        return self.output.is_dir()


_KUBE_VERSION = "k8s.io/component-base/version"
_CONTAINERD = "github.com/containerd/containerd/v2"
_CNI = "github.com/containernetworking/plugins/plugins"

# In build order: small ones that other tests wait for come first, Kubernetes (most of the time) last.
ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "registry",
            "github.com/distribution/distribution/v3",
            "3.1.2",
            {"registry": "github.com/distribution/distribution/v3/cmd/registry"},
        ),
        Engine(
            "crane",
            "github.com/google/go-containerregistry",
            "0.22.1",
            {"crane": "github.com/google/go-containerregistry/cmd/crane"},
        ),
        # The newest that the checksum database vouches for; artifacts are what its users push.
        Engine("oras", "oras.land/oras", "1.2.0", {"oras": "oras.land/oras/cmd/oras"}),
        Engine(
            "containerd",
            _CONTAINERD,
            "2.4.2",
            {name: f"{_CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
            # The btrfs snapshotter needs C headers and nothing here uses it.
            tags="no_btrfs",
            # What `containerd --version` and the CRI Version call report.
            ldflags=f"-s -w -X {_CONTAINERD}/version.Version=v2.4.2",
        ),
        Engine(
            "runc",
            "github.com/opencontainers/runc",
            "1.5.2",
            {"runc": "github.com/opencontainers/runc"},
            # Without seccomp every pod fails: the default profile cannot be applied.
            tags="seccomp",
            ldflags="-s -w -X main.version=1.5.2",
            cgo=True,
            needs=("gcc", "pkg-config", "libseccomp-dev"),
        ),
        Engine(
            "cni",
            "github.com/containernetworking/plugins",
            "1.9.1",
            {
                "bridge": f"{_CNI}/main/bridge",
                "loopback": f"{_CNI}/main/loopback",
                "host-local": f"{_CNI}/ipam/host-local",
                "portmap": f"{_CNI}/meta/portmap",
            },
        ),
        Engine("etcd", "go.etcd.io/etcd/server/v3", "3.7.3", {"etcd": "go.etcd.io/etcd/server/v3"}),
        Engine(
            "csi-sanity",
            "github.com/kubernetes-csi/csi-test/v5",
            "5.6.0",
            {"csi-sanity": "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity"},
        ),
        Engine(
            "kubernetes",
            "k8s.io/kubernetes",
            "1.36.3",
            {
                name: f"k8s.io/kubernetes/cmd/{name}"
                for name in (
                    "kubectl",
                    "kube-scheduler",
                    "kube-proxy",
                    "kubelet",
                    "kube-controller-manager",
                    "kube-apiserver",
                )
            },
            # Built outside its own tree Kubernetes calls itself v0.0.0-master, and clients compare versions.
            ldflags=f"-s -w -X {_KUBE_VERSION}.gitVersion=v1.36.3 -X {_KUBE_VERSION}.gitMajor=1"
            f" -X {_KUBE_VERSION}.gitMinor=36",
        ),
    )
}


def cache() -> Path:
    """The cache directory: `UNLADE_CACHE`, else `~/.cache/unlade`."""
    named = os.environ.get("UNLADE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "unlade"


def binary(name: str) -> Path:
    """The path of a built command (`crane`, `kubelet`, …); EngineError tells how to build a missing one."""
    for engine in ENGINES.values():
        if name in engine.commands:
            if not engine.built:
                raise EngineError(f"{name} is not built yet: run `python -m rig build {engine.name}`")
            return engine.output / "bin" / name
    known = ", ".join(sorted(command for engine in ENGINES.values() for command in engine.commands))
    raise EngineError(f"no engine provides {name!r}; known commands: {known}")


def version(name: str) -> str:
    """The pinned version of the engine that provides a command."""
    for engine in ENGINES.values():
        if name in engine.commands:
            return engine.version
    raise EngineError(f"no engine provides {name!r}")


def module_source(module: str, engine: str) -> Path:
    """The source of a module at the version an engine is built with, from Go's module cache."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", module],
        cwd=ENGINES[engine].directory,
        env=_environment(ENGINES[engine]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise EngineError(f"{module} as {engine} uses it is not available: {done.stdout}{done.stderr}")
    return Path(json.loads(done.stdout)["Dir"])


def select(names: Iterable[str]) -> list[Engine]:
    """The engines named by engine or command, in build order; all of them when nothing is named."""
    wanted = set(names)
    chosen = [e for e in ENGINES.values() if not wanted or e.name in wanted or wanted & e.commands.keys()]
    unknown = wanted - {e.name for e in chosen} - {c for e in chosen for c in e.commands}
    if unknown:
        raise EngineError(f"unknown engine {', '.join(sorted(unknown))}; known: {', '.join(ENGINES)}")
    return chosen


def build(names: Iterable[str] = ()) -> Iterator[tuple[Engine, float | None]]:
    """Build what is named and missing; yields each engine and the seconds it took (None: it was there)."""
    for engine in select(names):
        if engine.built:
            yield engine, None
            continue
        _require_go()
        began = time.monotonic()
        with _lock(engine):
            if not engine.built:  # another builder may have finished while this one waited
                _build(engine)
        yield engine, time.monotonic() - began


def _build(engine: Engine) -> None:
    engine.output.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{engine.name}-", dir=engine.output.parent))
    try:
        (staged / "bin").mkdir()
        for name, package in engine.commands.items():
            flags = ["-mod=readonly", "-trimpath", "-buildvcs=false", "-tags", engine.tags]
            flags += ["-ldflags", engine.ldflags, "-o", str(staged / "bin" / name)]
            done = subprocess.run(
                ["go", "build", *flags, package],
                cwd=engine.directory,
                env=_environment(engine),
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                hint = f" (needs the Debian packages {', '.join(engine.needs)})" if engine.needs else ""
                raise EngineError(f"building {name} {engine.version} failed{hint}:\n{done.stderr[-4000:]}")
        staged.chmod(0o755)
        staged.rename(engine.output)
    finally:
        if staged.exists():
            shutil.rmtree(staged)


def _environment(engine: Engine) -> dict[str, str]:
    env = dict(os.environ)
    env["CGO_ENABLED"] = "1" if engine.cgo else "0"
    # A workspace file or a -mod flag of the user's would change what is built.
    env["GOWORK"] = "off"
    env["GOFLAGS"] = ""
    return env


@contextmanager
def _lock(engine: Engine) -> Iterator[None]:
    """One builder per engine at a time; the lock is the kernel's, so it goes with a killed builder."""
    directory = cache() / "engines"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f".{engine.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _require_go() -> None:
    need = ".".join(map(str, MINIMUM_GO))
    advice = f"install Go {need} or newer and put `go` on PATH"
    try:
        said = subprocess.run(["go", "version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EngineError(f"no usable Go toolchain ({error}); {advice}") from error
    found = re.search(r"go(\d+)\.(\d+)(?:\.(\d+))?", said)
    if not found or tuple(int(part or 0) for part in found.groups()) < MINIMUM_GO:
        raise EngineError(f"{said.strip()} is too old; {advice}")
