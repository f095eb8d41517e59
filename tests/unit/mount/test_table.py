"""The mount table is read exactly, whatever people name their directories."""

from __future__ import annotations

import pytest

from unlade.errors import MountError
from unlade.mount import mount_layers
from unlade.mount.table import parse_line


def test_a_line_with_optional_fields_and_escapes() -> None:
    line = rb"36 35 98:0 /root\040dir /mnt/a\011b\134c rw,noatime master:1 shared:2 - ext4 /dev/vda1 rw,a=b"
    entry = parse_line(line + b"\n")
    assert entry.path == b"/mnt/a\tb\\c"
    assert entry.root == b"/root dir"
    assert entry.options == {"rw", "noatime"}
    assert entry.file_system == "ext4"
    assert entry.source == b"/dev/vda1"
    assert entry.super_options == "rw,a=b"


def test_a_line_without_optional_fields() -> None:
    entry = parse_line(b"22 1 0:21 / /proc rw,nosuid - proc proc rw\n")
    assert (entry.mount_id, entry.path, entry.file_system) == (22, b"/proc", "proc")


def test_names_that_are_not_text_survive() -> None:
    assert parse_line(b"22 1 0:21 / /mnt/\xff rw - tmpfs none rw\n").path == b"/mnt/\xff"


def test_a_system_without_mounts_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(MountError) as caught:
        mount_layers(["/somewhere"], "/anywhere")
    assert "unlade pull" in caught.value.next_step
