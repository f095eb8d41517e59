"""What the node does itself: pulls, status and removal where artifacts and runtime handlers matter.

A pull asks the registry first, with the pod's credentials. An ordinary image is left to containerd, for the
default handler with the request untouched (`ordinary`); anything else becomes a tree of containerd's
(`unlade.containerd`), which the kubelet then mounts by its ID like any image. Status and Remove go to
containerd too, unless they name a handler or one of our trees: identity is (name, handler, options) (R1),
and containerd knows names alone.

Invariant: no artifact is ever answered as an image that would be mounted as an empty directory (V14). When
we cannot reach a registry and containerd can (its own mirrors, its own credentials), containerd pulls; then
what it got is looked at, and taken away again unless it is an image.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal, Protocol

import grpc

from unlade.containerd import ArtifactImage, ContainerdError, Handler, Handlers, OrdinaryImage, PullOptions
from unlade.cri.annotations import pull_options
from unlade.cri.api import images_pb2 as api
from unlade.cri.credentials import from_auth
from unlade.cri.observed import Metrics
from unlade.cri.ordinary import Ordinary
from unlade.cri.passthrough import Upstream, time_left
from unlade.cri.pulls import Pull
from unlade.errors import InvalidInput, RegistryError
from unlade.model import Deadline, Platform, Reference
from unlade.registry import CredentialSource
from unlade.transfer import Progress

_log = logging.getLogger(__name__)
# containerd's CRI learns of new records by its own events: milliseconds, on a busy node a second or two.
_TAKE_UP: Final = 30.0
# A removed image may be seen a moment longer; the caller is not kept for it.
_LET_GO: Final = 2.0
_PAUSE: Final = 0.01
# IDs whose kind is remembered; far more than a node has images.
_REMEMBERED: Final = 16384

# One of our trees; a container image; an artifact that containerd took for an image.
Kind = Literal["ours", "image", "neither"]


class Artifacts(Protocol):
    """What is used of `unlade.containerd.Artifacts`."""

    def pull(
        self,
        reference: Reference | str,
        *,
        handler: str = "",
        credentials: CredentialSource | None = None,
        options: PullOptions | None = None,
        deadline: Deadline | None = None,
        progress: Progress = ...,
    ) -> ArtifactImage | OrdinaryImage:
        """Make it mountable; an ordinary image is resolved only."""
        ...

    def find(
        self, name_or_id: str, *, handler: str | None = None, options: PullOptions | None = None
    ) -> ArtifactImage | None:
        """What is there; None when it is none of ours."""
        ...

    def list(self) -> Sequence[ArtifactImage]:
        """Every artifact, one per image ID."""
        ...

    def remove(self, name_or_id: str, *, handler: str | None = None) -> bool:
        """Remove an image ID, or one handler's tuples of it."""
        ...


class Images:
    """Answers PullImage, ImageStatus, RemoveImage and lists by handler; thread-safe.

    Raises UnladeError and grpc.RpcError.
    """

    def __init__(
        self,
        upstream: Upstream,
        artifacts: Artifacts,
        ordinary: Ordinary,
        handlers: Handlers,
        metrics: Metrics,
        *,
        is_image: Callable[[api.Image], bool],
        tuple_aware: bool = False,
    ) -> None:
        self._upstream = upstream
        self._artifacts = artifacts
        self._ordinary = ordinary
        self._handlers = handlers
        self._metrics = metrics
        self._is_image = is_image
        self._tuple_aware = tuple_aware
        self._kinds: dict[str, Kind] = {}

    def pull(self, raw: bytes, context: grpc.ServicerContext, pull: Pull) -> bytes:
        """PullImage; `pull` is told its phases."""
        request = api.PullImageRequest.FromString(raw)
        spec = request.image
        pull.enter("resolve")
        pull.handler = self._handlers.resolve(spec.runtime_handler).name
        options = _options(spec)
        try:
            reference = Reference.parse(spec.image)
        except InvalidInput:
            return self._forward(raw, context, pull)  # containerd says what is wrong with it
        deadline = _deadline(context)
        try:
            made = self._artifacts.pull(
                reference,
                handler=spec.runtime_handler,
                credentials=from_auth(request.auth, reference),
                options=options,
                deadline=deadline,
                progress=pull,
            )
        except RegistryError as error:
            if pull.content or not options.plain:
                raise
            _log.info("left to containerd, the registry cannot be asked: %s", error.message)
            unresolved = OrdinaryImage(reference, self._handlers.resolve(spec.runtime_handler))
            return self._pull_and_look(raw, context, pull, unresolved, error)
        if isinstance(made, OrdinaryImage):
            answer = self._forward(self._ordinary.asked(raw, made), context, pull)
            pull.enter("register")
            image = api.PullImageResponse.FromString(answer).image_ref
            self._ordinary.pulled(image, made, deadline=deadline)
            return answer
        self._metrics.pulls.labels("cached" if made.cached else "artifact").inc()
        self._remember(made.id, "ours")
        pull.enter("register")
        self._wait(made.id, present=True, seconds=_TAKE_UP, deadline=deadline)
        told: bytes = api.PullImageResponse(image_ref=made.id).SerializeToString()
        return told

    def status(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        """ImageStatus, by tuple. containerd's names are those of the default handler without options."""
        request = api.ImageStatusRequest.FromString(raw)
        spec = request.image
        handler = self._handlers.resolve(spec.runtime_handler)
        options = _options(spec)
        if options.plain and not spec.runtime_handler:
            return self._as_known(raw, context)
        known = self._look(spec.image)
        if known is not None and _is_id(spec.image, known.id):
            return self._as_known(raw, context) if self._has(known, handler) else _absent()
        found = self._artifacts.find(spec.image, handler=handler.name, options=options)
        if found is not None:
            request.image.image = found.id
            return self._upstream.call("ImageStatus", request.SerializeToString(), context)
        if not options.plain:
            return _absent()
        if known is not None and self._kind(known) == "ours":
            known = None
        image = self._ordinary.by_name(spec.image, handler, known)
        if image is None:
            return _absent()
        request.image.image = image
        return self._as_known(request.SerializeToString(), context)

    def remove(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        """RemoveImage: with a handler its tuples, without one the whole image (R4)."""
        request = api.RemoveImageRequest.FromString(raw)
        spec = request.image
        handler = self._handlers.resolve(spec.runtime_handler) if spec.runtime_handler else None
        known = self._look(spec.image)
        by_id = known is not None and _is_id(spec.image, known.id)
        if self._remove_tree(spec.image, handler, known, context):
            return _removed()
        if handler is None:
            return self._remove_whole(request, known, raw, context)
        image = known if by_id else self._tuple(spec.image, handler, known)
        if image is not None:
            self._gone(self._ordinary.remove(image, handler), context)
        return _removed()

    def _remove_tree(
        self, name: str, handler: Handler | None, known: api.Image | None, context: grpc.ServicerContext
    ) -> bool:
        """Remove one of our trees, or a handler's tuples of it; False when the name leads to none."""
        by_id = known is not None and _is_id(name, known.id)
        ours = known is not None and self._kind(known) == "ours"
        if known is not None and not ours and (handler is None or by_id):
            return False
        wanted = known.id if known is not None and by_id else name
        if self._artifacts.remove(wanted, handler=handler.name if handler else None):
            if known is not None and self._artifacts.find(known.id) is None:
                self._gone([known.id], context)
            return True
        # Ours and nothing to do: somebody was faster, or the tuple was not there.
        return ours and (handler is None or by_id)

    def _remove_whole(
        self,
        request: api.RemoveImageRequest,
        known: api.Image | None,
        raw: bytes,
        context: grpc.ServicerContext,
    ) -> bytes:
        """Have containerd remove an ordinary image, with all tuples of its ID."""
        image = known.id if known is not None else self._called(request.image.image)
        if known is None and image:
            request.image.image = image
            raw = request.SerializeToString()
        remove = partial(self._upstream.call, "RemoveImage", raw, context)
        return self._ordinary.removing(image, remove) if image else remove()

    def listed(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        """ListImages: a filter that names a handler gives its tuples, any other is containerd's (R1)."""
        request = api.ListImagesRequest.FromString(raw)
        if not request.filter.image.runtime_handler and not self._tuple_aware:
            return self._upstream.call("ListImages", raw, context)
        whole = self._upstream.call("ListImages", api.ListImagesRequest().SerializeToString(), context)
        images = api.ListImagesResponse.FromString(whole).images
        answer: bytes = api.ListImagesResponse(
            images=self._chosen(request.filter.image, images)
        ).SerializeToString()
        return answer

    def streamed(self, raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """StreamImages, as `listed`."""
        request = api.StreamImagesRequest.FromString(raw)
        wanted = request.filter.image
        if not wanted.runtime_handler and not self._tuple_aware:
            yield from self._upstream.stream("StreamImages", raw, context)
            return
        everything = api.StreamImagesRequest().SerializeToString()
        for part in self._upstream.stream("StreamImages", everything, context):
            images = self._chosen(wanted, api.StreamImagesResponse.FromString(part).images)
            yield api.StreamImagesResponse(images=images).SerializeToString()

    def _chosen(self, wanted: api.ImageSpec, images: Iterable[api.Image]) -> list[api.Image]:
        """The images of a list that are there for the handler that a filter names; of none, all tuples."""
        if not wanted.runtime_handler:
            return self._tuples(images)
        handler = self._handlers.resolve(wanted.runtime_handler)
        trees = {image.id: image for image in self._artifacts.list()}
        ours, others = self._ordinary.of(handler)
        fits = handler.platform.normalised() == Platform.host()
        only = self._named(wanted, handler) if wanted.image else None
        chosen = []
        for image in images:
            tree = trees.get(image.id)
            there = handler.name in tree.handlers if tree is not None else image.id in ours
            if tree is None and not there and image.id not in others:
                there = fits and self._kind(image) == "image"
            if there and (only is None or image.id in only):
                image.spec.runtime_handler = handler.name
                chosen.append(image)
        return chosen

    def _tuples(self, images: Iterable[api.Image]) -> list[api.Image]:
        """An entry for each handler that an image is there for; the default one goes without a name."""
        handlers = {one.id: one.handlers for one in self._artifacts.list()} | self._ordinary.handlers()
        entries = []
        for image in images:
            for name in sorted(handlers.get(image.id) or {self._handlers.default}):
                entry = api.Image()
                entry.CopyFrom(image)
                entry.spec.runtime_handler = name if name != self._handlers.default else ""
                entries.append(entry)
        return entries

    def _named(self, wanted: api.ImageSpec, handler: Handler) -> set[str]:
        known = self._look(wanted.image)
        if known is not None and _is_id(wanted.image, known.id):
            return {known.id}
        tree = self._artifacts.find(wanted.image, handler=handler.name)
        image = self._tuple(wanted.image, handler, known)
        return {found.id for found in (tree, image) if found is not None}

    def _has(self, known: api.Image, handler: Handler) -> bool:
        if self._kind(known) == "ours":
            return self._artifacts.find(known.id, handler=handler.name) is not None
        return self._ordinary.has(known.id, handler)

    def _tuple(self, name: str, handler: Handler, known: api.Image | None) -> api.Image | None:
        """The ordinary image that a name leads to for a handler."""
        if known is not None and self._kind(known) == "ours":
            known = None
        image = self._ordinary.by_name(name, handler, known)
        return self._look(image) if image is not None else None

    def _called(self, name: str) -> str:
        """The ID of what goes by a name that containerd does not know; empty when nothing does."""
        try:
            return self._ordinary.called(name) or ""
        except InvalidInput:
            return ""  # containerd says what is wrong with it

    def _gone(self, records: Iterable[str], context: grpc.ServicerContext) -> None:
        """Wait until containerd's CRI has seen that these are gone; a moment longer does no harm."""
        for name in records:
            with suppress(ContainerdError):
                self._wait(name, present=False, seconds=_LET_GO, deadline=_deadline(context))

    def _as_known(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        """containerd's own answer; an artifact that it took for an image before we came is not there."""
        answer = self._upstream.call("ImageStatus", raw, context)
        known = api.ImageStatusResponse.FromString(answer)
        if known.HasField("image") and self._kind(known.image) == "neither":
            return _absent()
        return answer

    def _forward(self, raw: bytes, context: grpc.ServicerContext, pull: Pull) -> bytes:
        pull.enter("containerd")
        answer = self._upstream.call("PullImage", raw, context)
        self._metrics.pulls.labels("image").inc()
        return answer

    def _pull_and_look(
        self,
        raw: bytes,
        context: grpc.ServicerContext,
        pull: Pull,
        unresolved: OrdinaryImage,
        error: RegistryError,
    ) -> bytes:
        """Let containerd pull what we could not resolve; raises `error` when it got no image.

        It chooses for its host, so guests of another platform must wait for the registry.
        """
        if unresolved.foreign:
            raise error
        answer = self._forward(raw, context, pull)
        pulled = api.PullImageResponse.FromString(answer).image_ref
        image = self._look(pulled)
        if image is not None and self._kind(image) == "image":
            self._ordinary.pulled(pulled, unresolved, deadline=_deadline(context))
        if image is None or self._kind(image) != "neither":
            return answer
        spec = api.ImageSpec(image=pulled)
        self._upstream.ask("RemoveImage", api.RemoveImageRequest(image=spec).SerializeToString())
        raise error

    def _look(self, name: str) -> api.Image | None:
        """What containerd's CRI says about a name or ID."""
        request = api.ImageStatusRequest(image=api.ImageSpec(image=name))
        answer = self._upstream.ask("ImageStatus", request.SerializeToString())
        known = api.ImageStatusResponse.FromString(answer)
        return known.image if known.HasField("image") else None

    def _wait(self, image: str, *, present: bool, seconds: float, deadline: Deadline) -> None:
        until = time.monotonic() + seconds
        while (self._look(image) is not None) is not present:
            if time.monotonic() > until:
                raise ContainerdError(
                    f"containerd did not take up image {image} within {seconds:.0f} s",
                    next_step="the kubelet tries again; check containerd's log",
                )
            deadline.wait(_PAUSE)

    def _kind(self, image: api.Image) -> Kind:
        """What an ID is. It is a digest of what says so: the answer never changes."""
        known = self._kinds.get(image.id)
        if known is None:
            ours = self._artifacts.find(image.id) is not None
            known = "ours" if ours else "image" if self._is_image(image) else "neither"
            self._remember(image.id, known)
        return known

    def _remember(self, image: str, kind: Kind) -> None:
        if len(self._kinds) >= _REMEMBERED:
            self._kinds.clear()
        self._kinds[image] = kind


def _options(spec: api.ImageSpec) -> PullOptions:
    return pull_options(spec.annotations, spec.image, spec.user_specified_image)


def _deadline(context: grpc.ServicerContext) -> Deadline:
    left = time_left(context)
    deadline = Deadline.never() if left is None else Deadline.after(left)
    if not context.add_callback(deadline.cancel):
        deadline.cancel()
    return deadline


def _is_id(name: str, image: str) -> bool:
    """Whether a name is the image's ID, or the beginning of it, as people type them."""
    return bool(name) and (image == name or image.startswith(f"sha256:{name}"))


def _removed() -> bytes:
    answer: bytes = api.RemoveImageResponse().SerializeToString()
    return answer


def _absent() -> bytes:
    answer: bytes = api.ImageStatusResponse().SerializeToString()
    return answer
