"""A node with a directory store on a small disk: it never fills, and nothing that is mounted is lost (V6)."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.fakes.driver import Driver
from tests.fakes.registry import FakeRegistry
from unlade.model.mediatypes import ANNOTATION_TITLE
from unlade.tree import fsck

pytestmark = pytest.mark.root

MIB = 1 << 20
SIZE = 3 * MIB
# Together many times what the disk holds.
PODS = 150 if os.environ.get("UNLADE_FULL") else 40


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """An ext4 of 64 MiB; a short path, because sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="disk-") as short:
        image, where = Path(short, "image"), Path(short, "mnt")
        with image.open("wb") as file:
            file.truncate(64 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        where.mkdir()
        subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)
        yield where
        subprocess.run(["umount", "-l", str(where)], check=True)


def put(registry: FakeRegistry, number: int) -> str:
    data = random.Random(number).randbytes(SIZE)
    blob = registry.put_blob(f"team/{number}", data, "application/octet-stream", {ANNOTATION_TITLE: "f"})
    registry.put_artifact(f"team/{number}", "v1", [blob], "application/vnd.example.content.v1")
    return str(registry.reference(f"team/{number}", "v1"))


def used(disk: Path) -> float:
    now = os.statvfs(disk)
    return 100.0 * (now.f_blocks - now.f_bfree) / now.f_blocks


def whole(target: Path, number: int) -> bool:
    return (target / "f").read_bytes() == random.Random(number).randbytes(SIZE)


def test_pods_come_and_go(small_disk: Path) -> None:
    with FakeRegistry() as registry, Driver(small_disk, registry, gc_high=70.0, gc_low=50.0) as driver:
        stay = {
            number: driver.publish(f"stays-{number}", reference=put(registry, number)) for number in (1, 2)
        }
        worst = 0.0
        for number in range(100, 100 + PODS):
            target = driver.publish(f"pod-{number}", reference=put(registry, number))
            assert whole(target, number)
            worst = max(worst, used(small_disk))
            driver.unpublish(f"pod-{number}")
        assert 50 < worst < 80
        assert all(whole(target, number) for number, target in stay.items())
        # What was used last is still here.
        assert driver.service.store is not None
        assert driver.service.store.images.get(str(registry.reference(f"team/{99 + PODS}", "v1")))
        assert fsck(driver.service.store) == []


def test_a_disk_full_of_what_is_mounted_refuses_the_next(small_disk: Path) -> None:
    with FakeRegistry() as registry, Driver(small_disk, registry, gc_high=70.0, gc_low=50.0) as driver:
        mounted: dict[int, Path] = {}
        with pytest.raises(grpc.RpcError) as caught:
            for number in range(40):
                mounted[number] = driver.publish(f"pod-{number}", reference=put(registry, number))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "next: end pods" in caught.value.details()
        assert len(mounted) > 10
        assert used(small_disk) < 96
        assert all(whole(target, number) for number, target in mounted.items())
        # One goes, and there is room for another.
        gone = len(mounted) // 2
        driver.unpublish(f"pod-{gone}")
        del mounted[gone]
        assert whole(driver.publish("another", reference=put(registry, 99)), 99)
        assert all(whole(target, number) for number, target in mounted.items())
