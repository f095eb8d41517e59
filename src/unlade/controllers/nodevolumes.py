"""What the provisioner needs of its node: volumes, and pull secrets, by protocol.

The node's volumes are `unlade.csi.writable`, another face, which this one may not import; `unlade.cli` brings
the two together. Every call is idempotent and may be repeated after a kill. Errors are UnladeError; `no-room`
as its code means that another node may have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from unlade.model import Deadline
from unlade.registry import CredentialSource


class Made(Protocol):
    """A volume on this node."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def digests(self) -> tuple[str, ...]: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...
    @property
    def owner(self) -> str: ...
    @property
    def bound(self) -> bool: ...


class Grown(Protocol):
    """A volume that was grown; `pending`: when it is next unmounted."""

    @property
    def size(self) -> int: ...
    @property
    def pending(self) -> bool: ...


class RoomLeft(Protocol):
    """What may still be promised."""

    @property
    def available(self) -> int: ...


class Volumes(Protocol):
    """The node's volumes, as `unlade.csi.writable` has them; every call is idempotent."""

    def create(
        self,
        name: str,
        size: int,
        parameters: Mapping[str, str],
        *,
        limit: int = 0,
        origin: str = "",
        owner: str = "",
        credentials: CredentialSource | None = None,
        deadline: Deadline | None = None,
    ) -> Made: ...

    def bind(self, volume_id: str) -> None: ...

    def delete(self, volume_id: str) -> None: ...

    def expand(self, volume_id: str, size: int) -> Grown: ...

    def volumes(self) -> Sequence[Made]: ...

    def room(self) -> RoomLeft: ...


class Secrets(Protocol):
    """Pull secrets by name."""

    def of_secret(self, namespace: str, name: str) -> CredentialSource: ...
