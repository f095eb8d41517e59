"""What a bundle holds, and what it refuses to be made of."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from unlade.host import bundle as bundles
from unlade.host import kubelet
from unlade.host.bundle import Bundle, collect, facts_of
from unlade.host.errors import HostError, NotBundled
from unlade.host.notify import VARIABLE, notify


def test_the_installation_and_what_it_needs() -> None:
    found = collect(["node"])
    assert {"unlade", "grpcio", "protobuf", "msgspec", "click", "typing-extensions"} <= set(
        found.distributions
    )
    assert not {"kubernetes", "pytest", "mypy", "cryptography"} & set(found.distributions)
    assert {"unlade/cli/root.py", "grpc/__init__.py", "google/protobuf/message.py"} <= set(found.files)
    assert f"unlade-{found.version}.dist-info/METADATA" in found.files
    assert not [
        name for name in found.files if name.endswith((".pyc", ".pth")) or name.startswith(("/", ".."))
    ]
    assert found.name == f"{found.version}-{found.digest[:12]}"


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.distribution

    def without(name: str) -> metadata.Distribution:
        if name == "grpcio":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "distribution", without)
    with pytest.raises(NotBundled, match="grpcio") as refused:
        collect(["node"])
    assert "unlade[node]" in refused.value.next_step


def small(tmp_path: Path) -> Bundle:
    (tmp_path / "cli").write_text("import sys\ndef main():\n    print(*sys.path, sep='\\n')\n")
    (tmp_path / "init").write_text("")
    files = {"unlade/__init__.py": tmp_path / "init", "unlade/cli.py": tmp_path / "cli"}
    return Bundle("1.0", bundles.this_python(), files, {"unlade": "1.0"})


def test_it_sees_its_own_packages_and_the_standard_library_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    small(tmp_path).write(target)
    link = tmp_path / "current"
    link.symlink_to(target)
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nonexistent"}
    done = subprocess.run(
        [link / "bin" / "unlade"], env=environment, capture_output=True, text=True, check=True
    )
    first, *others = done.stdout.splitlines()
    # By its real name: a process keeps its version when `current` moves on.
    assert first == str(target / "lib")
    assert others
    assert not [path for path in others if "packages" in path or str(tmp_path) in path]
    assert facts_of(target)["distributions"] == {"unlade": "1.0"}
    assert list(tmp_path.glob(".out*")) == []


def test_another_python_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    small(tmp_path).write(target)
    program = target / "bin" / "unlade"
    program.write_text(program.read_text().replace(str(sys.implementation.cache_tag), "cpython-399"))
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "was made for cpython-399" in done.stderr
    assert "next: " in done.stderr


def test_half_a_bundle_is_none(tmp_path: Path) -> None:
    broken = Bundle("1.0", "/python", {"unlade/cli.py": tmp_path / "missing"})
    with pytest.raises(FileNotFoundError):
        broken.write(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HostError, match="not a whole bundle"):
        facts_of(tmp_path)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    name = f"@unlade-test-{os.getpid()}"
    monkeypatch.setenv(VARIABLE, name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.settimeout(5)
        made.bind(name.replace("@", "\0"))
        yield made


def test_systemd_is_told(listener: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert notify("READY=1", "STATUS=serving")
    assert listener.recv(100) == b"READY=1\nSTATUS=serving"
    for address in ("", "relative", str(tmp_path / "nobody")):
        monkeypatch.setenv(VARIABLE, address)
        assert not notify("READY=1")


def test_what_the_kubelet_was_told(tmp_path: Path) -> None:
    """The kubelet's order: file, drop-ins by path, flags; the runtime's endpoint where no other is named."""
    config, drop_ins = tmp_path / "config.yaml", tmp_path / "conf.d"
    drop_ins.mkdir()
    config.write_text("containerRuntimeEndpoint: unix:///run/containerd.sock\n")
    argv = ["kubelet", "--config", str(config), f"--config-dir={drop_ins}"]
    assert kubelet.endpoint(argv).socket == "/run/containerd.sock"
    (drop_ins / "50-unlade.conf").write_text("imageServiceEndpoint: unix:///run/ours.sock\n")
    (drop_ins / "90-unreadable.conf").write_text("{")
    (drop_ins / "99-other.txt").write_text("imageServiceEndpoint: unix:///run/no.sock\n")
    found = kubelet.endpoint(argv)
    assert (found.socket, found.source) == ("/run/ours.sock", str(drop_ins / "50-unlade.conf"))
    assert kubelet.endpoint(argv, without=found.source).socket == "/run/containerd.sock"
    (drop_ins / "80-admin.conf").write_text('{"imageServiceEndpoint": "unix:///run/admin.sock"}')
    assert kubelet.endpoint(argv).socket == "/run/admin.sock"
    assert (
        kubelet.endpoint([*argv, "--image-service-endpoint=unix:///f"]).source == "--image-service-endpoint"
    )
    assert kubelet.endpoint(["kubelet"]).address == ""
    assert kubelet.command_line(os.getpid())[0]
    assert kubelet.command_line(2**30) == []
