"""Settings of a project: a `.unlade.toml` in a directory above its packages.

Only one exists today: `[packages] kpt-compat = true` keeps the oci facts of new packages in annotations, so
that kpt itself can work on them (P11). The nearest file upwards counts; an unreadable one is an error,
because a setting that is silently ignored is worse than none.
"""

import os
import tomllib

from unlade.errors import InvalidInput

SETTINGS_FILE = ".unlade.toml"


class BadSettings(InvalidInput):
    """The project's settings cannot be read."""

    code = "bad-settings"


def kpt_compat(directory: str) -> bool:
    """Whether packages made below this directory keep their oci facts in annotations."""
    here = os.path.abspath(directory)
    while True:
        path = os.path.join(here, SETTINGS_FILE)
        if os.path.isfile(path):
            return _read(path)
        above = os.path.dirname(here)
        if above == here:
            return False
        here = above


def _read(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSettings(f"{path}: {error}", next_step="write [packages] and kpt-compat = true") from error
    packages = data.get("packages", {})
    value = packages.get("kpt-compat", False) if isinstance(packages, dict) else None
    if not isinstance(value, bool):
        raise BadSettings(f"{path}: packages.kpt-compat is not true or false")
    return value
