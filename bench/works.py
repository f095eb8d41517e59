"""The works: what is asked of each contender, what ours must reach, and how it is run.

Two kinds. A `Race` is done by ours and by peers, interleaved; its targets are ratios of a peer's median time
to ours. A `Probe` is done by ours alone; its figures have bounds of their own. The number of rounds stands
beside each figure.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench import contenders, content, measure
from bench.contenders import OURS, Contender
from bench.registry import Serving, serving
from bench.tools import Tools
from bench.trees import fingerprint
from unlade.library import connect
from unlade.model import Deadline, Descriptor, Manifest, Reference, decode_manifest

# 48,000 files, 1.9 GB unpacked, 720 MB as gzip.
SOFTWARE: Final = content.Shape(3, 48_000, 900 << 20, 1000 << 20)


@dataclass
class Setting:
    """What a work is made from: the registry, the tools, a directory of its own, and how large it is."""

    registry: Serving
    tools: Tools
    home: Path
    quick: bool

    @property
    def host(self) -> str:
        """host:port of the registry."""
        return self.registry.host

    def software(self, layers: int, *, by: int = 1) -> tuple[str, content.Shape]:
        """Name and shape of the software tree in so many layers; an eighth of it when quick."""
        by *= 8 if self.quick else 1
        shape = content.Shape(layers, SOFTWARE.files, SOFTWARE.text_bytes, SOFTWARE.binary_bytes)
        return f"image-{layers}" + (f"-by-{by}" if by > 1 else ""), shape.divided(by)


@dataclass(frozen=True)
class Target:
    """The ratio wanted at least: the fastest of these peers' median by that of `ours`; None: only told."""

    peers: tuple[str, ...]
    ratio: float | None
    ours: str = OURS


@dataclass
class Race:
    """A work for several contenders, the first of them ours."""

    name: str
    contenders: list[Contender]
    targets: list[Target] = field(default_factory=list)
    note: str = ""
    rounds: int = 7  # say something about a median

    def run(
        self, home: Path, rounds: int, least: int = 3, budget: float = float("inf")
    ) -> dict[str, list[measure.Cost]]:
        """Interleave the contenders (ABBA); compare what they made with ours after each round.

        Ends after so many rounds, or when another one would not fit into the budget of seconds, but not
        before `least`. Contenders of the column in which nobody syncs take part in the first `least` only.
        """
        costs: dict[str, list[measure.Cost]] = defaultdict(list)
        began = time.monotonic()
        measure.spread(home)
        for number in range(rounds):
            order = [one for one in self.contenders if one.durable or number < least]
            if number % 2:
                order.reverse()
            made: dict[tuple[bool, str], str] = {}
            for turn, contender in enumerate(order):
                place = home / f"run-{number}-{turn}"
                place.mkdir()
                try:
                    cost, digest = contender.run(place)
                    costs[contender.name].append(cost)
                    made[contender.metadata, contender.name] = digest
                    if contender.name == OURS and not all(one.metadata for one in self.contenders):
                        made[False, OURS] = fingerprint(place / contender.result, metadata=False)
                finally:
                    contenders.clear(place)
            for (metadata, name), digest in made.items():
                if digest != made[metadata, OURS]:
                    raise measure.Failed(f"{self.name}: {name} and {OURS} made different trees")
            spent = time.monotonic() - began
            if number + 1 >= least and spent * (number + 2) / (number + 1) > budget:
                break
        return costs


@dataclass
class Probe:
    """A work for ours alone: figures with bounds. `measure` gives name → value, `bounds` the most allowed."""

    name: str
    figures: Callable[[Path], dict[str, float]]
    bounds: dict[str, float]
    unit: str = "ms"
    rounds: int = 3
    note: str = ""


Work = Race | Probe


def layers_of(host: str, reference: str) -> list[Descriptor]:
    """An image's layers."""
    wanted = Reference.parse(reference)
    with connect(plain_http=[host]) as registry:
        manifest = decode_manifest(registry.resolve(wanted, deadline=Deadline.never()).raw)
    assert isinstance(manifest, Manifest)
    return list(manifest.layers)


def image(setting: Setting, layers: int, targets: list[Target], *, few: bool = False, by: int = 1) -> Race:
    """A gzip image of a software tree."""
    tools, host = setting.tools, setting.host
    name, shape = setting.software(layers, by=by)
    reference = content.image(host, name, shape)
    ours = [contenders.pull(tools, reference, options="--set-id"), contenders.mount(tools, reference)]
    field_ = [*ours, *contenders.ctr(tools, reference), *contenders.unsynced(tools, ours)]
    if not few:
        field_ += [contenders.crane_tar(tools, reference), *contenders.skopeo_umoci(tools, reference)]
        digests = [str(layer.digest) for layer in layers_of(host, reference)]
        field_ += contenders.bare(tools, host, name, digests)
    return Race(f"image of {layers} layers", field_, targets)


def image_3(setting: Setting) -> Race:
    """The image in a few large layers, by everybody."""
    return image(
        setting,
        3,
        [
            Target(("ctr",), 2.0, "unlade mount"),
            Target(("ctr, parallel",), 2.0, "unlade mount"),
            Target(("crane+tar",), 2.0),
            Target(("skopeo+umoci",), 2.5),
            Target(("curl|igzip|tar",), 1.0),
        ],
    )


def image_12(setting: Setting) -> Race:
    """The same content in twelve layers, against containerd."""
    targets = [Target(("ctr",), 2.5, "unlade mount"), Target(("ctr, parallel",), 2.5, "unlade mount")]
    return image(setting, 12, targets, few=True)


def raw(setting: Setting) -> Race:
    """One large file that does not compress."""
    size = (512 << 20) if setting.quick else (4 << 30)
    return _raw(setting, size, oras=True)


def _raw(setting: Setting, size: int, *, oras: bool) -> Race:
    tools, host = setting.tools, setting.host
    name = f"blob-{size >> 20}"
    reference, digest = content.blob(host, name, size)
    url = f"http://{host}/v2/bench/{name}/blobs/{digest}"
    piped = f"mkdir out && curl -sSfL {url} | tee out/weights.bin | sha256sum -b | grep -q {digest.hex}"
    after = (
        f"mkdir out && curl -sSfL -o out/weights.bin {url}"
        f" && echo '{digest.hex}  out/weights.bin' | sha256sum -c --status"
    )
    # Times and modes are not in the manifest: only names and bytes can be equal.
    ours = Contender(OURS, f"{tools.unlade} pull -q --plain-http {reference} out", syncs=True, metadata=False)
    field_ = [
        ours,
        Contender("curl, then sha256", after, metadata=False),
        Contender("curl|tee|sha256", piped, metadata=False),
        *contenders.unsynced(tools, [ours]),
    ]
    for one in field_:
        one.metadata = False
    if oras:
        field_ += contenders.oras_py(tools, reference)
    return Race("raw blob", field_, [Target(("curl, then sha256", "curl|tee|sha256"), 1.0)])


def bundle(setting: Setting) -> Race:
    """2,000 small files, 8 MB: the library, the command, crane and oras-py."""
    tools, host = setting.tools, setting.host
    reference = content.bundle(host, 2000, 8 << 20)
    library = Contender(
        "unlade library", f"{tools.python} -m bench.library deliver {host} {reference}", syncs=True
    )
    command = Contender(OURS, f"{tools.unlade} pull -q --plain-http {reference} out", syncs=True)
    field_ = [
        command,
        library,
        contenders.crane_tar(tools, reference),
        *contenders.oras_py(tools, reference, packed=True),
        *contenders.unsynced(tools, [command, library]),
    ]
    targets = [Target(("crane+tar",), 1.5, "unlade library"), Target(("crane+tar",), round(1 / 1.5, 2))]
    # Tenths of a second: what else the machine does in them needs more rounds to even out.
    return Race("2,000 small files", field_, targets, rounds=21)


def tiny(setting: Setting) -> Race:
    """1,000 tiny packages: one process of ours, crane and tar in a loop."""
    tools, host = setting.tools, setting.host
    count = 100 if setting.quick else 1000
    prefix = content.tiny(host, count)[0].rpartition(":")[0]
    loop = (
        f"for n in $(seq 0 {count - 1}); do mkdir -p out/$n &&"
        f" {tools.crane} export --insecure {prefix}:$n - | tar -xf - -C out/$n || exit 1; done"
    )
    program = f"{tools.python} -m bench.library many {host} {prefix} {count}"
    ours = [
        Contender(OURS, f"{program} 1", syncs=True),
        Contender("unlade, 8 at once", f"{program} 8", syncs=True),
    ]
    field_ = [*ours, Contender("crane+tar, looped", loop), *contenders.unsynced(tools, ours[:1])]
    targets = [Target(("crane+tar, looped",), 4.0, "unlade, 8 at once")]
    return Race(f"{count:,} tiny packages", field_, targets)


def push(setting: Setting) -> Race:
    """The software tree as an image: packed, compressed, sent; each time to an empty registry."""
    tools = setting.tools
    name, shape = setting.software(3, by=4)
    tree = setting.home / "tree"
    reference = content.image(setting.host, name, shape)
    if not tree.exists():
        measure.run(f"{tools.unlade} pull -q --plain-http {reference} tree", setting.home, sync=False)
    # Ours packs neither owners nor times; GNU tar is told to do the same, so that nobody packs more.
    reduced = "--sort=name --owner=0 --group=0 --numeric-owner --mtime=@0"
    quoted = shlex.quote(str(tree))
    send = f"{tools.unlade} push -q --plain-http --image {quoted} $TO"
    field_: list[Contender] = [Pusher(OURS, send, syncs=True, setting=setting)]
    tar = f"tar {reduced} -C {quoted} -cf layer.tar ."
    append = f"{tools.crane} append --insecure --oci-empty-base -f layer.tar -t $TO"
    field_.append(Pusher("tar+crane", f"{tar} && {append} 2>/dev/null", syncs=True, setting=setting))
    if tools.umoci and tools.skopeo:
        make = f"{tools.umoci} init --layout l && {tools.umoci} new --image l:1"
        insert = f"{tools.umoci} insert --image l:1 {quoted}/opt /opt"
        send = f"{tools.skopeo} copy -q --dest-tls-verify=false oci:l:1 docker://$TO"
        field_.append(Pusher("umoci+skopeo", f"{make} && {insert} && {send}", syncs=True, setting=setting))
    return Race("push", field_, [Target(("tar+crane", "umoci+skopeo"), 1.5)])


@dataclass
class Pusher(Contender):
    """Sends to a registry of its own that is empty; the look pulls it back, and keeps the compressed size."""

    setting: Setting | None = None
    sizes: list[int] = field(default_factory=list)

    def run(self, place: Path) -> tuple[measure.Cost, str]:
        """As Contender's; nobody syncs, because what is made is in the registry."""
        assert self.setting is not None
        with serving(place / "storage", place / "registry") as registry:
            reference = f"{registry.host}/bench/pushed:1"
            cost = measure.run(self.command, place, sync=False, environment={"TO": reference})
            self.sizes.append(sum(layer.size for layer in layers_of(registry.host, reference)))
            pull = f"{self.setting.tools.unlade} pull -q --plain-http {reference} back"
            measure.run(pull, place, sync=False)
            return cost, fingerprint(place / "back", metadata=False)


def mounted(setting: Setting) -> Probe:
    """Second delivery of a present tree, mounted."""
    name, shape = setting.software(12)
    reference = content.image(setting.host, name, shape)

    def figures(place: Path) -> dict[str, float]:
        found = _told(setting, place, "mounted", setting.host, reference, "500")
        return {"p50": found["p50"] * 1000, "p99": found["p99"] * 1000, "worst": found["worst"] * 1000}

    return Probe("second delivery, mounted", figures, {"p50": 2.0, "p99": 20.0})


def update(setting: Setting) -> Probe:
    """An image of which one of ten layers changed."""
    name, shape = setting.software(10)
    before = content.image(setting.host, name, shape)
    after = content.changed(setting.host, name, shape, 4)

    def figures(place: Path) -> dict[str, float]:
        seen = len(setting.registry.requests(r"/blobs/"))
        measure.quiet()
        found = _told(setting, place, "update", setting.host, before, after)
        asked = setting.registry.requests(r"/blobs/")[seen:]
        old, new = ({str(layer.digest) for layer in layers_of(setting.host, one)} for one in (before, after))
        asked = [one for one in asked if f"/{name}-changed/" in one]
        fetched = {one.rpartition("/")[2] for one in asked} & new
        return {
            "update / cold": found["seconds"] / found["cold"],
            "cold s": found["cold"],
            "update s": found["seconds"],
            "layers fetched": len(fetched),
            "layers changed": len(new - old),
        }

    return Probe("update, 1 of 10 layers", figures, {"update / cold": 0.2, "layers fetched": 1}, unit="")


def gc(setting: Setting) -> Probe:
    """Pulls beside a collection of 100,000 blobs."""
    packages = 100 if setting.quick else 1000
    count = 10_000 if setting.quick else 100_000
    prefix = content.tiny(setting.host, packages)[0].rpartition(":")[0]

    def figures(place: Path) -> dict[str, float]:
        found = _told(setting, place, "gc", setting.host, prefix, str(packages), str(count))
        if found["left"] or not found["pulls"]:
            raise measure.Failed(f"the collection and the pulls did not meet: {found}")
        alone, beside = found["alone"], found["beside"]
        return {
            "held up, 99 of 100": (beside["p99"] - alone["p99"]) * 1000,
            "held up, the worst": (beside["worst"] - alone["worst"]) * 1000,
            "p50 alone": alone["p50"] * 1000,
            "p50 beside": beside["p50"] * 1000,
            "p99 beside": beside["p99"] * 1000,
            "worst alone": alone["worst"] * 1000,
            "worst beside": beside["worst"] * 1000,
        }

    return Probe(
        f"pulls beside a collection of {count:,}",
        figures,
        {"held up, 99 of 100": 50.0, "held up, the worst": 50.0},
    )


def _told(setting: Setting, place: Path, *arguments: str) -> dict[str, Any]:
    command = " ".join(map(shlex.quote, [setting.tools.python, "-m", "bench.library", *arguments]))
    measure.run(command, place, sync=False, told=False)
    found: dict[str, Any] = json.loads((place / measure.TOLD).read_text())
    return found


@contextmanager
def limited(setting: Setting, megabits: int) -> Iterator[Setting]:
    """The same content behind a link of that rate."""
    work = setting.home / "limited"
    with serving(content.storage(), work, megabits=megabits) as registry:
        yield Setting(registry, setting.tools, setting.home, setting.quick)
    shutil.rmtree(work)


def image_3_limited(setting: Setting) -> Race:
    """The image in a few layers, where the network is what limits."""
    peers = (("ctr", "unlade mount"), ("crane+tar", OURS), ("curl|igzip|tar", OURS))
    race = image(setting, 3, [Target((peer,), None, ours) for peer, ours in peers], by=4)
    race.name = "image of 3 layers, 1 Gb/s"
    race.contenders = [one for one in race.contenders if one.durable and one.name != "skopeo+umoci"]
    return race


def raw_limited(setting: Setting) -> Race:
    """A raw blob, where the network is what limits."""
    race = _raw(setting, (64 << 20) if setting.quick else (256 << 20), oras=False)
    race.name = "raw blob, 1 Gb/s"
    race.contenders = [one for one in race.contenders if one.durable]
    race.targets = [Target(target.peers, None) for target in race.targets]
    return race


# Name → work, and its share of the time of a quick run; a work that needs less leaves the rest to nobody.
WORKS: Final[dict[str, tuple[Callable[[Setting], Work], float]]] = {
    "image-3": (image_3, 0.5),
    "image-12": (image_12, 0.12),
    "raw": (raw, 0.11),
    "bundle": (bundle, 0.03),
    "tiny": (tiny, 0.07),
    "mounted": (mounted, 0.01),
    "update": (update, 0.02),
    "push": (push, 0.07),
    "gc": (gc, 0.02),
}
LIMITED: Final[dict[str, tuple[Callable[[Setting], Work], float]]] = {
    "image-3-1g": (image_3_limited, 0.04),
    "raw-1g": (raw_limited, 0.01),
}


def names() -> Sequence[str]:
    """What ONLY= may name."""
    return [*WORKS, *LIMITED]
