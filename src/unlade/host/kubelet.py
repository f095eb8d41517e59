"""What the kubelet of this host was told: which image service it uses, and where it reads drop-ins.

Read from its command line and its files, in the kubelet's own order: the configuration file, then every
`*.conf` of the drop-in directory by path, then flags. Nothing is changed here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

ENDPOINT = "imageServiceEndpoint"
RUNTIME = "containerRuntimeEndpoint"


@dataclass(frozen=True)
class Endpoint:
    """The image service that a kubelet started now would use, and what says so."""

    address: str
    source: str

    @property
    def socket(self) -> str:
        """The path of a unix socket."""
        return self.address.removeprefix("unix://")


def command_line(pid: int) -> list[str]:
    """A process's command line; empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in raw.split(b"\0")[:-1]]


def flag(argv: Sequence[str], name: str) -> str:
    """The value of `--name=VALUE` or `--name VALUE`, the last one as the kubelet takes it; empty: not set."""
    found = ""
    for number, word in enumerate(argv):
        if word == f"--{name}" and number + 1 < len(argv):
            found = argv[number + 1]
        elif word.startswith(f"--{name}="):
            found = word.partition("=")[2]
    return found


def endpoint(argv: Sequence[str], *, without: str = "") -> Endpoint:
    """The image service by flags and files, as if the file `without` were not there.

    Files that cannot be read are passed over. An empty address is the kubelet's own default.
    """
    image = runtime = Endpoint("", "the kubelet's default")
    files = [Path(config)] if (config := flag(argv, "config")) else []
    if directory := flag(argv, "config-dir"):
        files += sorted(Path(directory).rglob("*.conf"))
    for path in files:
        if str(path) == without:
            continue
        told = _read(path)
        if address := told.get(RUNTIME):
            runtime = Endpoint(str(address), str(path))
        if address := told.get(ENDPOINT):
            image = Endpoint(str(address), str(path))
    if address := flag(argv, "container-runtime-endpoint"):
        runtime = Endpoint(address, "--container-runtime-endpoint")
    if address := flag(argv, "image-service-endpoint"):
        image = Endpoint(address, "--image-service-endpoint")
    return image if image.address else runtime


def _read(path: Path) -> dict[str, Any]:
    try:
        told = YAML(typ="safe").load(path.read_text())
    except (OSError, ValueError, YAMLError):
        return {}
    return told if isinstance(told, dict) else {}
