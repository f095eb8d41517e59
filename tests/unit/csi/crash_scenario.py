"""A short life of inline volumes that passes every durable step, to be killed at any of them.

Run as a program: BASE HOST [trace] [containerd=SOCKET,NAMESPACE]. It can be run again on what an earlier run
left, and ends well with one volume published. What its pod sees is said on stdout (`saw CONTENT`): from then
on it may not change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unlade.csi.contained import ContainerdHolder
from unlade.csi.credentials import NodeCredentials
from unlade.csi.holding import DirHolder, Holder
from unlade.csi.observed import Metrics
from unlade.csi.service import InContainerd
from unlade.csi.volumes import Inline, Publish
from unlade.delivery import Engine
from unlade.kernel import failpoints
from unlade.registry import Registry, RegistryConfig
from unlade.store import DirStore


@contextmanager
def held(base: Path, store: DirStore, contained: str = "") -> Iterator[Holder]:
    """Where content is kept: in the store, or in a containerd (`SOCKET,NAMESPACE`)."""
    if not contained:
        yield DirHolder(store)
        return
    with in_containerd(base, contained).connect() as containerd:
        yield ContainerdHolder(containerd, store, scope=str(base))


def in_containerd(base: Path, contained: str) -> InContainerd:
    address, _, namespace = contained.partition(",")
    return InContainerd(address=address, namespace=namespace, state=base / "locks")


@contextmanager
def volumes(base: Path, host: str, contained: str = "") -> Iterator[tuple[Inline, DirStore]]:
    """What a driver has on its node, without its sockets."""
    with (
        DirStore(base / "store") as store,
        held(base, store, contained) as holder,
        Registry(RegistryConfig(plain_http=frozenset({host}))) as registry,
        Engine(registry, store, trees=holder.trees, jobs=1) as engine,
    ):
        (base / "csi").mkdir(exist_ok=True)
        inline = Inline(
            engine,
            registry,
            holder,
            base / "csi",
            credentials=NodeCredentials(),
            metrics=Metrics(),
        )
        inline.recover()
        inline.tidy()
        holder.tidy()
        try:
            yield inline, store
        finally:
            inline.close()


def target_of(base: Path, pod: str) -> Path:
    """Where the kubelet wants a pod's volume; it makes the parent."""
    target = base / "pods" / pod / "mount"
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def publish(inline: Inline, base: Path, pod: str, **attributes: str) -> Path:
    target = target_of(base, pod)
    inline.publish(Publish(volume_id=f"csi-{pod}", target=str(target), attributes=attributes))
    return target


def live(inline: Inline, base: Path, host: str) -> None:
    """Pods come, are looked at, and go; the first stays."""
    model, other = f"{host}/team/model:v1", f"{host}/team/other:v1"
    first = publish(inline, base, "live", reference=model, pullPolicy="Always")
    say(f"saw {(first / 'weights').read_text()}")
    publish(inline, base, "live", reference=model, pullPolicy="Always")
    publish(inline, base, "merged", references=f"{model} {other}")
    publish(inline, base, "file", reference=other, subPath="file")
    for pod in ("merged", "file", "never-there"):
        inline.unpublish(f"csi-{pod}", str(target_of(base, pod)))
        target_of(base, pod).parent.rmdir()


def say(name: str) -> None:
    """Reaches the test even if we are killed at once."""
    print(name, flush=True)


def main() -> None:
    base, host, *options = sys.argv[1:]
    if "trace" in options:
        failpoints.reach = say
    contained = next((one.partition("=")[2] for one in options if one.startswith("containerd=")), "")
    with volumes(Path(base), host, contained) as (inline, _):
        live(inline, Path(base), host)


if __name__ == "__main__":
    main()
