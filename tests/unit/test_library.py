"""The library's four verbs, as a program would call them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import unlade
from tests.fakes.registry import FakeRegistry
from unlade.errors import InvalidInput


def test_push_plan_deliver_and_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("content")
    events: list[unlade.ProgressEvent] = []
    with FakeRegistry() as fake:
        plain = [fake.host]
        pushed = unlade.push(source, f"{fake.host}/a/b:v1", plain_http=plain, progress=events.append)
        assert str(pushed.manifest.digest) == fake.repository("a/b").tags["v1"]
        copied = unlade.copy(f"{fake.host}/a/b:v1", f"{fake.host}/c:v2", plain_http=plain)
        assert copied.manifest.digest == pushed.manifest.digest
        assert unlade.plan(f"{fake.host}/c:v2", plain_http=plain).kind == "artifact"
        done = unlade.deliver(f"{fake.host}/c:v2", tmp_path / "out", plain_http=plain, progress=events.append)
        assert (tmp_path / "out" / "d" / "f").read_text() == "content"
        assert done.resolved[0].digest == pushed.manifest.digest
        stored = unlade.deliver(f"{fake.host}/c:v2", store=tmp_path / "store", plain_http=plain)
        assert stored.path == str(tmp_path / "store")
    assert {event.kind for event in events} >= {"start", "done"}
    assert capsys.readouterr() == ("", ""), "the library never prints"


def test_errors_are_typed() -> None:
    with pytest.raises(InvalidInput):
        unlade.deliver("not a reference", "out")
    with pytest.raises(AttributeError):
        unlade.nothing_of_that_name  # noqa: B018 - the access itself is the test


def test_names_resolve_and_importing_is_light() -> None:
    for name in unlade.__all__:
        assert getattr(unlade, name) is not None
    heavy = "('urllib3', 'msgspec', 'click')"
    code = f"import sys, unlade; sys.exit(any(name.startswith({heavy}) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
