"""Random lives of many volumes at once, by several callers, while content moves and is collected.

Whoever publishes sees one of the contents that its tag has had, whole, and sees the same until it
unpublishes. In the end nothing is left. CI runs a short life, UNLADE_FULL=1 a long one.
"""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.driver import Driver
from tests.fakes.registry import FakeRegistry
from tests.unit.csi.conftest import Put
from unlade.store import collect
from unlade.tree import fsck

pytestmark = pytest.mark.root

STEPS = 400 if os.environ.get("UNLADE_FULL") else 40
CALLERS = 6
NAMES = ("one", "two", "three")


def files(name: str, version: int) -> dict[str, bytes]:
    return {"name": name.encode(), "version": str(version).encode(), "data": bytes([version % 256]) * 5000}


def read(mounted: Path) -> int:
    version = int((mounted / "version").read_text())
    assert (mounted / "data").read_bytes() == bytes([version % 256]) * 5000
    return version


def life(driver: Driver, fake: FakeRegistry, caller: int, stop: threading.Event) -> None:
    """One caller's pods: published, looked at again and again, published again, unpublished."""
    chance = random.Random(caller)
    seen: dict[str, tuple[str, int]] = {}
    try:
        for _ in range(STEPS):
            pod = f"pod-{caller}-{chance.randrange(4)}"
            name = seen[pod][0] if pod in seen else chance.choice(NAMES)
            policy = "Always" if pod.endswith("0") else "IfNotPresent"
            reference = str(fake.reference(name, "v1"))
            if pod in seen and chance.random() < 0.4:
                driver.unpublish(pod)
                del seen[pod]
                continue
            version = read(driver.publish(pod, reference=reference, context={"pullPolicy": policy}))
            if pod in seen:
                assert seen[pod] == (name, version), "what a pod sees never changes"
            seen[pod] = (name, version)
        for pod in seen:
            driver.unpublish(pod)
    finally:
        stop.set()


def test_lives(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    for name in NAMES:
        put(name, "v1", files(name, 0))
    ended = [threading.Event() for _ in range(CALLERS)]
    with ThreadPoolExecutor(CALLERS) as callers:
        running = [callers.submit(life, driver, fake, number, ended[number]) for number in range(CALLERS)]
        version = 0
        chance = random.Random(99)
        while not all(event.wait(0.02) for event in ended):
            version += 1
            name = chance.choice(NAMES)
            put(name, "v1", files(name, version))
            store = driver.service.store
            assert store is not None
            if chance.random() < 0.3:
                store.images.delete(str(fake.reference(name, "v1")))
            collect(store)
        for one in running:
            one.result()
    driver.nothing_left()
    driver.restart()
    driver.nothing_left()
    store = driver.service.store
    assert store is not None
    assert fsck(store) == []
    driver.collect()
    assert os.listdir(store.layout.trees) == []
