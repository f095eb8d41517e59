"""Ordinary images by runtime handler, as the kubelet's calls see them (R1–R6).

What is recorded is in `unlade.containerd.ordinary`; here stands what it means for a call. containerd knows
names alone, and they are those of the default handler. So a pull for another handler asks containerd for the
entry's digest, Status that names a handler is answered by tuple, and Remove that names one leaves the others
theirs. An image that came without us is there for every handler of the host's platform, until it is pulled
through us for one of them. Used by `images`, and by the command line for its own pulls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from unlade.containerd import Handler, Handlers, HeldImage, OrdinaryImage
from unlade.cri.api import images_pb2 as api
from unlade.model import Deadline, Platform


class Records(Protocol):
    """What is used of `unlade.containerd.OrdinaryImages`."""

    def get(self, image_id: str) -> HeldImage | None:
        """An image by ID."""
        ...

    def find(self, name: str, handler: str) -> HeldImage | None:
        """The image of a tuple."""
        ...

    def named(self, name: str) -> HeldImage | None:
        """An image that goes by this name for some handler."""
        ...

    def recorded(self) -> Sequence[HeldImage]:
        """Every image with tuples."""
        ...

    def record(self, image_id: str, made: OrdinaryImage, *, deadline: Deadline) -> HeldImage:
        """Note a pull."""
        ...

    def remove(self, image_id: str, handler: str, names: Collection[str]) -> list[str] | None:
        """Drop a handler's tuples."""
        ...

    def removed(self, held: HeldImage) -> None:
        """Tidy up after containerd's own removal."""
        ...


class Ordinary:
    """The tuples of ordinary images; thread-safe."""

    def __init__(self, records: Records, handlers: Handlers) -> None:
        self._records = records
        self._handlers = handlers

    def asked(self, raw: bytes, made: OrdinaryImage) -> bytes:
        """What containerd is asked to pull: for the default handler the caller's own bytes."""
        if made.handler.name == self._handlers.default and not made.foreign:
            return raw
        request = api.PullImageRequest.FromString(raw)
        request.image.image = made.name
        asked: bytes = request.SerializeToString()
        return asked

    def pulled(self, image: str, made: OrdinaryImage, *, deadline: Deadline) -> None:
        """containerd pulled it and gave this ID."""
        self._records.record(image, made, deadline=deadline)

    def by_name(self, name: str, handler: Handler, known: api.Image | None) -> str | None:
        """The ID that a name leads to for a handler, `known` being where containerd's own name leads."""
        if handler.name != self._handlers.default:
            found = self._records.find(name, handler.name)
            if found is not None:
                return found.id
        return known.id if known is not None and self._has(known.id, handler, name) else None

    def has(self, image: str, handler: Handler) -> bool:
        """Whether an image, by ID, is there for a handler."""
        return self._has(image, handler, "")

    def _has(self, image: str, handler: Handler, name: str) -> bool:
        held = self._records.get(image)
        if held is None or not held.tuples:
            return handler.platform.normalised() == Platform.host()
        if name and handler.name != self._handlers.default:
            return False  # its tuple would have been found
        return handler.name in held.handlers

    def called(self, name: str) -> str | None:
        """An image that goes by a name which containerd does not know: another handler's."""
        found = self._records.named(name)
        return found.id if found is not None else None

    def remove(self, image: api.Image, handler: Handler) -> Collection[str]:
        """Drop a handler's tuples of an image; the records that are gone with them."""
        if not self.has(image.id, handler):
            return ()
        return self._records.remove(image.id, handler.name, [*image.repo_tags, *image.repo_digests]) or ()

    def removing(self, image: str, remove: Callable[[], bytes]) -> bytes:
        """Have containerd remove a whole image, and what only its tuples needed."""
        held = self._records.get(image)
        answer = remove()
        if held is not None and held.tuples:
            self._records.removed(held)
        return answer

    def handlers(self) -> dict[str, frozenset[str]]:
        """The handlers of every image that has some, by ID."""
        return {one.id: one.handlers for one in self._records.recorded() if one.tuples}

    def of(self, handler: Handler) -> tuple[frozenset[str], frozenset[str]]:
        """The IDs of a handler's images, and of those that are others' alone."""
        recorded = self.handlers()
        ours = frozenset(image for image, handlers in recorded.items() if handler.name in handlers)
        return ours, frozenset(recorded.keys() - ours)
