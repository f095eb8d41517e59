"""Many threads, one client, a registry that fails at random: everything arrives, nothing is mixed up.

The faults are those of a bad day: resets and cuts in the middle of bodies, 503, dropped connections, expired
tokens. A seed makes a failure repeatable; UNLADE_FULL runs more of them.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.httpd import Request, Response
from tests.fakes.registry import FakeRegistry
from tests.fakes.scene import FAST, REPO, Scene
from tests.fakes.tls import Authority
from unlade.model import Deadline, Descriptor, Digest
from unlade.registry import Registry
from unlade.transfer.fetch import Fetcher

FULL = bool(os.environ.get("UNLADE_FULL"))
SEEDS = range(10 if FULL else 2)
THREADS = 12


def bad_day(scene: Scene, seed: int) -> None:
    """Make every third answer of the registry go wrong, in one of several ways."""
    chance = random.Random(seed)
    lock = threading.Lock()

    def fail(request: Request, response: Response) -> Response | None:
        with lock:
            kind = chance.choice(["", "", "", "", "cut", "reset", "503", "drop"])
            if chance.random() < 0.05:
                kind = "expire"
            point = chance.randrange(1, 100_000)
        if kind == "expire":
            old = (
                time.monotonic() + 300 - 0.2
            )  # tokens live for 300 seconds: those older than a moment end now
            for token, grant in list(scene.tokens.grants.items()):
                if grant.expires < old:
                    scene.tokens.grants.pop(token, None)
        if response.status not in (200, 206) or kind in ("", "expire"):
            return None
        if kind in ("cut", "reset"):
            return replace(response, cut_after=point, reset=kind == "reset")
        return Response(503, {"Retry-After": "0"}) if kind == "503" else Response.drop()

    scene.registry.alter(fail)


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_arrives_on_a_bad_day(seed: int) -> None:
    with Scene() as scene:
        blobs = [scene.registry.put_blob(REPO, os.urandom(200_000 + n)) for n in range(THREADS * 4)]
        bad_day(scene, seed)
        client = scene.client(replace(scene.config(), attempts=12))
        fetcher = Fetcher(client)
        failures: list[BaseException] = []

        def pull(mine: list[Descriptor]) -> None:
            try:
                for blob in mine:
                    client.resolve(scene.ref, deadline=Deadline.after(60))
                    fetcher.read(scene.ref, blob, limit=1 << 20, deadline=Deadline.after(60))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=pull, args=(blobs[n::THREADS],)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        scene.assert_no_leak()


@pytest.fixture(params=["plain", "tls"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[FakeRegistry, Registry]]:
    authority = Authority(str(tmp_path))
    tls = authority.server_context("127.0.0.1") if request.param == "tls" else None
    with FakeRegistry(tls=tls) as registry:
        plain = frozenset({registry.host}) if tls is None else frozenset()
        with Registry(replace(FAST, plain_http=plain, ca_files=(authority.ca,))) as client:
            yield registry, client


@pytest.mark.parametrize("reset", [False, True])
def test_a_blob_is_continued_where_it_was_cut(
    server: tuple[FakeRegistry, Registry], tmp_path: Path, reset: bool
) -> None:
    """No byte that was handed out is asked for again, and in-order cuts lose nothing of what was sent."""
    registry, client = server
    size, cuts = (512 << 20 if FULL else 24 << 20), 20
    path = tmp_path / "blob"
    block = os.urandom(1 << 20)
    hasher = hashlib.sha256()
    with path.open("wb") as file:
        for n in range(size >> 20):
            piece = n.to_bytes(8, "big") + block[8:]
            file.write(piece)
            hasher.update(piece)
    blob = registry.put_blob_file(REPO, str(path), Digest("sha256", hasher.hexdigest()))
    chance = random.Random(7)
    registry.alter(
        lambda q, r: replace(r, cut_after=chance.randrange(300_000, size // (cuts + 4)), reset=reset),
        times=cuts,
    )
    got, delivered = 0, []
    check = hashlib.sha256()
    view = memoryview(bytearray(1 << 20))
    with Fetcher(client).open(registry.reference(REPO), blob, deadline=Deadline.after(120)) as source:
        while count := source.readinto(view):
            check.update(view[:count])
            got += count
            delivered.append(got)
    assert (got, check.digest()) == (size, hasher.digest())
    starts = [int(q.headers["Range"].removeprefix("bytes=").rstrip("-")) for q in registry.requests[1:]]
    assert len(starts) == cuts
    # Each continuation starts exactly at a position that the reader had reached.
    assert set(starts) <= set(delivered)
    assert starts == sorted(starts)
    if not reset:
        assert sum(request.sent for request in registry.requests) == size
