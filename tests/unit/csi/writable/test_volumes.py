"""Writable volumes on a real kernel: shared below, their own above, bounded, grown, copied, given back."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.unit.csi.writable.scene import MIB, MODEL, Node, loops_of, mounts_below, node, put_model
from unlade.csi.attributes import InvalidAttribute
from unlade.csi.writable import (
    NoRoom,
    NoSuchSnapshot,
    NoSuchVolume,
    SizeOutOfRange,
    VolumeConflict,
    VolumeInUse,
    filesystem,
    images,
)
from unlade.errors import RegistryError
from unlade.kernel import mounts
from unlade.store.gc import garbage

pytestmark = pytest.mark.root


def fill(path: str, name: str) -> int:
    """Write until the volume is full; how many bytes fitted."""
    written = 0
    with open(f"{path}/{name}", "wb", buffering=0) as file:
        while True:
            try:
                written += file.write(b"f" * MIB)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return written


def test_content_below_own_writes_above_kept_over_remounts(here: Node) -> None:
    volume = here.writable.create("pvc-1", 64 * MIB, here.parameters)
    target = here.target("a")
    here.writable.publish(volume.id, target)
    for name, data in MODEL.items():
        assert Path(target, name).read_bytes() == data
    Path(target, "notes.txt").write_text("mine")
    with open(f"{target}/config.json", "ab") as config:
        config.write(b" changed")
    os.unlink(f"{target}/weights.bin")
    for _ in range(2):
        here.writable.unpublish(volume.id, target)
        assert not os.path.exists(target)
    here.writable.publish(volume.id, target)
    assert sorted(os.listdir(target)) == ["config.json", "notes.txt"]
    assert Path(target, "config.json").read_bytes().endswith(b" changed")
    here.writable.unpublish(volume.id, target)
    assert volume.digests[0].rpartition("@")[2].startswith("sha256:")


def test_mount_flags(here: Node) -> None:
    volume = here.writable.create("pvc-1", 16 * MIB, here.parameters)
    first, second = here.target("a"), here.target("b")
    here.writable.publish(volume.id, first, readonly=True, executable=False)
    here.writable.publish(volume.id, second)
    options = {entry.path: entry.options for entry in filesystem.published(here.writable.root / volume.id)}
    assert {"ro", "nosuid", "nodev", "noexec"} <= options[os.fsencode(first)]
    assert {"rw", "nosuid", "nodev"} <= options[os.fsencode(second)]
    assert "noexec" not in options[os.fsencode(second)]
    Path(second, "seen").write_text("by both")
    assert Path(first, "seen").read_text() == "by both"
    with pytest.raises(OSError, match="Read-only"):
        Path(first, "refused").write_text("")


def test_a_change_of_owner_copies_no_content(here: Node) -> None:
    volume = here.writable.create("pvc-1", 16 * MIB, here.parameters)
    target = here.target("a")
    here.writable.publish(volume.id, target)
    before = here.writable.stats(volume.id, target).used
    os.chown(f"{target}/weights.bin", 1000, 1000)
    os.chmod(f"{target}/weights.bin", 0o600)
    os.sync()
    assert here.writable.stats(volume.id, target).used - before < MIB, "metadata alone was copied up"
    assert Path(target, "weights.bin").read_bytes() == MODEL["weights.bin"]
    here.writable.unpublish(volume.id, target)
    here.writable.publish(volume.id, target)
    assert os.stat(f"{target}/weights.bin").st_uid == 1000
    assert Path(target, "weights.bin").read_bytes() == MODEL["weights.bin"]


def test_ten_volumes_share_the_content(here: Node, fake: FakeRegistry) -> None:
    put_model(fake, {"weights.bin": os.urandom(20 * MIB)})
    volumes = [here.writable.create(f"pvc-{n}", 64 * MIB, here.parameters) for n in range(10)]
    for number, volume in enumerate(volumes):
        here.writable.publish(volume.id, here.target(str(number)))
        Path(here.target(str(number)), "own").write_bytes(b"x" * 1000)
    os.sync()
    taken = sum(images.allocated(here.writable.root / volume.id) for volume in volumes)
    assert taken < 20 * MIB, "ten volumes' own files take less than the content once"
    assert here.writable.room().promised >= 10 * 64 * MIB - taken, "what they may still write is promised"


def test_full_for_its_own_pod_alone_and_deleting_gives_back(here: Node) -> None:
    one = here.writable.create("pvc-1", 32 * MIB, here.parameters)
    two = here.writable.create("pvc-2", 32 * MIB, here.parameters)
    targets = here.target("a"), here.target("b")
    here.writable.publish(one.id, targets[0])
    here.writable.publish(two.id, targets[1])
    fitted = fill(targets[0], "big")
    assert 20 * MIB < fitted <= 32 * MIB
    assert here.writable.stats(one.id, targets[0]).available < MIB
    Path(targets[1], "fine").write_bytes(b"x" * 5 * MIB)
    os.sync()
    grown = images.allocated(here.writable.root / one.id)
    os.unlink(f"{targets[0]}/big")
    os.sync()
    # ext4 discards after its journal's commit, in its own time.
    end = time.monotonic() + 30
    while images.allocated(here.writable.root / one.id) >= grown - 15 * MIB:
        assert time.monotonic() < end, "discard gives blocks back"
        time.sleep(0.05)
    for volume, target in zip((one, two), targets, strict=True):
        with pytest.raises(VolumeInUse):
            here.writable.delete(volume.id)
        here.writable.unpublish(volume.id, target)
        here.writable.delete(volume.id)
        here.writable.delete(volume.id)
    assert [name for name in os.listdir(here.writable.root) if name != "locks"] == []
    assert here.holder.held() == set()
    assert mounts_below(here.base) == []


def test_a_held_tree_is_not_collected_and_a_given_up_one_is(here: Node) -> None:
    volume = here.writable.create("pvc-1", 16 * MIB, here.parameters)
    here.collect()
    here.writable.publish(volume.id, here.target("a"))
    assert Path(here.target("a"), "config.json").read_bytes() == MODEL["config.json"]
    here.writable.unpublish(volume.id, here.target("a"))
    here.writable.delete(volume.id)
    here.collect()
    assert garbage(here.store) == []
    assert here.trees() == set()


def test_a_lost_tree_is_fetched_again_by_digest(here: Node, fake: FakeRegistry) -> None:
    volume = here.writable.create("pvc-1", 16 * MIB, here.parameters)
    here.writable.publish(volume.id, here.target("a"))
    Path(here.target("a"), "own").write_text("mine")
    here.writable.unpublish(volume.id, here.target("a"))
    here.holder.release(f"writable:{volume.id}")
    here.collect()
    assert here.trees() == set()
    put_model(fake, {"config.json": b"the tag has moved"})
    here.writable.publish(volume.id, here.target("a"))
    assert Path(here.target("a"), "config.json").read_bytes() == MODEL["config.json"]
    assert Path(here.target("a"), "own").read_text() == "mine"


def test_the_administrators_pull_policy_wins(tmp_path: Path, fake: FakeRegistry) -> None:
    with node(tmp_path, fake.host) as here:
        first = here.writable.create("pvc-1", 16 * MIB, here.parameters)
        put_model(fake, {"config.json": b"the tag has moved"})
        assert here.writable.create("pvc-2", 16 * MIB, here.parameters).digests == first.digests
    with node(tmp_path, fake.host, forced_pull="always") as here:
        assert here.writable.create("pvc-3", 16 * MIB, here.parameters).digests != first.digests


def test_create_is_idempotent_and_refuses_another_volume_of_the_name(here: Node, fake: FakeRegistry) -> None:
    first = here.writable.create("pvc-1", 16 * MIB, here.parameters)
    fake.clear_log()
    assert here.writable.create("pvc-1", 16 * MIB, here.parameters) == first
    assert fake.seen("GET", "/") == [], "a repeated call asks nobody"
    with pytest.raises(VolumeConflict):
        here.writable.create("pvc-1", 32 * MIB, here.parameters)
    with pytest.raises(VolumeConflict):
        here.writable.create("pvc-1", 16 * MIB, {**here.parameters, "unpack": "never"})
    with pytest.raises(SizeOutOfRange):
        here.writable.create("pvc-2", 64 * MIB, here.parameters, limit=32 * MIB)
    with pytest.raises(InvalidAttribute, match="subPath"):
        here.writable.create("pvc-2", 16 * MIB, {**here.parameters, "subPath": "x"})
    with pytest.raises(NoSuchVolume):
        here.writable.publish("w-" + "0" * 32, here.target("a"))
    assert not os.path.exists(here.target("a"))


def test_ids_that_are_none_get_near_no_path(here: Node) -> None:
    for strange in ("w-../../evil", "w-", "w-" + "A" * 32, "s-" + "0" * 31, "../x", "w-" + "0" * 33):
        with pytest.raises(NoSuchVolume):
            here.writable.publish(strange, here.target("a"))
        with pytest.raises(NoSuchVolume):
            here.writable.expand(strange, 1)
        with pytest.raises(NoSuchVolume):
            here.writable.snapshot("name", strange)
        with pytest.raises(NoSuchSnapshot):
            here.writable.create("name", 16 * MIB, {}, origin=strange)
        here.writable.unpublish(strange, here.target("a"))
        here.writable.delete(strange)
        here.writable.delete_snapshot(strange)
    assert os.listdir(here.writable.root) == ["locks"]
    assert {*os.listdir(here.base)} - {"locks"} == {"csi", "pods", "store"}


def test_many_creates_at_once_of_one_name_and_of_many(here: Node) -> None:
    made: list[str] = []
    threads = [
        threading.Thread(
            target=lambda n=n: made.append(here.writable.create(f"pvc-{n % 3}", 16 * MIB, here.parameters).id)
        )
        for n in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 9
    assert len(set(made)) == 3 == len(here.writable.volumes())


def test_a_failed_create_leaves_nothing(here: Node, fake: FakeRegistry) -> None:
    with pytest.raises(RegistryError):
        here.writable.create("pvc-1", 16 * MIB, {"reference": f"{fake.host}/models/missing:v1"})
    assert os.listdir(here.writable.root) == ["locks"]
    assert here.holder.held() == set()


def test_promises_are_kept(tmp_path: Path, fake: FakeRegistry) -> None:
    with node(tmp_path, fake.host) as here:
        available = here.writable.room().available
        half = available // 2 // MIB * MIB - 100 * MIB
        here.writable.create("pvc-1", half, here.parameters)
        with pytest.raises(NoRoom) as refusal:
            here.writable.create("pvc-2", available, here.parameters)
        assert "promised" in str(refusal.value)
        assert refusal.value.next_step
        left = here.writable.room().available
        assert left < available - half + 200 * MIB
        with pytest.raises(NoRoom):
            here.writable.expand(here.writable.volumes()[0].id, half + available)


def test_too_small_for_the_largest_file_is_warned_about(here: Node, fake: FakeRegistry) -> None:
    put_model(fake, {"weights.bin": b"w" * (20 * MIB)})
    small = here.writable.create("pvc-1", 16 * MIB, here.parameters)
    assert "ENOSPC" in small.warnings[0]
    assert here.writable.create("pvc-2", 64 * MIB, here.parameters).warnings == ()
    here.writable.publish(small.id, here.target("a"))
    with pytest.raises(OSError, match="No space"), open(f"{here.target('a')}/weights.bin", "ab") as file:
        file.write(b"x")
    Path(here.target("a"), "weights.bin").write_bytes(b"replaced whole, nothing is copied")


def test_growing_unmounted_and_mounted(here: Node) -> None:
    volume = here.writable.create("pvc-1", 32 * MIB, here.parameters)
    target = here.target("a")
    assert here.writable.expand(volume.id, 16 * MIB).size == 32 * MIB, "never smaller"
    grown = here.writable.expand(volume.id, 64 * MIB)
    assert (grown.size, grown.pending) == (64 * MIB, False)
    here.writable.publish(volume.id, target)
    Path(target, "own").write_text("kept")
    assert here.writable.stats(volume.id, target).total > 50 * MIB
    grown = here.writable.expand(volume.id, 128 * MIB)
    # Growing one in use takes CAP_SYS_RESOURCE, bit 24, which the machine may not give to its root.
    effective = next(
        int(line.split()[1], 16)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff")
    )
    assert grown.pending == (not effective >> 24 & 1)
    if not grown.pending:
        assert here.writable.stats(volume.id, target).total > 100 * MIB
    here.writable.unpublish(volume.id, target)
    here.writable.publish(volume.id, target)
    assert here.writable.stats(volume.id, target).total > 100 * MIB
    assert here.writable.expand(volume.id, 128 * MIB).pending is False
    assert Path(target, "own").read_text() == "kept"


def test_snapshots_and_clones_of_a_volume_in_use(here: Node) -> None:
    volume = here.writable.create("pvc-1", 32 * MIB, here.parameters)
    target = here.target("a")
    here.writable.publish(volume.id, target)
    Path(target, "own").write_bytes(b"1" * MIB)
    stop = threading.Event()
    writer = threading.Thread(target=scribble, args=(target, stop))
    writer.start()
    try:
        snapshot = here.writable.snapshot("snap-1", volume.id)
        clone = here.writable.create("pvc-2", 64 * MIB, {}, origin=volume.id)
    finally:
        stop.set()
        writer.join()
    Path(target, "own").write_bytes(b"2")
    restored = here.writable.create("pvc-3", 32 * MIB, {}, origin=snapshot.id)
    for number, copy in enumerate((clone, restored)):
        place = here.target(f"copy{number}")
        here.writable.publish(copy.id, place)
        assert Path(place, "own").read_bytes() == b"1" * MIB
        assert Path(place, "weights.bin").read_bytes() == MODEL["weights.bin"]
        assert copy.digests == volume.digests
        here.writable.unpublish(copy.id, place)
        checked = subprocess.run(
            ["/sbin/e2fsck", "-fn", here.writable.root / copy.id / "image"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stdout
    assert here.writable.snapshot("snap-1", volume.id) == snapshot
    with pytest.raises(VolumeConflict):
        here.writable.snapshot("snap-1", clone.id)
    with pytest.raises(SizeOutOfRange):
        here.writable.create("pvc-4", 16 * MIB, {}, origin=snapshot.id)
    here.writable.unpublish(volume.id, target)
    here.writable.delete(volume.id)
    here.writable.publish(restored.id, target)
    assert Path(target, "own").read_bytes() == b"1" * MIB, "a copy does not need what it was copied from"
    here.writable.delete_snapshot(snapshot.id)
    here.writable.delete_snapshot(snapshot.id)
    assert here.writable.snapshots() == []


def scribble(target: str, stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        Path(target, f"f{number % 50}").write_bytes(os.urandom(5000))
        number += 1


def test_a_simulated_reboot_loses_nothing(tmp_path: Path, fake: FakeRegistry) -> None:
    with node(tmp_path, fake.host) as here:
        volume = here.writable.create("pvc-1", 32 * MIB, here.parameters)
        target = here.target("a")
        here.writable.publish(volume.id, target)
        Path(target, "own").write_text("mine")
        os.sync()
    mounts.detach(target, lazy=True)
    os.rmdir(target)  # takes away the copies that other namespaces may have got meanwhile
    with node(tmp_path, "nowhere.invalid:1") as again:
        again.writable.recover()
        again.writable.publish(volume.id, target)
        assert Path(target, "own").read_text() == "mine"
        assert Path(target, "config.json").read_bytes() == MODEL["config.json"]
        again.writable.unpublish(volume.id, target)


def test_another_process_finds_what_is_mounted(tmp_path: Path, fake: FakeRegistry) -> None:
    with node(tmp_path, fake.host) as here:
        volume = here.writable.create("pvc-1", 32 * MIB, here.parameters)
        target = here.target("a")
        here.writable.publish(volume.id, target)
        with open(f"{target}/log", "w", buffering=1) as log:
            log.write("before\n")
            with node(tmp_path, fake.host) as again:
                again.writable.recover()
                again.writable.publish(volume.id, target)
                log.write("after\n")
                again.writable.publish(volume.id, here.target("b"))
                assert Path(here.target("b"), "log").read_text() == "before\nafter\n"
                again.writable.unpublish(volume.id, here.target("b"))
        here.writable.unpublish(volume.id, target)
        assert mounts_below(tmp_path) == []


def test_held_by_somebody_in_another_mount_namespace_it_is_refused(here: Node) -> None:
    volume = here.writable.create("pvc-1", 16 * MIB, here.parameters)
    target = here.target("a")
    here.writable.publish(volume.id, target)
    # As a container that shares no mounts back. Removing the target takes its mount away there too (the
    # kernel does that), but not the directory that a process stands in.
    script = f"cd {target}; echo up; read line"
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    other = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"up\n"
        here.writable.unpublish(volume.id, target)
        assert loops_of(here.base) != []
        with pytest.raises(VolumeInUse, match="cannot be seen"):
            here.writable.publish(volume.id, target)
        with pytest.raises(VolumeInUse):
            here.writable.delete(volume.id)
    finally:
        other.stdin.close()
        other.wait(10)
        other.stdout.close()
    here.writable.publish(volume.id, target)
    here.writable.unpublish(volume.id, target)


def test_namespaces_made_meanwhile_hold_nothing(here: Node) -> None:
    """A container that starts has copies of all mounts of the moment; they go with our mount points."""
    volume = here.writable.create("pvc-1", 16 * MIB, here.parameters)
    home, target = here.writable.root / volume.id, here.target("a")
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo up; read line"]
    others = []
    try:
        with filesystem.opened(home):
            others.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert others[-1].stdout is not None
            assert others[-1].stdout.readline() == b"up\n"
        filesystem.wait_free(home)
        here.writable.publish(volume.id, target)
        others.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert others[-1].stdout is not None
        assert others[-1].stdout.readline() == b"up\n"
        here.writable.unpublish(volume.id, target)
        filesystem.wait_free(home)
        here.writable.delete(volume.id)
    finally:
        for other in others:
            other.communicate(b"\n", 10)
