"""Running credential programs (Docker helpers, kubelet providers): time-limited, capped, and never quoted.

What such a program prints may be a secret, so no message repeats it. Output goes to an unnamed file and not
through a pipe: a grandchild that keeps the pipe open could otherwise hold us beyond the time limit.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unlade.registry.errors import InvalidCredentials

# A credential document is a few KB.
MAX_OUTPUT: Final = 1 << 20


@dataclass(frozen=True, slots=True, repr=False)
class Ran:
    """How it ended and what it printed, cut at the cap."""

    status: int
    output: bytes


def run(
    command: Sequence[str], text: bytes, *, seconds: float, environment: Mapping[str, str] | None = None
) -> Ran:
    """Run with `text` on stdin; raises InvalidCredentials when it cannot be run or takes too long."""
    name = " ".join(command[:2])
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command,
                input=text,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                env=environment,
                check=False,
            )
        except FileNotFoundError:
            raise InvalidCredentials(
                f"{command[0]} is not installed", next_step="install it, or take it out of the configuration"
            ) from None
        except subprocess.TimeoutExpired:
            raise InvalidCredentials(
                f"{name}: took too long", next_step="run it by hand to see what it waits for"
            ) from None
        except OSError as error:
            raise InvalidCredentials(f"{name}: {error.strerror}", next_step="check the program") from None
        output.seek(0)
        return Ran(done.returncode, output.read(MAX_OUTPUT))
