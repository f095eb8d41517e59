"""Telling systemd how the service fares: sd_notify(3), without its library.

One datagram to the socket that systemd named in the environment. Without one nothing is sent, and nothing
that goes wrong here may end the service.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Final

VARIABLE: Final = "NOTIFY_SOCKET"


def notify(*lines: str) -> bool:
    """Send states such as `READY=1`; False when nobody listens."""
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return False
    name = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(name)
        sender.send("\n".join(lines).encode())
        return True
    return False
