"""`python -m bench.costs`: what one pull costs the registry, the node and the API server; docs/costs.json.

These are the constants of docs/scale.md and of the simulation. Requests, bytes and tokens are counted by a
registry with token authentication that keeps every request (tests.fakes); CPU, memory, descriptors and disk
are measured on real pulls from the distribution registry; watches and writes are counted by an API server
that keeps every request. Counts are exact and the same on every machine; times are this machine's.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from bench import content, measure, table, tools, works
from bench.registry import serving
from rig.engines import cache
from tests.fakes.kube_api import FakeKubeApi, wait_for
from tests.fakes.registry import FakeRegistry
from tests.fakes.scene import Scene
from unlade.delivery import AsTree, Engine, Request
from unlade.model.mediatypes import ANNOTATION_TITLE, OCI_LAYER_GZIP
from unlade.registry import Registry
from unlade.store import DirStore

OUT: Final = tools.ROOT / "docs" / "costs.json"
PODS: Final = 100


def main() -> None:
    """Measure everything and write the file."""
    place = cache() / "bench"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="costs-", dir=place) as scratch:
        home = Path(scratch)
        found = tools.find(home, oras=False)
        document = {
            "machine": tools.machine(found),
            "registry": registry_costs(home),
            "node": node_costs(found, home),
            "api": api_costs(home),
        }
    OUT.write_text(json.dumps(document, indent=1) + "\n")
    for mark, text in tables(document).items():
        table.put(OUT.with_name("scale.md"), mark, text)
    print(json.dumps(document, indent=1))


def tables(document: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/scale.md, by their marks."""
    asked = [
        "| pull of | case | requests | manifests | blobs | tokens |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    names = {
        "model": "a model, one file",
        "package": "a package, one archive",
        "image": "an image, 12 layers",
    }
    for name, cases in document["registry"].items():
        asked += [
            f"| {names[name]} | {case} | {one['requests']} | {one.get('GET manifests', 0)} |"
            f" {one.get('GET blobs', 0)} | {one['tokens']} |"
            for case, one in cases.items()
        ]
    machine = document["machine"]
    node = [
        "| pull of | CPU s per GB unpacked | bytes written per byte | peak memory | open descriptors |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, words in (("raw", "a raw blob"), ("image", "a gzip image of 3 layers")):
        one = document["node"][name]
        node.append(
            f"| {words}, {one['GB']:.2f} GB | {one['cpu s/GB']:.2f} | {one['written/GB']:.2f} |"
            f" {one['peak MB']:.0f} MB | {one['descriptors']} |"
        )
    packages = document["node"]["packages"]
    node += [
        "",
        "A package of three small files, in one process that keeps its engine:"
        f" {packages['cpu s each'] * 1000:.1f} ms of CPU, {packages['per second']:.0f} a second one by one.",
        "",
        f"{machine['date']}, commit {machine['commit']}, {machine['machine']}, load {machine['load']}.",
    ]
    volumes = document["api"]["ephemeral volumes"]
    api = [
        "| face | watches | lists at the start | writes per pod |",
        "| --- | --- | --- | --- |",
        "| `unlade node serve`, image volumes | 0 | 0 | 0 |",
        f"| `unlade controller`, ephemeral volumes, {volumes['pods']} pods | {volumes['watches']} |"
        f" {volumes['lists']} | {volumes['writes per pod']:g} (the claim) |",
    ]
    return {"costs": "\n".join(asked), "node": "\n".join(node), "api": "\n".join(api)}


def registry_costs(home: Path) -> dict[str, Any]:
    """Requests by kind, tokens, and bytes beside the content, for a model, a package and an image."""
    found: dict[str, Any] = {}
    with Scene() as scene, scene.client() as client:
        fake = scene.registry
        weights = fake.put_blob("model", os.urandom(1 << 20), "application/x", {ANNOTATION_TITLE: "weights"})
        fake.put_artifact("model", "v1", [weights], "application/vnd.example.model")
        fake.put_artifact(
            "package", "v1", [_layer(fake, "package", {"a.yaml": b"a: 1\n"})], "application/vnd.example.pkg"
        )
        layers = [_layer(fake, "image", {f"f{number}": os.urandom(1000)}) for number in range(12)]
        diffs = [_diff(fake, one.digest) for one in layers]
        config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diffs}}
        fake.put_image("image", "v1", layers, json.dumps(config).encode())
        for name in ("model", "package", "image"):
            found[name] = _counted(scene, client, name, home / name)
    return found


def _counted(scene: Scene, client: Registry, name: str, place: Path) -> dict[str, Any]:
    fake = scene.registry
    reference = fake.reference(name, "v1")
    found: dict[str, Any] = {}
    with DirStore(place) as store, Engine(client, store) as engine:
        for case, policy in (("cold", "always"), ("again, always", "always"), ("again, missing", "missing")):
            fake.clear_log()
            tokens = len(scene.tokens.grants)
            engine.deliver(Request(references=(reference,), destination=AsTree(), pull=policy))  # type: ignore[arg-type]
            kinds = Counter(_kind(one.method, one.path) for one in fake.seen())
            found[case] = {
                "requests": sum(kinds.values()),
                **dict(sorted(kinds.items())),
                "bytes": sum(one.sent for one in fake.seen()),
                "tokens": len(scene.tokens.grants) - tokens,
            }
    return found


def _kind(method: str, path: str) -> str:
    for part in ("manifests", "blobs", "referrers"):
        if f"/{part}/" in path:
            return f"{method} {part}"
    return f"{method} /v2/"


def _layer(fake: FakeRegistry, name: str, files: dict[str, bytes]) -> Any:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return fake.put_blob(name, gzip.compress(out.getvalue(), mtime=0), OCI_LAYER_GZIP)


def _diff(fake: FakeRegistry, digest: Any) -> str:
    from unlade.model import Digest

    data = fake.repositories["image"].blobs[str(digest)]
    assert isinstance(data, bytes)
    return str(Digest.of(gzip.decompress(data)))


def node_costs(found: tools.Tools, home: Path) -> dict[str, Any]:
    """CPU seconds and bytes written per GB of content, peak memory, descriptors; packages a second."""
    with serving(content.storage(), home / "registry") as registry:
        setting = works.Setting(registry, found, home, True)
        blob = 512 << 20
        raw, _ = content.blob(registry.host, "blob-512", blob)
        name, shape = setting.software(3)
        image = content.image(registry.host, name, shape)
        tiny = content.tiny(registry.host, 100)
        result = {
            "raw": _pull(found, home, raw, blob),
            "image": _pull(found, home, image, shape.text_bytes + shape.binary_bytes),
        }
        place = home / "many"
        place.mkdir()
        prefix = tiny[0].rpartition(":")[0]
        command = f"{found.python} -m bench.library many {registry.host} {prefix} 100 1"
        cost = measure.run(command, place, sync=False)
        result["packages"] = {
            "per second": round(100 / cost.seconds, 1),
            "cpu s each": round(cost.cpu / 100, 4),
        }
    return result


def _pull(found: tools.Tools, home: Path, reference: str, size: int) -> dict[str, float]:
    place = home / "pull"
    place.mkdir()
    with _descriptors() as most:
        cost = measure.run(f"{found.unlade} pull -q --plain-http {reference} out", place, sync=False)
    on_disk = sum(
        os.lstat(os.path.join(top, name)).st_size
        for top, _, names in os.walk(place / "out")
        for name in names
    )
    subprocess.run(["rm", "-rf", str(place)], check=True)
    return {
        "GB": round(on_disk / 1e9, 3),
        "cpu s/GB": round(cost.cpu / (on_disk / 1e9), 2),
        "written/GB": round(cost.written / on_disk, 3),
        "seconds": round(cost.seconds, 2),
        "peak MB": round(cost.peak / 2**20, 1),
        "descriptors": max(most),
        "asked for bytes": size,
    }


@contextmanager
def _descriptors() -> Iterator[list[int]]:
    """The most descriptors that all processes of a running `unlade` had open together, looked at often."""
    most = [0]
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.02):
            total = 0
            for name in os.listdir("/proc"):
                with suppress(OSError):
                    if name.isdigit() and _below(int(name), os.getpid()):
                        total += len(os.listdir(f"/proc/{name}/fd"))
            most.append(total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


def _below(pid: int, ancestor: int) -> bool:
    """Whether a process was started below us and is the command or a worker of it."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read().split(b"\0")
    if b"serve" in command or b"-S" in command or command[0] == b"bash":
        return False
    while pid not in (0, 1, ancestor):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return pid == ancestor


def api_costs(home: Path) -> dict[str, Any]:
    """What the ephemeral-volume controller asks of the API server for a hundred pods with a volume each."""
    from unlade.controllers.manager import Manager, Options

    with FakeKubeApi() as api:
        kubeconfig = home / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": {"server": api.url}}],
                    "users": [{"name": "u", "user": {"token": "secret"}}],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        options = Options(
            controllers=("ephemeral-volumes",), kubeconfig=str(kubeconfig), listen="127.0.0.1:0"
        )
        manager = Manager(options, user_agent="costs")
        stop = threading.Event()
        thread = threading.Thread(target=manager.run, args=(stop,), daemon=True)
        thread.start()
        wait_for(lambda: not manager.unready())
        try:
            for number in range(PODS):
                api.put("pods", _pod(number))
            wait_for(lambda: len(api.all("persistentvolumeclaims")) == PODS, seconds=60)
            seen = list(api.requests)
        finally:
            stop.set()
            thread.join(20)
    writes = Counter(
        f"{one.verb} {one.path.rpartition('/namespaces/')[2].split('/')[1]}"
        for one in seen
        if one.verb != "GET"
    )
    return {
        "ephemeral volumes": {
            "pods": PODS,
            "watches": sum(one.watch for one in seen),
            "lists": sum(one.verb == "GET" and not one.watch and "/leases" not in one.path for one in seen),
            "writes": dict(sorted(writes.items())),
            "writes per pod": round(writes["POST persistentvolumeclaims"] / PODS, 2),
        },
        "node service": {"watches": 0, "writes per pod": 0},
    }


def _pod(number: int) -> dict[str, Any]:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    return {
        "metadata": {"name": f"pod-{number}", "namespace": "default", "uid": f"uid-{number}"},
        "spec": {"volumes": [{"name": "data", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}]},
    }


if __name__ == "__main__":
    main()
