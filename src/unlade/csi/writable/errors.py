"""What can go wrong with a writable volume, as errors that the faces map to their own.

The codes are stable: the CSI table maps them to gRPC status, the provisioner to event reasons, and the
provisioner, which may not import this room, recognises `no-room` by its code.
"""

from __future__ import annotations

from unlade.errors import InvalidInput, StoreError


class NoSuchVolume(StoreError):
    """There is no volume of this id on this node."""

    code = "no-such-volume"


class NoSuchSnapshot(StoreError):
    """There is no snapshot of this id on this node."""

    code = "no-such-snapshot"


class VolumeConflict(StoreError):
    """A volume or snapshot of this name exists and is not what was asked for."""

    code = "volume-conflict"


class VolumeInUse(StoreError):
    """The volume is mounted, here or in another mount namespace; the same call succeeds later."""

    code = "volume-in-use"
    retryable = True


class NoRoom(StoreError):
    """The disk cannot promise so many bytes to one more volume."""

    code = "no-room"
    retryable = True


class SizeOutOfRange(InvalidInput):
    """The size is beyond what a volume can have, or smaller than what it is copied from."""

    code = "size-out-of-range"
