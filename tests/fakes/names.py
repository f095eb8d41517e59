"""A fake of the resolver: names of a test's own, all on loopback, and nothing else resolves."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def names(table: Mapping[str, str]) -> Iterator[list[str]]:
    """Resolve the table's names to its addresses; IP literals as ever. Yields the names that were asked
    for.
    """
    real = socket.getaddrinfo
    asked: list[str] = []

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else str(host)
        asked.append(text)
        if text in table:
            return real(table[text], *args, **kwargs)
        kwargs["flags"] = socket.AI_NUMERICHOST
        return real(host, *args[:4], **kwargs) if len(args) < 5 else real(host, *args)

    socket.getaddrinfo = resolve
    try:
        yield asked
    finally:
        socket.getaddrinfo = real
