"""The pulls of a node for whoever may see them: a socket that answers with one JSON document (V18).

Names of pods and references are not for everybody on a node, so it is a unix socket that root alone may
connect to, and not a page of the metrics' port. Whoever connects gets the whole state and is hung up on;
there is nothing to say to it. `unlade top` asks again and again. Importing this needs no gRPC.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from unlade.errors import UnladeError

if TYPE_CHECKING:
    from unlade.cri.pulls import State

# Beside the locks, in the state directory.
SOCKET: Final = "pulls.sock"
_MODE: Final = 0o600
# A client that does not read must not keep the others from it.
_SECONDS: Final = 5.0
_CHUNK: Final = 1 << 16


class Unseen(UnladeError):
    """There is no service to ask, or it does not answer."""

    code = "no-service"
    retryable = True


class ShownPod(msgspec.Struct, frozen=True):
    """A pod, as the kubelet names it."""

    namespace: str
    name: str
    uid: str


class ShownPull(msgspec.Struct, frozen=True, rename="camel"):
    """One pull at one moment; None where nobody knows."""

    number: int
    reference: str
    handler: str
    pod: ShownPod | None
    phase: str
    seconds: float
    done_bytes: int | None
    total_bytes: int | None
    bytes_per_second: float | None
    seconds_left: float | None


class Shown(msgspec.Struct, frozen=True):
    """All pulls of a service, the oldest first."""

    version: str
    pid: int
    pulls: tuple[ShownPull, ...]


_SHOWN = msgspec.json.Decoder(Shown)
_ENCODER = msgspec.json.Encoder()


def shown(states: Iterable[State], version: str) -> Shown:
    """States as they are told."""
    return Shown(
        version,
        os.getpid(),
        tuple(
            ShownPull(
                state.number,
                state.reference,
                state.handler,
                ShownPod(state.pod.namespace, state.pod.name, state.pod.uid) if state.pod else None,
                state.phase,
                round(state.seconds, 3),
                state.done,
                state.total,
                state.rate,
                state.seconds_left,
            )
            for state in states
        ),
    )


class Watch:
    """Answers on a socket until closed."""

    def __init__(self, directory: Path, look: Callable[[], Shown]) -> None:
        """Listens at once; raises OSError when it cannot."""
        self._look = look
        self._path = directory / SOCKET
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = directory / f".pulls.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(fresh))
        fresh.chmod(_MODE)
        self._listener.listen()
        # By rename, so that an older service's socket is replaced and never missing.
        fresh.rename(self._path)
        self._thread = threading.Thread(target=self._serve, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering. The socket stays for who comes next."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SECONDS)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, suppress(OSError):
                client.settimeout(_SECONDS)
                client.sendall(_ENCODER.encode(self._look()))


def ask(path: Path, seconds: float = _SECONDS) -> Shown:
    """What a service tells now; raises Unseen."""
    parts = []
    try:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(seconds)
            asking.connect(str(path))
            while part := asking.recv(_CHUNK):
                parts.append(part)
        return _SHOWN.decode(b"".join(parts))
    except FileNotFoundError as error:
        raise Unseen(
            f"no image service runs here: there is no {path}",
            next_step="start it (`unlade node status`), or name its --state directory",
        ) from error
    except PermissionError as error:
        raise Unseen(f"{path} is root's alone", next_step="use sudo") from error
    except (OSError, msgspec.DecodeError) as error:
        raise Unseen(f"{path} does not answer: {error}", next_step="`unlade node status`") from error
