"""`.krmignore`: the gitignore subset that says which YAML files are not resources.

One file per package, at its root; it covers that package only. Patterns match as in gitignore: a slash inside
anchors to the root, a trailing slash means directories, `**` crosses directories, `!` takes back, the last
match decides. Ignored files are fetched and then left alone: not marked, merged, added or deleted.
"""

import re
from collections.abc import Mapping

from unlade.packages.snapshot import File, own_files

IGNORE_FILE = ".krmignore"


def _pattern(text: str) -> re.Pattern[str]:
    anchored = "/" in text.rstrip("/")
    only_directory = text.endswith("/")
    body = ""
    rest = text.strip("/")
    at = 0
    while at < len(rest):
        if rest.startswith("**/", at):
            body += "(?:.*/)?"
            at += 3
        elif rest.startswith("**", at):
            body += ".*"
            at += 2
        elif rest[at] == "*":
            body += "[^/]*"
            at += 1
        elif rest[at] == "?":
            body += "[^/]"
            at += 1
        else:
            body += re.escape(rest[at])
            at += 1
    start = "" if anchored else "(?:.*/)?"
    end = "/.*" if only_directory else "(?:/.*)?"
    return re.compile(start + body + end)


class Ignore:
    """The rules of one package."""

    def __init__(self, text: str = "") -> None:
        self.rules: list[tuple[bool, re.Pattern[str]]] = []
        for line in text.splitlines():
            rule = line.strip()
            if rule and not rule.startswith("#"):
                self.rules.append((not rule.startswith("!"), _pattern(rule.lstrip("!"))))

    def covers(self, path: str) -> bool:
        """Whether the file at this path, relative to the package, is ignored."""
        verdict = False
        for ignored, pattern in self.rules:
            if pattern.fullmatch(path):
                verdict = ignored
        return verdict


def ignore_of(files: Mapping[str, File]) -> Ignore:
    """The rules at the root of these files."""
    found = files.get(IGNORE_FILE)
    return Ignore(found.text if found is not None else "")


def resource_files(files: Mapping[str, File], extra: list[str] | None = None) -> dict[str, File]:
    """The YAML files of the root package that are read as resources."""
    rules = ignore_of(files)
    return {
        path: file
        for path, file in own_files(files, extra).items()
        if path.endswith((".yaml", ".yml")) and not rules.covers(path)
    }
