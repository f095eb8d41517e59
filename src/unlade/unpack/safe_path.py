"""The one grammar for names that people put on files, applied to bytes: titles, file paths, prefixes.

The grammar is `model.paths`: relative, no empty part, no `.` or `..`, no NUL, within PATH_MAX and NAME_MAX.
It is checked before any use (formats, "Rules that decide", 4); archives' own names are a wider language that
`places` reads. Passing this check says nothing about links that stand on the way: opening beneath a
descriptor does.
"""

from __future__ import annotations

from unlade.model.paths import relative_problem
from unlade.unpack.refusals import UnsafeName, show


def check(unsafe: bytes | str) -> tuple[bytes, ...]:
    """The parts of a safe relative path; raises UnsafeName."""
    if isinstance(unsafe, str):
        try:
            unsafe = unsafe.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise UnsafeName(f"the name {unsafe[:200]!a} is not valid Unicode") from None
    problem = relative_problem(unsafe)
    if problem:
        raise UnsafeName(
            f"the name {show(unsafe)} {problem}",
            next_step="the publisher must give a plain relative path",
        )
    return tuple(unsafe.split(b"/"))
