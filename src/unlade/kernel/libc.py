"""The one handle on the C library, and system calls that it has no function for.

Everything here turns a negative result into OSError with its errno; what the error means is the caller's
business. Numbers are given only for calls that have one number on every Linux architecture (those since
5.2, openat2(2) and landlock(7) among them). On other systems `supported` is False and nothing else may be
called. Used only inside `unlade.kernel`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Final

supported: Final = sys.platform == "linux" and platform.machine() != "alpha"

OPENAT2: Final = 437
LANDLOCK_CREATE_RULESET: Final = 444
LANDLOCK_ADD_RULE: Final = 445
LANDLOCK_RESTRICT_SELF: Final = 446

# use_errno keeps errno per thread and out of reach of the interpreter's own calls.
library: Final = ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: object) -> int:
    """Make a system call by number; raises OSError."""
    return checked(library.syscall(ctypes.c_long(number), *arguments))


def checked(result: int) -> int:
    """Pass a result on, or raise OSError for the errno behind a negative one."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
