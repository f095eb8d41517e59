"""The frame of the command line: lazy commands, exit codes, options on either side of the command."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from unlade import errors
from unlade.cli import exits, root
from unlade.cli.root import COMMANDS, cli, main
from unlade.cli.settings import Settings, shared_options
from unlade.registry.errors import NotFound, Unauthorized


def run(*arguments: str) -> int:
    """The program, in this process; its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("pkg", "controller")])
def test_every_command_has_its_line_of_help_and_examples(name: str) -> None:
    module, attribute, _, text = COMMANDS[name]
    command = getattr(importlib.import_module(module), attribute)
    assert command.name == name
    assert command.short_help == text
    assert command.help is not None
    assert "Examples:\n" in command.help
    assert f"unlade {name}" in command.help.split("Examples:")[1]
    shown = CliRunner().invoke(command, ["--help"], prog_name=f"unlade {name}")
    assert shown.exit_code == 0


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_module_of_the_table_exists(name: str) -> None:
    assert find_spec(COMMANDS[name][0]) is not None


def test_help_imports_no_room_of_the_house() -> None:
    """What keeps `unlade --help` under 150 ms, checked without a clock."""
    code = (
        "import sys\n"
        "from unlade.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'rich', 'msgspec', 'urllib3', 'ruamel', 'sqlite3', 'ctypes', 'ssl', 'subprocess'}\n"
        "rooms = {m for m in sys.modules if m.startswith('unlade.') and not m.startswith('unlade.cli')}\n"
        "print(sorted(heavy & set(sys.modules)), sorted(rooms), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[] []"
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidInput("x"), 3),
        (errors.NothingProduced("x"), 3),
        (errors.RegistryError("x"), 4),
        (Unauthorized("x", status=401), 5),
        (NotFound("x", status=404), 6),
        (errors.IntegrityError("x"), 7),
        (errors.UnsafeArchive("x"), 8),
        (errors.StoreError("x"), 9),
        (errors.MountError("x"), 10),
        (errors.MergeConflict("x"), 11),
        (errors.DeadlineExceeded("x"), 12),
        (errors.UnladeError("x"), 13),
        (ValueError("x"), 70),
    ],
)
def test_exit_codes_never_change(error: Exception, code: int) -> None:
    assert exits.exit_code(error) == code


def test_every_category_has_a_number() -> None:
    categories = {
        kind.__name__
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert categories - {"NothingProduced"} <= {name for name, _, _ in exits.EXIT_CODES}
    numbers = [code for _, code, _ in exits.EXIT_CODES]
    assert len(set(numbers)) == len(numbers)


def test_the_documented_table_is_the_real_one() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    for _, code, meaning in exits.EXIT_CODES:
        assert f"| {code} | {meaning} |" in text
    for code in (exits.FOUND, exits.USAGE, exits.UNEXPECTED, exits.INTERRUPTED):
        assert f"| {code} |" in text


def test_an_error_says_what_and_what_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", "r.example/UPPER:v1", "dir") == 3
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("next: ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [("--debug", "pull", "r.example/UP", "d"), ("pull", "--debug", "r.example/UP", "d")]
)
def test_debug_shows_the_traceback(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 3
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: " in err


def test_hostile_text_does_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.report(errors.RegistryError("\x1b[31mred\x07", next_step="a\x1b]0;t"), debug=False) == 4
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\x07" not in err


def test_a_bug_is_called_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise KeyError("what")

    monkeypatch.setattr(root.cli, "get_command", lambda ctx, name: broken)
    assert run("anything") == 70
    assert "bug" in capsys.readouterr().err


def test_a_missing_dependency_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name}", name="kubernetes")

    monkeypatch.setattr(importlib, "import_module", absent)
    assert run("controller") == 3
    err = capsys.readouterr().err
    assert "kubernetes" in err
    assert "next: pip install 'unlade[kube]'" in err


def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("no-such-command") == 2
    assert run("pull") == 2
    assert run("pull", "--no-such-option", "x") == 2
    capsys.readouterr()


def test_interrupted_is_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(root.cli, "get_command", lambda ctx, name: stopped)
    assert run("anything") == 130
    assert "interrupted" in capsys.readouterr().err


def seen(*arguments: str) -> Settings:
    """The settings that a command sees after these arguments."""
    found: list[Settings] = []

    @click.command()
    @click.argument("rest", nargs=-1)
    @shared_options
    @click.pass_obj
    def probe(settings: Settings, rest: tuple[str, ...]) -> None:
        found.append(settings)

    group = click.Group(name="unlade", params=list(cli.params), commands={"probe": probe})
    group.main(list(arguments), standalone_mode=False, obj=Settings())
    return found[0]


def test_shared_options_may_stand_on_either_side() -> None:
    before = seen("--plain-http", "--store", "/a", "--timeout", "3", "probe")
    after = seen("probe", "--plain-http", "--store", "/a", "--timeout", "3")
    assert before == after == Settings(store_path="/a", plain_http=True, timeout=3.0)
    both = seen("--plain-http", "--store", "/a", "probe", "--store", "/b", "-q")
    assert both == Settings(store_path="/b", plain_http=True, quiet=True)
    assert seen("probe") == Settings()


def test_plain_http_names_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    named = frozenset({"r:1"})
    monkeypatch.delenv("UNLADE_PLAIN_HTTP", raising=False)
    assert Settings().plain_hosts(named) == frozenset()
    assert Settings(plain_http=True).plain_hosts(named) == named
    monkeypatch.setenv("UNLADE_PLAIN_HTTP", "a:1, b ,")
    assert Settings().plain_hosts(named) == {"a:1", "b"}
    assert Settings(plain_http=True).plain_hosts(named) == {"a:1", "b", "r:1"}


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNLADE_STORE", "/from-env")
    assert Settings(store_path="/named").store_directory() == "/named"
    assert Settings().store_directory() == "/from-env"
    monkeypatch.delenv("UNLADE_STORE")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert Settings().store_directory() == "/var/lib/unlade"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert Settings().store_directory() == "/xdg/unlade"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert Settings().store_directory() == "/home/me/.local/share/unlade"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == 0
    assert capsys.readouterr().out.startswith("unlade 0.")
    assert run("version", "-o", "json") == 0
    assert "python" in json.loads(capsys.readouterr().out)
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("unlade 0.")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", shell) == 0
    assert "_UNLADE_COMPLETE" in capsys.readouterr().out


def test_completion_offers_commands_and_stored_references(tmp_path: Path) -> None:
    index = {
        "schemaVersion": 2,
        "manifests": [{"annotations": {"org.opencontainers.image.ref.name": "r.example/team/app:v1"}}, {}],
    }
    (tmp_path / "index.json").write_text(json.dumps(index))

    def complete(words: str, count: int) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "unlade"],
            env={
                "_UNLADE_COMPLETE": "bash_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": str(count),
                "UNLADE_STORE": str(tmp_path),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert "plain,pull" in complete("unlade pu", 1)
    assert "plain,r.example/team/app:v1" in complete("unlade rmi r.ex", 2)
    assert complete("unlade rmi zz", 2).strip() == ""
