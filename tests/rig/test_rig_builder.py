"""The builder: pinned inputs decide the place, no finished build is repeated, mistakes say what to do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rig import engines
from rig.engines import ENGINES, EngineError

ROOT = Path(__file__).resolve().parents[2]


def test_every_engine_is_pinned_by_committed_files() -> None:
    for engine in ENGINES.values():
        pinned = (engine.directory / "go.mod").read_text()
        assert re.search(rf"{re.escape(engine.module)} v{re.escape(engine.version)}\b", pinned)
        assert f"{engine.module} v{engine.version} h1:" in (engine.directory / "go.sum").read_text()
        imports = set(re.findall(r'_ "(.+)"', (engine.directory / "tools.go").read_text()))
        assert imports == set(engine.commands.values())


def test_a_finished_build_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # not even a look at the toolchain
    assert [seconds for _, seconds in engines.build(["crane"])] == [None]


def test_the_place_depends_on_what_decides_the_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = ENGINES["crane"].output
    copy = tmp_path / "crane"
    copy.mkdir()
    for name in ("go.mod", "go.sum"):
        (copy / name).write_bytes((ENGINES["crane"].directory / name).read_bytes())
    monkeypatch.setattr(engines, "MODULES", tmp_path)
    assert ENGINES["crane"].output == before
    (copy / "go.sum").write_text("changed")
    assert ENGINES["crane"].output != before


def test_missing_engine_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNLADE_CACHE", str(tmp_path))
    with pytest.raises(EngineError, match="python -m rig build containerd"):
        engines.binary("ctr")
    with pytest.raises(EngineError, match="known commands"):
        engines.binary("dockerd")
    with pytest.raises(EngineError, match="unknown engine"):
        list(engines.build(["dockerd"]))


def test_old_or_missing_toolchain_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNLADE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"install Go 1\.26\.6 or newer"):
        list(engines.build(["crane"]))
    old = tmp_path / "go"
    old.write_text("#!/bin/sh\necho go version go1.19.8 linux/amd64\n")
    old.chmod(0o755)
    with pytest.raises(EngineError, match="too old"):
        list(engines.build(["crane"]))


def test_failed_build_leaves_nothing_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNLADE_CACHE", str(tmp_path / "cache"))
    fake = tmp_path / "go"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = version ] && echo go1.26.9 && exit\necho no such module >&2; exit 1\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(EngineError, match=r"libseccomp-dev(.|\n)*no such module"):
        list(engines.build(["runc"]))
    left = [path.name for path in (tmp_path / "cache" / "engines").iterdir()]
    assert left == [".runc.lock"]


def test_the_builder_needs_only_the_standard_library() -> None:
    # -S -E: no site-packages, no PYTHONPATH; what `make rig` does on a machine without the environment.
    which = [sys.executable, "-S", "-E", "-m", "rig", "which", "crane"]
    done = subprocess.run(which, cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == engines.binary("crane")


# What a command says of itself where it can; the CNI plugins and csi-sanity know no version.
ASKED = {
    **dict.fromkeys(
        ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"), "--version"
    ),
    **dict.fromkeys(("kubelet", "etcd", "containerd", "ctr", "runc", "registry"), "--version"),
    "containerd-shim-runc-v2": "-v",
    "crane": "version",
    "oras": "version",
}


@pytest.mark.parametrize("command", ASKED)
def test_commands_say_the_pinned_version(command: str) -> None:
    run = [str(engines.binary(command)), ASKED[command]]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert engines.version(command) in said
