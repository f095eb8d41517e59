"""Files that are not resources: whole-file three-way, with kpt's outcomes.

A file changed or added locally stays as it is, whatever upstream did; an untouched one follows upstream,
deletion included; one deleted locally comes back when upstream still has it. Paths that contain `.git`
(.gitignore, .github/) are left alone after get. Conflicts are reported; --on-conflict upstream takes theirs.
"""

from collections.abc import Mapping

from unlade.packages.decisions import Decision, OnConflict, Taken
from unlade.packages.snapshot import File, Snapshot, is_krm, own_files


def _plain(files: Mapping[str, File], extra: list[str]) -> Snapshot:
    return {
        path: file
        for path, file in own_files(files, extra).items()
        if not is_krm(path) and ".git" not in path
    }


def merge_plain_files(
    local: Snapshot,
    base: Snapshot,
    upstream: Snapshot,
    *,
    where: str,
    policy: OnConflict,
    boundaries: list[str],
) -> tuple[dict[str, File | None], list[Decision]]:
    """Changes to local's plain files (None deletes), and what was decided."""
    mine, old, new = (_plain(side, boundaries) for side in (local, base, upstream))
    changes: dict[str, File | None] = {}
    decisions: list[Decision] = []

    def note(path: str, taken: Taken, reason: str, *, conflict: bool = False) -> None:
        decisions.append(Decision(where + path, "", taken, conflict, reason))

    for path in sorted(mine.keys() | old.keys() | new.keys()):
        ours, before, theirs = mine.get(path), old.get(path), new.get(path)
        if ours is not None and (before is None or ours.data != before.data):
            same = theirs is not None and theirs.data == ours.data
            moved = (theirs is None) != (before is None) or (
                theirs is not None and before is not None and theirs.data != before.data
            )
            if moved and not same:
                if policy == "upstream":
                    changes[path] = theirs
                    note(path, "upstream", "changed on both sides, upstream taken", conflict=True)
                else:
                    note(path, "local", "changed on both sides, local kept", conflict=True)
            elif not same:
                note(path, "local", "changed locally")
            continue
        if theirs is None:
            if ours is not None:
                changes[path] = None
                note(path, "upstream", "deleted upstream")
            continue
        if ours is None:
            if before is not None and policy == "local":
                note(path, "local", "deleted locally", conflict=before.data != theirs.data)
                continue
            changes[path] = theirs
            reason = "added upstream" if before is None else "deleted locally, but upstream has it: restored"
            note(path, "upstream", reason, conflict=before is not None)
        elif ours.data != theirs.data:
            changes[path] = File(theirs.data, ours.mode)
            note(path, "upstream", "changed upstream")
    return changes, decisions
