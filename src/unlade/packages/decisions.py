"""What a merge decided and why: the record that makes every outcome explainable (P2).

A Decision is one field, resource or file where local or upstream differs from the base. It names the side
that was taken, and when both sides had changed differently it is a conflict with all three values. The
command line prints them; `--on-conflict` is applied where they are made, never afterwards.
"""

from dataclasses import dataclass
from typing import Literal

Taken = Literal["local", "upstream", "both", "merged", "markers"]
# kpt: what kpt does, side by side with a report. The others apply one rule to every conflict.
OnConflict = Literal["kpt", "upstream", "local", "fail", "markers"]
ON_CONFLICT: tuple[OnConflict, ...] = ("kpt", "upstream", "local", "fail", "markers")


@dataclass(frozen=True, slots=True)
class Decision:
    """One outcome. None for a value means: not there."""

    where: str
    path: str
    taken: Taken
    conflict: bool
    reason: str
    base: str | None = None
    local: str | None = None
    upstream: str | None = None

    def __str__(self) -> str:
        place = f"{self.where}: {self.path}" if self.path else self.where
        values = ""
        if (self.base, self.local, self.upstream) != (None, None, None):
            shown = [
                "nothing" if value is None else value for value in (self.base, self.local, self.upstream)
            ]
            values = f" (base {shown[0]}, local {shown[1]}, upstream {shown[2]})"
        return f"{place}: {self.reason}{values}"
