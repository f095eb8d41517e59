"""Docker's and Podman's files and helpers, read and written; the helpers are real programs (V4)."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path

import pytest

from unlade.registry import (
    Credential,
    DockerConfigCredentials,
    InvalidCredentials,
    dockerconfig,
    erase_credential,
    store_credential,
)
from unlade.registry.dockerconfig import default_paths

HELPER = """#!/bin/sh
# Keeps secrets in files of a directory, in Docker's helper protocol.
dir={dir}
case "$1" in
get) read server || true; file="$dir/$(echo "$server" | tr '/:' '__')"
     [ -f "$file" ] || {{ echo "credentials not found in native keychain"; exit 1; }}
     cat "$file" ;;
store) cat > "$dir/last"; server=$(sed 's/.*"ServerURL": "\\([^"]*\\)".*/\\1/' "$dir/last")
     mv "$dir/last" "$dir/$(echo "$server" | tr '/:' '__')" ;;
erase) read server || true; rm -f "$dir/$(echo "$server" | tr '/:' '__')" ;;
esac
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "docker" / "config.json"


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """docker-credential-files on PATH; returns where it keeps its secrets."""
    programs, secrets = tmp_path / "bin", tmp_path / "secrets"
    programs.mkdir()
    secrets.mkdir()
    write_program(programs / "docker-credential-files", HELPER.format(dir=secrets))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return secrets


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def write(path: Path, document: object) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))
    return str(path)


def auth(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def test_files_in_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", {"auths": {"r.io": {"auth": auth("a", "1")}}})
    second = write(
        tmp_path / "b.json", {"auths": {"r.io": {"auth": auth("b", "2")}, "r.io/x": {"auth": auth("c", "3")}}}
    )
    source = DockerConfigCredentials([first, str(tmp_path / "missing.json"), second])
    assert source.lookup("r.io", "x/y") == [Credential("a", "1"), Credential("c", "3"), Credential("b", "2")]
    assert source.lookup("s.io", "x/y") == []


def test_a_login_is_seen_without_a_restart(config: Path) -> None:
    source = DockerConfigCredentials([str(config)])
    assert source.lookup("r.io", "a") == []
    store_credential("r.io", Credential("u", "p"), path=str(config))
    assert source.lookup("r.io", "a") == [Credential("u", "p")]
    store_credential("r.io", Credential("u", "q"), path=str(config))
    assert source.lookup("r.io", "a") == [Credential("u", "q")]


@pytest.mark.parametrize(
    ("environ", "paths"),
    [
        ({"HOME": "/h"}, ("/h/.docker/config.json", "/h/.config/containers/auth.json")),
        (
            {"HOME": "/h", "XDG_RUNTIME_DIR": "/r", "XDG_CONFIG_HOME": "/c"},
            ("/h/.docker/config.json", "/r/containers/auth.json", "/c/containers/auth.json"),
        ),
        ({"HOME": "/h", "DOCKER_CONFIG": "/d"}, ("/d/config.json",)),
        (
            {"HOME": "/h", "REGISTRY_AUTH_FILE": "/f.json", "DOCKER_CONFIG": "/d"},
            ("/f.json", "/d/config.json"),
        ),
    ],
)
def test_where_files_are(environ: dict[str, str], paths: tuple[str, ...]) -> None:
    assert default_paths(environ) == paths


def test_a_helper_for_a_registry_goes_before_the_store_and_the_file(config: Path, helper: Path) -> None:
    (helper / "r.io").write_text('{"ServerURL":"r.io","Username":"h","Secret":"s"}')
    document = {
        "credHelpers": {"r.io": "files"},
        "credsStore": "missing-helper",
        "auths": {"r.io": {"auth": auth("u", "p")}, "r.io/only": {}},
    }
    source = DockerConfigCredentials([write(config, document)])
    assert source.lookup("r.io", "a/b") == [Credential("h", "s"), Credential("u", "p")]


def test_a_store_that_has_nothing_leaves_the_file(config: Path, helper: Path) -> None:
    document = {"credsStore": "files", "auths": {"r.io": {"auth": auth("u", "p")}}}
    assert DockerConfigCredentials([write(config, document)]).lookup("r.io", "a") == [Credential("u", "p")]


def test_docker_hub_is_asked_for_by_its_old_name(config: Path, helper: Path) -> None:
    (helper / "https___index.docker.io_v1_").write_text('{"Username":"<token>","Secret":"identity"}')
    source = DockerConfigCredentials([write(config, {"credsStore": "files"})])
    assert source.lookup("docker.io", "library/nginx") == [Credential(identity_token="identity")]


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "-x", "a b", "x;rm", "."])
def test_a_helper_has_a_plain_name(config: Path, name: str) -> None:
    source = DockerConfigCredentials([write(config, {"credHelpers": {"r.io": name}})])
    if name == "":
        assert source.lookup("r.io", "a") == []  # turned off for this registry
    else:
        with pytest.raises(InvalidCredentials):
            source.lookup("r.io", "a")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'secret-output'; exit 3", "exit status 3"),
        ("echo 'secret-output'", "something else than JSON"),
        ("exec sleep 60", "took too long"),
        ("yes secret-output | head -c 3000000", "something else than JSON"),
    ],
)
def test_a_helper_that_fails(
    config: Path, helper: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setattr(dockerconfig, "_HELPER_SECONDS", 1.0)
    program = helper.parent / "bin" / "docker-credential-bad"
    write_program(program, f"#!/bin/sh\n{script}\n")
    source = DockerConfigCredentials([write(config, {"credHelpers": {"r.io": "bad"}})])
    with pytest.raises(InvalidCredentials, match=words) as caught:
        source.lookup("r.io", "a")
    assert "secret-output" not in f"{caught.value} {caught.value.next_step}"
    assert source.lookup("s.io", "a") == []


def test_a_helper_that_is_missing(config: Path) -> None:
    source = DockerConfigCredentials([write(config, {"credsStore": "not-installed-here"})])
    with pytest.raises(InvalidCredentials, match="not installed"):
        source.lookup("r.io", "a")


@pytest.mark.parametrize("text", ["[", "[]", '{"auths":1}', '{"credsStore":1}', '{"credHelpers":[]}'])
def test_a_file_that_is_none(config: Path, text: str) -> None:
    config.parent.mkdir()
    config.write_text(text)
    with pytest.raises(InvalidCredentials, match=r"config\.json"):
        DockerConfigCredentials([str(config)]).lookup("r.io", "a")


def test_an_empty_file_is_an_empty_table(config: Path) -> None:
    config.parent.mkdir()
    config.write_text("")
    assert DockerConfigCredentials([str(config)]).lookup("r.io", "a") == []


def test_logging_in_keeps_the_rest_of_the_file_and_is_private(config: Path) -> None:
    write(
        config,
        {"detachKeys": "ctrl-x", "auths": {"s.io": {"auth": auth("x", "y")}}, "credHelpers": {"t.io": "z"}},
    )
    config.chmod(0o644)
    assert store_credential("r.io", Credential("u", "p"), path=str(config)) == str(config)
    document = json.loads(config.read_text())
    assert document["auths"] == {"s.io": {"auth": auth("x", "y")}, "r.io": {"auth": auth("u", "p")}}
    assert (document["detachKeys"], document["credHelpers"]) == ("ctrl-x", {"t.io": "z"})
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert os.listdir(config.parent) == ["config.json"]


def test_logging_in_follows_a_link_to_the_real_file(config: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.json"
    real.write_text("{}")
    config.parent.mkdir()
    config.symlink_to(real)
    store_credential("r.io", Credential("u", "p"), path=str(config))
    assert config.is_symlink()
    assert "r.io" in json.loads(real.read_text())["auths"]


def test_logging_in_to_docker_hub_uses_its_old_name(config: Path) -> None:
    store_credential("docker.io", Credential("u", "p"), path=str(config))
    assert list(json.loads(config.read_text())["auths"]) == ["https://index.docker.io/v1/"]
    assert DockerConfigCredentials([str(config)]).lookup("docker.io", "library/x") == [Credential("u", "p")]
    assert erase_credential("docker.io", path=str(config))
    assert json.loads(config.read_text())["auths"] == {}


def test_logging_in_by_a_helper_and_out_again(config: Path, helper: Path) -> None:
    write(config, {"credsStore": "files"})
    assert store_credential("r.io", Credential("u", "hidden"), path=str(config)) == "docker-credential-files"
    assert "hidden" not in config.read_text()
    source = DockerConfigCredentials([str(config)])
    assert source.lookup("r.io", "a") == [Credential("u", "hidden")]
    assert erase_credential("r.io", path=str(config))
    assert source.lookup("r.io", "a") == []
    assert not erase_credential("r.io", path=str(config))


def test_logging_out_of_a_registry_that_was_never_logged_in(config: Path) -> None:
    assert not erase_credential("r.io", path=str(config))
    assert not config.exists()


def test_an_identity_token_is_stored_as_docker_does(config: Path) -> None:
    store_credential("r.io", Credential(identity_token="i"), path=str(config))
    assert json.loads(config.read_text())["auths"]["r.io"] == {"identitytoken": "i"}


def test_a_failed_write_leaves_the_old_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_credential("r.io", Credential("u", "p"), path=str(config))
    before = config.read_bytes()

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        store_credential("r.io", Credential("u", "q"), path=str(config))
    assert config.read_bytes() == before
    assert os.listdir(config.parent) == ["config.json"]
