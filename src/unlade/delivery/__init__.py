"""The use case: a reference becomes a directory. Every face calls this, and only this.

`Engine.deliver` carries out a `Request`; its destinations are a directory of the caller's own, a mount,
the store, a shared tree, or a tar stream.
"""

from unlade.delivery.engine import Engine
from unlade.delivery.owndir import DestinationInUse
from unlade.delivery.request import (
    AsTree,
    Delivered,
    Destination,
    Directory,
    InStore,
    Mounted,
    PullPolicy,
    Request,
    Resolved,
    TarStream,
)
from unlade.delivery.sources import Found, NoReferrer, NotPresent, default_policy

__all__ = [
    "AsTree",
    "Delivered",
    "Destination",
    "DestinationInUse",
    "Directory",
    "Engine",
    "Found",
    "InStore",
    "Mounted",
    "NoReferrer",
    "NotPresent",
    "PullPolicy",
    "Request",
    "Resolved",
    "TarStream",
    "default_policy",
]
