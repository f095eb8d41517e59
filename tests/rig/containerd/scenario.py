"""The work that the fault tests interrupt: recover, pull, pull again after the tag moved, remove.

Ordinary images are put into containerd as its own CRI plugin would do it, which has one namespace only.

Run as a program with the addresses of containerd and of a registry. Each line on stdin is a run, in a child
of this process that need not import anything: `work`, `trace` (prints each failpoint that it reaches),
`recover`, or the failpoint at which to die. Its exit code ends what it prints. Whatever happened to an
earlier run, the next one must succeed: that is the test.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

from rig.images import tar
from unlade.containerd import (
    ArtifactImage,
    Artifacts,
    Containerd,
    ContainerdStore,
    Handler,
    Handlers,
    OrdinaryImage,
    OrdinaryImages,
    leases,
)
from unlade.containerd.images import ImageRecords
from unlade.kernel import failpoints
from unlade.model import Deadline, Descriptor, Digest, Platform, Reference
from unlade.model.mediatypes import OCI_CONFIG, OCI_LAYER, OCI_MANIFEST
from unlade.registry import Registry, RegistryConfig

AMD64, ARM64 = Platform("linux", "amd64"), Platform("linux", "arm64")
HANDLERS = Handlers(
    "runc",
    {
        "runc": Handler("runc", AMD64),
        "second": Handler("second", AMD64),
        "plain": Handler("plain", AMD64, "native"),
        "guest": Handler("guest", ARM64),
        "vm": Handler("vm", ARM64, "native"),
    },
)
REPO = "models/crash"


def work(artifacts: Artifacts, host: str) -> None:
    """Every durable step of pull and remove at least once."""
    artifacts.recover()
    name = f"{host}/{REPO}"
    first = artifacts.pull(f"{name}:one")
    merged = artifacts.pull(f"{name}:merged")
    other = artifacts.pull(f"{name}:one", handler="second")
    native = artifacts.pull(f"{name}:one", handler="plain")
    assert isinstance(first, ArtifactImage) and isinstance(merged, ArtifactImage)
    assert isinstance(other, ArtifactImage) and isinstance(native, ArtifactImage)
    assert first.id == other.id == native.id != merged.id
    # `moving` leads elsewhere on each run: to what `one` is, then to what `merged` is.
    for tag in ("one", "merged"):
        point_tag(host, tag)
        moved = artifacts.pull(f"{name}:moving")
        assert isinstance(moved, ArtifactImage) and moved.id == (first if tag == "one" else merged).id
    assert artifacts.remove(first.id, handler="second")
    assert artifacts.remove(first.id, handler="plain")
    assert artifacts.remove(first.id)
    assert artifacts.remove(merged.id)
    ordinary(artifacts.containerd)


def ordinary(containerd: Containerd) -> None:
    """An image of containerd's for a guest's two snapshotters; its tag moves; it goes handler by handler."""
    images = OrdinaryImages(containerd, "runc")
    made = [imported(containerd, number) for number in (1, 2)]
    never = Deadline.never()
    for image in made:
        for handler in ("guest", "vm"):
            images.record(str(image.config), replace(image, handler=HANDLERS.known[handler]), deadline=never)
    assert images.remove(str(made[1].config), "vm", ()) == []
    names = [f"r.example/{REPO}@{made[1].manifest}"]
    assert images.remove(str(made[1].config), "guest", names) == [*names, str(made[1].config)]
    for handler in ("guest", "vm"):
        images.remove(str(made[0].config), handler, [f"r.example/{REPO}@{made[0].manifest}"])
    assert images.recorded() == []


def imported(containerd: Containerd, number: int, *, lying: bool = False) -> OrdinaryImage:
    """What containerd has after its own pull of an image of two layers, by digest.

    The config of a lying one names another second layer than it has.
    """
    content = ContainerdStore(containerd)
    with leases.lease(containerd, "import") as lease:

        def put(media_type: str, data: bytes) -> Descriptor:
            described = Descriptor(media_type=media_type, digest=Digest.of(data), size=len(data))
            content.put(described, data, lease=lease)
            return described

        layers = [put(OCI_LAYER, tar({name: bytes([number])})) for name in ("a", "b")]
        diffs = [str(layer.digest) for layer in layers]
        if lying:
            diffs[1] = str(Digest.of(b"something else"))
        rootfs = {"type": "layers", "diff_ids": diffs}
        facts = {"architecture": "arm64", "os": "linux", "rootfs": rootfs}
        config = put(OCI_CONFIG, json.dumps(facts).encode())
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": config.to_json(),
            "layers": [layer.to_json() for layer in layers],
        }
        manifest = put(OCI_MANIFEST, json.dumps(document).encode())
        for name in (f"r.example/{REPO}@{manifest.digest}", str(config.digest)):
            ImageRecords(containerd).put(name, manifest, {})
    wanted = Reference.parse(f"r.example/{REPO}:ordinary")
    return OrdinaryImage(wanted, HANDLERS.known["guest"], manifest.digest, config.digest)


def point_tag(host: str, tag: str) -> None:
    """Move the tag `moving` in the registry."""
    import http.client

    connection = http.client.HTTPConnection(host, timeout=10)
    connection.request("GET", f"/v2/{REPO}/manifests/{tag}", headers={"Accept": "*/*"})
    answer = connection.getresponse()
    raw, kind = answer.read(), answer.headers["Content-Type"]
    connection.request("PUT", f"/v2/{REPO}/manifests/moving", body=raw, headers={"Content-Type": kind})
    assert connection.getresponse().read() is not None
    connection.close()


def run(address: str, namespace: str, state: str, host: str, what: str) -> None:
    """One run, in a process of its own."""
    if what == "trace":
        failpoints.reach = lambda name: print(name, flush=True)
    elif what not in ("work", "recover"):
        os.environ[failpoints.VARIABLE] = what
        importlib.reload(failpoints)  # it looks when it is imported
    config = RegistryConfig(plain_http=frozenset({host}))
    with (
        Containerd(address, namespace=namespace, state=Path(state)) as containerd,
        Registry(config) as registry,
        Artifacts(containerd, registry, HANDLERS, jobs=1) as artifacts,
    ):
        if what == "recover":
            artifacts.recover()
        else:
            work(artifacts, host)


def main(address: str, namespace: str, state: str, host: str) -> None:
    """One run after another, until stdin ends."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(address, namespace, state, host, line.strip())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
