"""A node's images for people: what the kubelet sees, by tuple, and the same changes by hand (R4, R7).

The command line's other store. Names come from containerd's CRI, which is what the kubelet lists; tuples,
components and sizes from containerd's records. Changes go through the rooms that the service uses, under the
same locks (`state` must be the service's own), so both may work at once. Handlers are those that the service
noted in containerd; without a service, containerd's own with the host's platform.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import grpc

from unlade.containerd import (
    ArtifactImage,
    Artifacts,
    Containerd,
    ContainerdStore,
    ContainerdUnavailable,
    Handler,
    Handlers,
    OrdinaryImage,
    OrdinaryImages,
    PullOptions,
    Recovered,
)
from unlade.containerd.errors import explained
from unlade.containerd.handlers import recall
from unlade.containerd.inventory import Component, Holding, Inventory, take
from unlade.containerd.records import is_id, record_name
from unlade.cri.api import images_pb2 as api
from unlade.cri.ordinary import Ordinary
from unlade.cri.passthrough import Upstream, connect
from unlade.cri.runtime import discover
from unlade.model import Deadline, Digest, Platform, Reference
from unlade.registry import CredentialSource, Registry
from unlade.store import NotInStore, Problem
from unlade.transfer import Progress, silent

# How long a command waits for a containerd that is starting.
_PATIENCE: Final = 10.0
# Large images take long; the command's own --timeout is the true bound.
_PULL_SECONDS: Final = 24 * 3600.0
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Shown:
    """A holding with every name that leads to its image for the default handler."""

    holding: Holding
    names: tuple[str, ...]

    @property
    def references(self) -> tuple[str, ...]:
        """The names of the holding itself; of an image that came without us, containerd's."""
        return self.holding.references or self.names

    def is_called(self, name: str) -> bool:
        """Whether a reference, an image ID or the digest of a manifest or index leads to it."""
        if is_id(name):
            tuples = self.holding.tuples
            return name == self.holding.id or name in {d for t in tuples for d in (t.manifest, t.index)}
        return record_name(Reference.parse(name)) in self.references


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull came to."""

    id: str
    reference: Reference
    manifest: Digest
    index: str
    platform: str
    handler: str
    family: str
    cached: bool


class Node:
    """The images of one containerd; a context manager. Raises UnladeError."""

    def __init__(self, address: str, *, state: Path, registry: Registry | None = None) -> None:
        """Without a registry, only what is there can be listed, removed and checked."""
        if not os.path.exists(address.removeprefix("unix://")):
            raise ContainerdUnavailable(
                f"there is no containerd at {address}", next_step="name its socket with --containerd"
            )
        with ExitStack() as parts:
            self._channel = connect(address)
            parts.callback(self._channel.close)
            self._upstream = Upstream(self._channel)
            self._containerd = parts.enter_context(Containerd(address, state=state, patience=_PATIENCE))
            self.handlers = recall(self._containerd) or discover(self._channel, (), seconds=_PATIENCE)
            if registry is None:
                registry = parts.enter_context(Registry())
            self._registry = registry
            self._artifacts = parts.enter_context(Artifacts(self._containerd, registry, self.handlers))
            self._images = OrdinaryImages(self._containerd, self.handlers.default)
            self._parts = parts.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._parts.close()

    def list(self) -> tuple[Sequence[Shown], Inventory]:
        """Every image that the kubelet sees, by handler and options."""
        names = self._listed()
        inventory = take(self._containerd, self.handlers.default)
        shown = [
            Shown(self._as_named(one, names[one.id]), names[one.id])
            for one in inventory.holdings
            if one.id in names
        ]
        return shown, inventory

    def _as_named(self, one: Holding, names: Collection[str]) -> Holding:
        """A holding without tags that lead elsewhere by now: containerd may have pulled without us."""
        if one.handler != self.handlers.default or one.options:
            return one
        kept = tuple(known for known in one.tuples if "@" in known.reference or known.reference in names)
        return replace(one, tuples=kept)

    def select(self, name: str, handler: str | None) -> Sequence[Shown]:
        """What a reference or ID leads to, for one handler or for all; raises UnknownHandler, NotInStore."""
        wanted = self.handlers.resolve(handler).name if handler is not None else None
        shown, _ = self.list()
        found = [one for one in shown if one.is_called(name) and _suits(one.holding, wanted, self.handlers)]
        if not found:
            what = f"{name} for {wanted}" if wanted else name
            raise NotInStore(f"{what} is not in containerd", next_step="`unlade images` lists what is")
        return found

    def remove(self, shown: Shown, handler: str | None) -> None:
        """Remove an image: one handler's tuples of it, or all. Idempotent."""
        image = shown.holding.id
        if handler is not None:
            handler = self.handlers.resolve(handler).name
        if self._artifacts.find(image) is not None:
            self._artifacts.remove(image, handler=handler)
            return
        held = self._images.get(image)
        if held is None:
            return
        names = self._listed().get(image, ())
        # One without tuples is removed whole, whatever handler is named.
        for one in sorted(held.handlers or {""}) if handler is None else [handler]:
            self._images.remove(image, one, names)

    def collect(self, *, dry_run: bool) -> Recovered:
        """Remove what dead processes left, and have containerd collect garbage."""
        found = self._artifacts.recover(dry_run=dry_run)
        loose = self._images.settle(dry_run=dry_run)
        if not dry_run:
            self._artifacts.collect()
        return replace(found, images=(*found.images, *loose))

    def fsck(self, *, repair: bool, deadline: Deadline) -> Sequence[Problem]:
        """Every tree against its file list, every blob against its digest, every record against both."""
        problems = [*self._artifacts.fsck(repair=repair, deadline=deadline)]
        shown, _ = self.list()
        checked: dict[str, str] = {}
        for one in {one.holding.id: one for one in shown if one.holding.family == "image"}.values():
            wrong = self._wrong(one.holding.components, checked, deadline)
            if wrong:
                if repair:
                    self.remove(one, None)
                step = "pull it again" if repair else "remove it and pull it again"
                what = ", ".join(one.references) or one.holding.id
                problems.append(Problem("image-damaged", what, f"{wrong}; {step}", repair))
        return problems

    def pull(
        self,
        reference: Reference,
        *,
        handler: str,
        platform: Platform | None,
        options: PullOptions,
        credentials: CredentialSource,
        deadline: Deadline,
        progress: Progress = silent,
        jobs: int | None = None,
    ) -> Pulled:
        """Pull as the service would for a pod of this handler; `platform` instead of its guests' own."""
        target = self.handlers.resolve(handler)
        with self._for(target, platform, jobs) as artifacts:
            made = artifacts.pull(
                reference, handler=target.name, options=options, deadline=deadline, progress=progress
            )
        if isinstance(made, ArtifactImage):
            name = record_name(reference)
            one = next(
                one
                for one in made.tuples
                if (one.reference, one.handler, one.options) == (name, target.name, options.fingerprint())
            )
            manifest = Digest.parse(one.manifest)
            return Pulled(
                made.id, reference, manifest, one.index, one.platform, target.name, made.family, made.cached
            )
        assert made.manifest is not None  # `pull` resolves
        image = self._pull_ordinary(made, credentials, deadline)
        index = str(made.index) if made.index else ""
        return Pulled(
            image, reference, made.manifest, index, made.platform, target.name, "image", cached=False
        )

    def _for(self, target: Handler, platform: Platform | None, jobs: int | None) -> Artifacts:
        known = {**self.handlers.known}
        if platform is not None:
            known[target.name] = replace(target, platform=platform)
        handlers = Handlers(self.handlers.default, known)
        return Artifacts(self._containerd, self._registry, handlers, jobs=jobs)

    def _pull_ordinary(self, made: OrdinaryImage, source: CredentialSource, deadline: Deadline) -> str:
        registry, repository = made.reference.registry, made.reference.repository
        found = source.lookup(registry, repository)
        auth = None
        if found:
            one = found[0]
            auth = api.AuthConfig(
                username=one.username,
                password=one.password,
                identity_token=one.identity_token,
                registry_token=one.registry_token,
            )
        spec = api.ImageSpec(image=record_name(made.reference))
        if made.handler.name != self.handlers.default:
            spec.runtime_handler = made.handler.name
        request = api.PullImageRequest(image=spec, auth=auth)
        ordinary = Ordinary(self._images, self.handlers)
        left = deadline.remaining()
        answer = self._ask(
            "PullImage",
            ordinary.asked(request.SerializeToString(), made),
            f"have {made.reference} pulled",
            seconds=_PULL_SECONDS if left is None else left,
        )
        image: str = api.PullImageResponse.FromString(answer).image_ref
        ordinary.pulled(image, made, deadline=deadline)
        return image

    def _listed(self) -> Mapping[str, tuple[str, ...]]:
        answer = self._ask("ListImages", api.ListImagesRequest().SerializeToString(), "list images")
        images = api.ListImagesResponse.FromString(answer).images
        return {image.id: (*image.repo_tags, *image.repo_digests) for image in images}

    def _ask(self, name: str, request: bytes, what: str, seconds: float = _PATIENCE) -> bytes:
        try:
            return self._upstream.ask(name, request, seconds)
        except grpc.RpcError as error:
            raise explained(what, error) from error

    def _wrong(self, parts: Sequence[Component], checked: dict[str, str], deadline: Deadline) -> str:
        """What is wrong with an image's blobs; empty when nothing is."""
        if not any(part.kind == "config" for part in parts):
            return "its manifest or config is not there"
        for part in parts:
            if part.digest not in checked:
                checked[part.digest] = _verified(ContainerdStore(self._containerd), part, deadline)
            if checked[part.digest]:
                return checked[part.digest]
        return ""


def _verified(content: ContainerdStore, part: Component, deadline: Deadline) -> str:
    digest = Digest.parse(part.digest)
    try:
        hasher: Callable[..., hashlib._Hash] = getattr(hashlib, digest.algorithm)
        hashed = hasher()
        with content.open(digest) as stream:
            while data := stream.read(_CHUNK):
                deadline.check()
                hashed.update(data)
    except NotInStore:
        # Layers are not needed once they are unpacked, and containerd may be told to discard them.
        return "" if part.kind == "layer" else f"its {part.kind} {digest} is not there"
    return "" if hashed.hexdigest() == digest.hex else f"its {part.kind} {digest} has other bytes"


def _suits(holding: Holding, handler: str | None, handlers: Handlers) -> bool:
    if handler is None or holding.handler == handler:
        return True
    fits = handlers.resolve(handler).platform.normalised() == Platform.host()
    return not holding.handler and fits
