"""The tools other people use, as one call each: crane, skopeo, umoci, and ours as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Peers:
    """Runs commands with an environment of their own; a failure shows what the command said."""

    crane_binary: Path
    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "DOCKER_CONFIG": str(self.home / ".docker"),
            "REGISTRY_AUTH_FILE": str(self.home / ".docker" / "config.json"),
            "UNLADE_STORE": str(self.home / "store"),
            **self.environment,
        }

    def run(
        self,
        *command: str | Path,
        stdin: bytes | None = None,
        expect: int = 0,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command; an exit code other than `expect` fails the test with its output."""
        done = subprocess.run(
            [str(part) for part in command],
            input=stdin,
            capture_output=True,
            check=False,
            cwd=cwd,
            env={**self.environment, **(env or {})},
        )
        if done.returncode != expect:
            said = (done.stdout[-2000:] + done.stderr[-4000:]).decode(errors="replace")
            shown = " ".join(str(part) for part in command)
            raise AssertionError(f"`{shown}` ended with {done.returncode}, not {expect}:\n{said}")
        return done

    def unlade(self, *arguments: str | Path, expect: int = 0, **options: Any) -> str:
        """Our own command, as a process; its stdout."""
        done = self.run(sys.executable, "-m", "unlade", *arguments, expect=expect, **options)
        return done.stdout.decode()

    def unlade_error(self, *arguments: str | Path, expect: int, **options: Any) -> str:
        """Our own command where it must fail; its stderr."""
        done = self.run(sys.executable, "-m", "unlade", *arguments, expect=expect, **options)
        return done.stderr.decode()

    def crane(self, *arguments: str | Path, **options: Any) -> bytes:
        """crane; its stdout."""
        return self.run(self.crane_binary, *arguments, **options).stdout

    def skopeo(self, *arguments: str | Path, **options: Any) -> bytes:
        """skopeo without a signature policy of the machine's; its stdout."""
        return self.run("skopeo", "--insecure-policy", *arguments, **options).stdout

    def umoci(self, *arguments: str | Path, **options: Any) -> bytes:
        """umoci; its stdout."""
        return self.run("umoci", *arguments, **options).stdout

    def manifest(self, reference: str, *flags: str) -> dict[str, Any]:
        """A manifest as crane reads it."""
        document: dict[str, Any] = json.loads(self.crane("manifest", *flags, reference))
        return document
