"""What can go wrong on the host."""

from __future__ import annotations

from unlade.errors import InvalidInput, UnladeError


class HostError(UnladeError):
    """A step on the host failed: a program of it, a file, the service."""

    code = "host"


class NotBundled(InvalidInput):
    """The running installation cannot be made into a bundle."""

    code = "not-bundled"
