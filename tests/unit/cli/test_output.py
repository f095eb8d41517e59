"""Formats of results, and progress where there is no terminal."""

from __future__ import annotations

import io
import json
import re
import threading
from typing import Any

import pytest
from ruamel.yaml import YAML

from unlade.cli.output import emit, human, printable
from unlade.cli.progress import Bars, Lines, Silent, make_progress
from unlade.model import Digest
from unlade.transfer.progress import ProgressEvent

DATA = {"name": "a", "sizes": [1, 2, None], "nested": {"yes": True, "no": "no", "text": "ünïcode\x1b"}}


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_json_and_yaml_show_the_same_data(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    emit(DATA, output)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    read: Any = json.loads(text) if output == "json" else YAML(typ="safe").load(text)
    assert read == DATA


def test_yaml_keeps_the_order_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"zebra": 1, "apple": 2}, "yaml")
    assert capsys.readouterr().out == "zebra: 1\napple: 2\n"


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    emit({}, "table", ("A", "LONGER"), [("one", 2), ("x\x1b[1m\ny", "long cell")])
    assert capsys.readouterr().out == "A            LONGER\none          2\nx\\x1b[1m\\ny  long cell\n"


def test_printable_escapes_what_a_terminal_would_obey() -> None:
    assert printable("plain ünï") == "plain ünï"
    assert printable("a\tb\x00\x9b31m") == "a\\tb\\x00\\x9b31m"
    assert printable(b"caf\xe9".decode("utf-8", "surrogateescape")) == "caf\\xe9"
    assert printable("\u202egnp") == "\\u202egnp"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "?"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 30, "1.0 GiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_human(size: int | None, text: str) -> None:
    assert human(size) == text


def event(kind: Any, done: int = 0, label: str = "") -> ProgressEvent:
    return ProgressEvent(kind, "r/x:v1", Digest.of(b"x"), done, 2048, label)


def test_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    watcher = make_progress(quiet=False, stream=out)
    assert isinstance(watcher, Lines)
    for one in (
        event("start"),
        event("bytes", 100),
        event("resumed", 1024),
        event("done", 2048, "weights.bin"),
    ):
        watcher(one)
    watcher(event("present"))
    watcher.close()
    short = Digest.of(b"x").hex[:12]
    assert out.getvalue().splitlines() == [
        f"{short}  resumed at 1.0 KiB of 2.0 KiB",
        f"weights.bin ({short})  2.0 KiB done",
        f"{short}  already there",
    ]


def test_quiet_is_silent() -> None:
    out = io.StringIO()
    watcher = make_progress(quiet=True, stream=out)
    assert isinstance(watcher, Silent)
    watcher(event("done"))
    watcher.close()
    assert out.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_on_a_terminal_honour_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    watcher = make_progress(quiet=False, stream=out)
    assert isinstance(watcher, Bars)
    workers = [threading.Thread(target=watcher, args=(event("bytes", 10 * n, "[bold]x"),)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    watcher(event("done"))
    watcher.close()
    watcher.close()
    text = out.getvalue()
    assert "[bold]x" in text  # a title is text, not markup
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(quiet=False, stream=Terminal()), Lines)
