"""One fuzz target in this process: `python -m tests.fuzz.drive TARGET SECONDS SEED ENGINE [--grow]`.

Started by `tests.fuzz`. Memory is limited by the engine (atheris) or measured after every input (the loop);
an input that hangs is ended by an alarm whose handler keeps it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

MEMORY_MB: Final = 256
HANG_SECONDS: Final = 10
MAX_LENGTH: Final = 64 << 10
HERE: Final = Path(__file__).parent
KEPT: Final = HERE.parents[1] / "artifacts/fuzz"

# What parsers stumble over, for the loop; atheris finds its own.
_TOKENS: Final = [
    b"\0", b"\xff", b"\n", b"/", b"../", b"..", b"=", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"@",
    b"0", b"-1", b"9" * 20, b"18446744073709551616", b"\xff\xff\xff\xff", b"\x80" + bytes(11), b"ustar\x0000",
    b"path=", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"sha256:", b"null", b"true", b"\xf0\x9f\x92\xa5",
]  # fmt: skip


def main(target: str, seconds: float, seed: int, engine: str, *, grow: bool) -> int:
    """Fuzz one target; 0 when nothing was found."""
    atheris = _atheris() if engine != "loop" else None
    if atheris is None and engine == "atheris":
        sys.exit("atheris is not installed here")
    name = f"tests.fuzz.fuzz_{target}"
    if atheris is not None:
        with atheris.instrument_imports(include=["unlade"]):
            module = importlib.import_module(name)
    else:
        module = importlib.import_module(name)
    kept = HERE / "corpus" / target
    starts = [*module.CORPUS, *(path.read_bytes() for path in sorted(kept.glob("*")))]
    if atheris is not None:
        return _with_atheris(atheris, module, target, starts, seconds, seed, kept if grow else None)
    return _loop(module.one_input, target, starts, seconds, seed)


def _atheris() -> Any:
    try:
        return importlib.import_module("atheris")
    except ImportError:
        return None


def _with_atheris(
    atheris: Any,
    module: ModuleType,
    target: str,
    starts: Sequence[bytes],
    seconds: float,
    seed: int,
    grow: Path | None,
) -> int:
    KEPT.mkdir(parents=True, exist_ok=True)
    work = grow or Path(tempfile.mkdtemp(prefix="unlade-fuzz-"))
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as first:
        for number, data in enumerate(starts):
            Path(first, str(number)).write_bytes(data)
        arguments = [
            sys.argv[0], str(work), first, f"-max_total_time={max(1, round(seconds))}",
            f"-seed={seed % 2**32}", f"-rss_limit_mb={MEMORY_MB}", f"-timeout={HANG_SECONDS}",
            f"-max_len={MAX_LENGTH}", f"-artifact_prefix={KEPT}/{target}-",
            "-print_final_stats=1", "-verbosity=0",
        ]  # fmt: skip
        pid = os.fork()  # libFuzzer ends its process; ours has directories to remove
        if pid == 0:
            atheris.Setup(arguments, module.one_input)
            atheris.Fuzz()
            os._exit(0)
        _, status, used = os.wait4(pid, 0)
    if grow is None:
        for path in work.iterdir():
            path.unlink()
        work.rmdir()
    print(f"{target}: atheris, peak memory {used.ru_maxrss >> 10} MB")
    return int(os.waitstatus_to_exitcode(status) != 0)


def _loop(
    one_input: Callable[[bytes], object], target: str, starts: Sequence[bytes], seconds: float, seed: int
) -> int:
    chance = random.Random(seed)
    data = b""

    def keep(what: str) -> None:
        KEPT.mkdir(parents=True, exist_ok=True)
        path = KEPT / f"{target}-{what}-{hashlib.sha256(data).hexdigest()[:16]}"
        path.write_bytes(data)
        print(f"{target}: {what}: {path}", flush=True)

    def hang(*_: object) -> None:
        keep("hang")
        os._exit(1)

    signal.signal(signal.SIGALRM, hang)
    end = time.monotonic() + seconds
    runs = 0
    queue = list(starts)
    while queue or time.monotonic() < end:
        data = queue.pop() if queue else mutated(chance, starts)
        runs += 1
        signal.alarm(HANG_SECONDS)
        try:
            one_input(data)
        except BaseException:
            keep("crash")
            raise
        signal.alarm(0)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MEMORY_MB << 10:
            keep("memory")
            return 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{target}: {runs} inputs, peak memory {peak} MB")
    return 0


def mutated(chance: random.Random, starts: Sequence[bytes]) -> bytes:
    """A few random changes to a random start."""
    data = bytearray(chance.choice(starts) if starts else b"")
    for _ in range(chance.choice([1, 1, 2, 3, 5, 20])):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0 if data:
                data[at - 1] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[at - 1] = chance.randrange(256)
            case 2:
                data[at:at] = chance.choice(_TOKENS)
            case 3:
                del data[at : at + chance.choice([1, 4, 64, 512])]
            case 4:
                data[at:at] = data[chance.randrange(len(data) + 1) :][: chance.choice([8, 100, 512, 1024])]
            case 5:
                token = chance.choice(_TOKENS)
                data[at : at + len(token)] = token
            case _:
                other = chance.choice(starts) if starts else b""
                data[at:] = other[chance.randrange(len(other) + 1) :]
    return bytes(data[:MAX_LENGTH])


if __name__ == "__main__":
    sys.exit(
        main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4], grow="--grow" in sys.argv[5:])
    )
