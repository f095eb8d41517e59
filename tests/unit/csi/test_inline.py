"""Inline volumes over the driver's own socket: what pods see, and what is left when they are gone."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.fakes.driver import Driver
from tests.fakes.httpd import Request, Response
from tests.fakes.registry import FakeRegistry
from tests.unit.csi.conftest import Put, refused
from unlade.csi.pods import Pod
from unlade.csi.volumes import Rules
from unlade.model import Digest, Platform
from unlade.model.mediatypes import OCI_LAYER_GZIP
from unlade.mount import find, is_mount_point

pytestmark = pytest.mark.root
CODE = grpc.StatusCode


def test_a_volume_comes_and_goes(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/site", "v1", {"index.html": b"hello", "sub/page": b"page"})
    mounted = driver.publish("web", reference=str(fake.reference("team/site", "v1")))
    assert (mounted / "index.html").read_bytes() == b"hello"
    entry = find(os.fsencode(mounted))
    assert entry is not None
    assert {"ro", "nosuid", "nodev", "noexec"} <= entry.options
    with pytest.raises(OSError, match="Read-only"):
        (mounted / "new").write_bytes(b"")
    driver.publish("web", reference=str(fake.reference("team/site", "v1")))
    assert is_mount_point(str(mounted))
    assert len(driver.records()) == len(driver.leases()) == 1
    driver.unpublish("web")
    assert not mounted.exists()
    driver.unpublish("web")
    driver.nothing_left()


def test_what_is_mounted_is_not_collected_and_what_was_is(
    driver: Driver, fake: FakeRegistry, put: Put
) -> None:
    put("team/site", "v1", {"file": b"x" * 1000})
    mounted = driver.publish("web", reference=str(fake.reference("team/site", "v1")))
    assert driver.collect() == 0
    assert (mounted / "file").read_bytes() == b"x" * 1000
    driver.unpublish("web")
    assert driver.collect() == 1


@pytest.mark.parametrize("policy", ["Always", "IfNotPresent", "Never"])
def test_pull_policies_over_pods_and_restarts(
    driver: Driver, fake: FakeRegistry, put: Put, policy: str
) -> None:
    """V2: the tag moves; only `Always` sees it, and never a pod that runs."""
    name = str(fake.reference("team/model", "v1"))
    put("team/model", "v1", {"weights": b"one"})
    if policy == "Never":
        with pytest.raises(grpc.RpcError) as error:
            driver.publish("early", reference=name, pullPolicy=policy)
        refused(error, CODE.UNAVAILABLE, "never")
        driver.publish("other", reference=name, pullPolicy="IfNotPresent")
    first = driver.publish("first", reference=name, pullPolicy=policy)
    put("team/model", "v1", {"weights": b"two"})
    driver.publish("first", reference=name, pullPolicy=policy)
    assert (first / "weights").read_bytes() == b"one"
    second = driver.publish("second", reference=name, pullPolicy=policy)
    assert (second / "weights").read_bytes() == (b"two" if policy == "Always" else b"one")
    driver.restart()
    driver.publish("first", reference=name, pullPolicy=policy)
    assert (first / "weights").read_bytes() == b"one"
    driver.reboot()
    assert not is_mount_point(str(first))
    driver.publish("first", reference=name, pullPolicy=policy)
    assert (first / "weights").read_bytes() == b"one"


def test_the_node_may_force_a_policy(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    """V3 on clusters without mutating policies."""
    driver.restart(rules=Rules(forced_pull="always"))
    name = str(fake.reference("team/model", "v1"))
    put("team/model", "v1", {"weights": b"one"})
    driver.publish("first", reference=name, pullPolicy="Never")
    put("team/model", "v1", {"weights": b"two"})
    second = driver.publish("second", reference=name, pullPolicy="Never")
    assert (second / "weights").read_bytes() == b"two"


def test_a_cached_volume_asks_the_registry_nothing(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/one", "v1", {"one": b"1"})
    put("team/two", "v1", {"two": b"2"})
    one, two = (str(fake.reference(name, "v1")) for name in ("team/one", "team/two"))
    driver.publish("a", reference=one)
    driver.publish("a", volume="both", references=f"{one}, {two}")
    fake.clear_log()
    driver.publish("b", reference=one)
    merged = driver.publish("b", volume="both", references=f"{one}, {two}")
    assert sorted(os.listdir(merged)) == ["one", "two"]
    assert fake.requests == []


def test_references_are_merged_in_order(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/base", "v1", {"config": b"base", "base": b"1"})
    put("team/over", "v1", {"config": b"over", "over": b"2"})
    names = f"{fake.reference('team/base', 'v1')}\n{fake.reference('team/over', 'v1')}"
    mounted = driver.publish("web", references=names)
    assert {path.name: path.read_bytes() for path in mounted.iterdir()} == {
        "config": b"over",
        "base": b"1",
        "over": b"2",
    }


def test_who_supplied_a_part_of_a_merge_does_not_get_the_rest(
    driver: Driver, fake: FakeRegistry, put: Put
) -> None:
    """V5: one whose content was merged with private content names the private layers as its own."""
    private = put("team/private", "v1", {"secret": b"private content"})
    put("evil/site", "v1", {"page": b"harmless"})
    merged = f"{fake.reference('team/private', 'v1')} {fake.reference('evil/site', 'v1')}"
    mounted = driver.publish("ours", references=merged)
    assert sorted(os.listdir(mounted)) == ["page", "secret"]
    # The manifest, without the layers that it names.
    manifests = fake.repository("team/private").manifests
    fake.repository("evil/site").manifests[str(private.digest)] = manifests[str(private.digest)]
    stolen = f"{fake.reference('evil/site', private.digest)} {fake.reference('evil/site', 'v1')}"
    with pytest.raises(grpc.RpcError) as error:
        driver.publish("theirs", references=stolen)
    refused(error, CODE.NOT_FOUND, "evil/site")
    assert len(driver.records()) == 1


def test_sub_paths(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/site", "v1", {"a/b/file": b"deep", "top": b"t"})
    name = str(fake.reference("team/site", "v1"))
    directory = driver.publish("web", reference=name, subPath="a/b")
    assert os.listdir(directory) == ["file"]
    file = driver.publish("web", volume="file", reference=name, subPath="a/b/file")
    assert file.is_file()
    assert file.read_bytes() == b"deep"
    driver.unpublish("web", volume="file")
    assert not file.exists()
    with pytest.raises(grpc.RpcError) as error:
        driver.publish("web", volume="none", reference=name, subPath="a/none")
    refused(error, CODE.INVALID_ARGUMENT, "a/none", "next:")
    assert len(driver.records()) == len(driver.leases()) == 1
    for escape in ("../x", "/etc"):
        with pytest.raises(grpc.RpcError) as error:
            driver.publish("web", volume="out", reference=name, subPath=escape)
        refused(error, CODE.INVALID_ARGUMENT, "subPath")


def test_exec_unpack_platform_handler_and_referrer(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    driver.restart(rules=Rules(handlers={"vm": Platform("linux", "arm64")}))
    subject = put("team/app", "v1", {"run": b"#!/bin/sh\n"})
    put("team/app", None, {"sbom.json": b"{}"}, subject=subject)
    name = str(fake.reference("team/app", "v1"))
    entry = find(os.fsencode(driver.publish("a", reference=name, exec="true")))
    assert entry is not None
    assert "noexec" not in entry.options
    sbom = driver.publish("b", reference=name, referrer="application/vnd.example.content.v1")
    assert os.listdir(sbom) == ["sbom.json"]
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {
                **put("team/multi", None, {"arch": arch.encode()}).to_json(),
                "platform": {"os": "linux", "architecture": arch},
            }
            for arch in ("amd64", "arm64")
        ],
    }
    fake.put_manifest("team/multi", "v1", index)
    multi = str(fake.reference("team/multi", "v1"))
    for volume, attributes in {"p": {"platform": "linux/arm64"}, "h": {"handler": "vm"}}.items():
        arm = driver.publish("c", volume=volume, reference=multi, context=attributes)
        assert (arm / "arch").read_bytes() == b"arm64"
    driver.reboot()
    driver.publish("b", reference=name, referrer="application/vnd.example.content.v1")
    assert os.listdir(sbom) == ["sbom.json"]


def test_after_a_reboot_content_that_was_lost_is_fetched_by_digest(
    driver: Driver, fake: FakeRegistry, put: Put
) -> None:
    put("team/model", "v1", {"weights": b"one"})
    name = str(fake.reference("team/model", "v1"))
    mounted = driver.publish("pod", reference=name, pullPolicy="Always")
    put("team/model", "v1", {"weights": b"two"})
    assert driver.lose_content() == 1
    driver.reboot()
    assert driver.publish("pod", reference=name, pullPolicy="Always") == mounted
    assert (mounted / "weights").read_bytes() == b"one"


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({}, ["reference"]),
        ({"reference": "a.b/c", "references": "a.b/c"}, ["both"]),
        ({"reference": "a.b/c", "pullpolicy": "Always"}, ["pullpolicy", "pullPolicy"]),
        ({"reference": "a.b/c", "pullPolicy": "always"}, ["always", "IfNotPresent"]),
        ({"reference": "a.b/c", "exec": "yes"}, ["exec", "true"]),
        ({"reference": "a.b/c", "unpack": "maybe"}, ["unpack"]),
        ({"reference": "a.b/C"}, ["lower case"]),
        ({"reference": "a.b/c", "platform": "vax"}, ["vax"]),
    ],
)
def test_what_an_author_may_not_write(driver: Driver, attributes: dict[str, str], words: list[str]) -> None:
    with pytest.raises(grpc.RpcError) as error:
        driver.publish("web", context=attributes)
    refused(error, CODE.INVALID_ARGUMENT, *words)
    driver.nothing_left()


def test_a_published_volume_does_not_become_another(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/one", "v1", {"one": b"1"})
    put("team/two", "v1", {"two": b"2"})
    driver.publish("web", reference=str(fake.reference("team/one", "v1")))
    with pytest.raises(grpc.RpcError) as error:
        driver.publish("web", reference=str(fake.reference("team/two", "v1")))
    refused(error, CODE.ALREADY_EXISTS, "other attributes")


def test_errors_say_what_to_do(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    """V15: the kubelet copies the message into the pod's events."""
    with pytest.raises(grpc.RpcError) as error:
        driver.publish("web", reference=str(fake.reference("team/none", "v1")))
    refused(error, CODE.NOT_FOUND, "team/none", "next:")
    driver.nothing_left()


def test_selinux_and_other_mount_flags(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/site", "v1", {"a/file": b"x"})
    name = str(fake.reference("team/site", "v1"))
    with pytest.raises(grpc.RpcError) as error:
        driver.publish("web", reference=name, flags=("rw",))
    refused(error, CODE.INVALID_ARGUMENT, "rw")
    if not Path("/sys/fs/selinux").exists():
        # The kernel takes the label and, without SELinux, says that it knows no such option.
        with pytest.raises(grpc.RpcError) as error:
            driver.publish("web", reference=name, flags=('context="system_u:object_r:container_file_t:s0"',))
        refused(error, CODE.INTERNAL, "context")
        driver.nothing_left()


def test_fifty_pods_of_one_new_artifact_cost_one_download(
    driver: Driver, fake: FakeRegistry, put: Put
) -> None:
    put("team/model", "v1", {"weights": os.urandom(300_000)})
    name = str(fake.reference("team/model", "v1"))
    fake.fault(lambda request: time.sleep(0.2) if "/blobs/" in request.path else None)
    with ThreadPoolExecutor(50) as pods:
        list(pods.map(lambda number: driver.publish(f"pod{number}", reference=name), range(50)))
    assert len(driver.records()) == 50
    assert sum(request.sent for request in fake.seen("GET", "/blobs/")) < 310_000


def test_a_slow_fetch_outlives_the_call_and_says_how_far_it_is(
    driver: Driver, fake: FakeRegistry, put: Put
) -> None:
    put("team/model", "v1", {"weights": os.urandom(1000)})
    name = str(fake.reference("team/model", "v1"))
    go_on = threading.Event()

    def slow(request: Request) -> Response | None:
        if "/blobs/" in request.path:
            go_on.wait(20)
        return None

    fake.fault(slow)
    with pytest.raises(grpc.RpcError) as error:
        driver.publish("web", reference=name, timeout=1.0)
    refused(error, CODE.DEADLINE_EXCEEDED, "still fetching", name)
    go_on.set()
    mounted = driver.publish("web", reference=name)
    assert (mounted / "weights").stat().st_size == 1000
    assert len(fake.seen("GET", "/manifests/")) == 1


def test_unpublishing_ends_a_fetch(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/model", "v1", {"weights": os.urandom(1000)})
    name = str(fake.reference("team/model", "v1"))
    fake.fault(lambda request: time.sleep(1.0) if "/blobs/" in request.path else None)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(driver.publish, "web", reference=name)
        while not fake.seen("GET", "/blobs/"):
            time.sleep(0.01)
        driver.unpublish("web")
        with pytest.raises(grpc.RpcError) as error:
            publishing.result()
    assert error.value.code() in (CODE.DEADLINE_EXCEEDED, CODE.ABORTED)
    driver.nothing_left()


def test_no_set_id_bit_reaches_a_volume(driver: Driver, fake: FakeRegistry, tmp_path: Path) -> None:
    """V8: runtimes bind volumes again without nosuid, so the content itself must not have any."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, mode in (("su", 0o4755), ("sg", 0o2755), ("capable", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = mode, 1
            if name == "capable":
                entry.pax_headers = {
                    "SCHILY.xattr.security.capability": "\x01\0\0\x02\0\x04\0\0\0\0\0\0" + "\0" * 8
                }
            archive.addfile(entry, io.BytesIO(b"x"))
    data = out.getvalue()
    layers = [fake.put_blob("team/image", gzip.compress(data, mtime=0), OCI_LAYER_GZIP)]
    rootfs = {"type": "layers", "diff_ids": [str(Digest.of(data))]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    fake.put_image("team/image", "v1", layers, config)
    mounted = driver.publish("web", reference=str(fake.reference("team/image", "v1")), exec="true")
    assert {path.name: oct(path.stat().st_mode & 0o7777) for path in mounted.iterdir()} == {
        "su": "0o755",
        "sg": "0o755",
        "capable": "0o755",
    }
    assert os.listxattr(mounted / "capable") == []


def test_two_calls_for_one_volume_make_one_mount(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/model", "v1", {"weights": b"x"})
    name = str(fake.reference("team/model", "v1"))
    fake.fault(lambda request: time.sleep(0.3) if "/blobs/" in request.path else None)
    with ThreadPoolExecutor(4) as calls:
        (mounted,) = set(calls.map(lambda _: driver.publish("web", reference=name), range(4)))
    table = Path("/proc/self/mountinfo").read_bytes()
    assert table.count(b" " + os.fsencode(mounted) + b" ") == 1
    assert len(driver.records()) == len(driver.leases()) == 1


def test_a_mount_whose_record_was_lost_is_replaced(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/model", "v1", {"weights": b"one"})
    name = str(fake.reference("team/model", "v1"))
    driver.publish("web", reference=name, pullPolicy="Always")
    driver.stop()
    shutil.rmtree(driver.config.state / "csi")
    driver.start()
    assert driver.leases() == []
    put("team/model", "v1", {"weights": b"two"})
    mounted = driver.publish("web", reference=name, pullPolicy="Always")
    assert (mounted / "weights").read_bytes() == b"two"
    driver.unpublish("web")
    driver.nothing_left()


class Notes:
    """Events that were written."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str, bool]] = []

    def tell(self, pod: Pod, *, reason: str, message: str, warning: bool) -> None:
        self.told.append((str(pod), reason, message, warning))


def test_a_failure_between_two_calls_is_an_event_and_the_next_answer(
    tmp_path: Path, fake: FakeRegistry, put: Put
) -> None:
    notes = Notes()
    put("team/model", "v1", {"weights": os.urandom(1000)})
    name = str(fake.reference("team/model", "v1"))
    go_on = threading.Event()

    def slow(request: Request) -> Response | None:
        if "/blobs/" not in request.path:
            return None
        go_on.wait(20)
        return Response(404)

    fake.fault(slow)
    with Driver(tmp_path, fake, events=notes) as driver:
        with pytest.raises(grpc.RpcError, match="still fetching"):
            driver.publish("web", reference=name, timeout=1.0)
        assert notes.told == []
        go_on.set()
        while not notes.told:
            time.sleep(0.01)
        ((pod, reason, message, warning),) = notes.told
        assert (pod, reason, warning) == ("default/web", "FetchFailed", True)
        with pytest.raises(grpc.RpcError) as error:
            driver.publish("web", reference=name)
        assert error.value.details() == message
        assert len(notes.told) == 1, "what a call answers, the kubelet tells"


def test_stats_and_health(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/site", "v1", {"file": b"x" * 1000, "other": b"y"})
    name = str(fake.reference("team/site", "v1"))
    with pytest.raises(grpc.RpcError) as error:
        driver.stats("web")
    refused(error, CODE.NOT_FOUND)
    driver.publish("web", reference=name)
    answer = driver.stats("web")
    assert [(one.unit, one.total, one.used, one.available) for one in answer.usage] == [
        (1, 1001, 1001, 0),
        (2, 2, 2, 0),
    ]
    assert not answer.volume_condition.abnormal
    driver.lose_mounts()
    answer = driver.stats("web")
    assert answer.volume_condition.abnormal
    assert "delete the pod" in answer.volume_condition.message


def test_records_whose_pod_is_gone_are_dropped(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/site", "v1", {"file": b"x"})
    mounted = driver.publish("web", reference=str(fake.reference("team/site", "v1")))
    driver.lose_mounts()
    mounted.parent.rmdir()
    driver.restart()
    driver.nothing_left()


def test_a_broken_record_does_not_stop_the_driver(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/site", "v1", {"file": b"x"})
    name = str(fake.reference("team/site", "v1"))
    mounted = driver.publish("web", reference=name)
    (record,) = (driver.config.state / "csi" / "volumes").iterdir()
    record.write_bytes(b"{")
    driver.restart()
    assert [path.suffix for path in record.parent.iterdir()] == [".broken"]
    driver.unpublish("web")
    assert not mounted.exists()
    assert driver.leases() == []


def test_unpublish_lets_go_of_what_is_still_in_use(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/site", "v1", {"file": b"x" * 10})
    mounted = driver.publish("web", reference=str(fake.reference("team/site", "v1")))
    with open(mounted / "file", "rb") as held:
        driver.unpublish("web")
        driver.nothing_left()
        assert held.read() == b"x" * 10
