"""Any content in an OCI registry becomes a directory: verified, safe, shared, garbage-collected.

Four verbs for programs: `deliver`, `plan`, `push` and `copy`. What they stand on is public too: `Engine` and
`Request` for programs that deliver often, `Registry` for the distribution API, `errors` for what can go
wrong. Names are imported when first used, so that the command line starts quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from unlade.delivery import Delivered, Engine, Request
    from unlade.errors import UnladeError
    from unlade.library import connect, copy, deliver, plan, push
    from unlade.model import Digest, Platform, Reference
    from unlade.planning import Plan
    from unlade.registry import Registry, RegistryConfig
    from unlade.store import DirStore
    from unlade.transfer import ProgressEvent

__version__: Final = "0.1.0"

_HOMES: Final = {
    "Delivered": "unlade.delivery",
    "Digest": "unlade.model",
    "DirStore": "unlade.store",
    "Engine": "unlade.delivery",
    "Plan": "unlade.planning",
    "Platform": "unlade.model",
    "ProgressEvent": "unlade.transfer",
    "Reference": "unlade.model",
    "Registry": "unlade.registry",
    "RegistryConfig": "unlade.registry",
    "Request": "unlade.delivery",
    "UnladeError": "unlade.errors",
    "connect": "unlade.library",
    "copy": "unlade.library",
    "deliver": "unlade.library",
    "plan": "unlade.library",
    "push": "unlade.library",
}

__all__ = [
    "Delivered",
    "Digest",
    "DirStore",
    "Engine",
    "Plan",
    "Platform",
    "ProgressEvent",
    "Reference",
    "Registry",
    "RegistryConfig",
    "Request",
    "UnladeError",
    "__version__",
    "connect",
    "copy",
    "deliver",
    "plan",
    "push",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'unlade' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
