"""Exit codes, and how an error looks to a person: the one table that maps categories to numbers.

The numbers are part of the interface (docs/cli.md prints this table, a test compares the two): a script may
depend on them, so a number never changes its meaning. 1 is kept for "the answer is no" (differences found,
problems found), as in `diff` and `git diff`; 2 is click's for a wrong command line.
"""

from __future__ import annotations

import sys
import traceback
from typing import Final

FOUND: Final = 1
USAGE: Final = 2
UNEXPECTED: Final = 70  # EX_SOFTWARE of sysexits.h: a bug of ours
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it

# Most specific first: the first name found among an error's classes decides. Names, not classes, because
# importing the rooms that define them would cost every start what only failures need.
EXIT_CODES: Final[tuple[tuple[str, int, str], ...]] = (
    ("Unauthorized", 5, "the registry refused these credentials, or wants some"),
    ("NotFound", 6, "the registry does not have the reference"),
    ("InvalidInput", 3, "a reference, option or file cannot be used"),
    ("RegistryError", 4, "the registry failed or cannot be reached"),
    ("IntegrityError", 7, "bytes are not what their digest or size promised"),
    ("UnsafeArchive", 8, "an archive tried to leave its directory or to exhaust the machine"),
    ("StoreError", 9, "the local store cannot do what was asked"),
    ("MountError", 10, "the kernel refused a mount"),
    ("MergeConflict", 11, "two sides changed the same thing"),
    ("DeadlineExceeded", 12, "time ran out (--timeout)"),
    ("UnladeError", 13, "another refusal; the message says which"),
)


def exit_code(error: BaseException) -> int:
    """The documented number for an error; UNEXPECTED for anything that is not ours."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return next((code for name, code, _ in EXIT_CODES if name in names), UNEXPECTED)


def report(error: BaseException, *, debug: bool) -> int:
    """Say on stderr what went wrong and what to do next; returns the exit code."""
    code = exit_code(error)
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if code == UNEXPECTED:
        print(f"error: unexpected {type(error).__name__}: {error}", file=sys.stderr)
        step = "this is a bug: run again with --debug and report what it prints"
    else:
        print(f"error: {_one_line(str(error))}", file=sys.stderr)
        step = getattr(error, "next_step", "")
    if step:
        print(f"next: {_one_line(step)}", file=sys.stderr)
    return code


def _one_line(text: str) -> str:
    """Text from a registry or an archive may hold anything: no control character reaches the terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )
