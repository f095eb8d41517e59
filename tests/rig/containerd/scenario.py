"""The work that the fault tests interrupt: recover, pull, pull again after the tag moved, remove.

Run as a program with the addresses of containerd and of a registry. It prints each failpoint that it
reaches when told to trace, and ends with 0 when all of it was done. Whatever happened to an earlier run,
this one must succeed: that is the test.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unlade.containerd import Artifacts, Containerd, Handler, Handlers
from unlade.kernel import failpoints
from unlade.model import Platform
from unlade.registry import Registry, RegistryConfig

AMD64 = Platform("linux", "amd64")
HANDLERS = Handlers(
    "runc",
    {
        "runc": Handler("runc", AMD64),
        "second": Handler("second", AMD64),
        "plain": Handler("plain", AMD64, "native"),
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
    assert first and merged and other and native
    assert first.id == other.id == native.id != merged.id
    # `moving` leads elsewhere on each run: to what `one` is, then to what `merged` is.
    for tag in ("one", "merged"):
        point_tag(host, tag)
        moved = artifacts.pull(f"{name}:moving")
        assert moved and moved.id == (first if tag == "one" else merged).id
    assert artifacts.remove(first.id, handler="second")
    assert artifacts.remove(first.id, handler="plain")
    assert artifacts.remove(first.id)
    assert artifacts.remove(merged.id)


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


def main(address: str, namespace: str, state: str, host: str, *options: str) -> None:
    if "trace" in options:
        failpoints.reach = lambda name: print(name, flush=True)
    config = RegistryConfig(plain_http=frozenset({host}))
    with (
        Containerd(address, namespace=namespace, state=Path(state)) as containerd,
        Registry(config) as registry,
        Artifacts(containerd, registry, HANDLERS, jobs=1) as artifacts,
    ):
        if "recover" in options:
            artifacts.recover()
        else:
            work(artifacts, host)


if __name__ == "__main__":
    main(*sys.argv[1:])
