"""Docker's and Podman's credential files and helpers: read for every pull, written by login and logout.

Files: REGISTRY_AUTH_FILE, then DOCKER_CONFIG/config.json; when neither variable is set,
~/.docker/config.json, XDG_RUNTIME_DIR/containers/auth.json and ~/.config/containers/auth.json. In a file,
`credHelpers` for the registry go before `credsStore`, and that before `auths` (with Podman's path keys).
Helpers speak Docker's protocol: `docker-credential-NAME get|store|erase`, the server on stdin, JSON on
stdout; they are time-limited, their output is capped and never repeated in a message. Writing is atomic
(temporary file, fsync, rename), mode 0600, and keeps what else stands in the file.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from unlade.registry.credentials import (
    DOCKER_KEY,
    AuthEntry,
    Credential,
    matching_keys,
    normalise_key,
)
from unlade.registry.errors import InvalidCredentials
from unlade.registry.programs import run

_HELPER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
# Cloud helpers make a request or two; a keychain may ask the user. Beyond this, something hangs.
_HELPER_SECONDS: Final = 30.0
_MAX_BYTES: Final = 1 << 20
# How helpers written with Docker's library say "nothing here"; they exit with 1 all the same.
_HELPER_NOTHING: Final = "credentials not found"
# The user name with which a helper marks an identity token.
_TOKEN_USER: Final = "<token>"  # noqa: S105 # a marker, not a secret


class _File(msgspec.Struct, rename={"creds_store": "credsStore", "cred_helpers": "credHelpers"}):
    auths: dict[str, AuthEntry] | None = None
    creds_store: str | None = None
    cred_helpers: dict[str, str] | None = None


_FILE = msgspec.json.Decoder(_File)


class _HelperAnswer(msgspec.Struct, rename="pascal"):
    username: str = ""
    secret: str = ""


_HELPER_ANSWER = msgspec.json.Decoder(_HelperAnswer)


class DockerConfigCredentials:
    """The credential files of this user; read again when they change, so a login is seen by a daemon."""

    def __init__(self, paths: Sequence[str] | None = None) -> None:
        self._paths = tuple(paths) if paths is not None else default_paths(os.environ)
        self._read: dict[str, tuple[tuple[int, int, int], _File]] = {}

    def lookup(self, registry: str, repository: str) -> Sequence[Credential]:
        """Candidates of every file in order; raises InvalidCredentials for a broken file or helper."""
        found: list[Credential] = []
        for path in self._paths:
            file = self._load(path)
            if file is not None:
                found += _from_file(file, path, registry, repository)
        return list(dict.fromkeys(found))

    def _load(self, path: str) -> _File | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
        cached = self._read.get(path)
        if cached is not None and cached[0] == stamp:
            return cached[1]
        file = _parse(_read(path), path)
        self._read[path] = (stamp, file)
        return file


def default_paths(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The files to read, in order. A variable that names a file means that file and not the usual places."""
    named = []
    if environ.get("REGISTRY_AUTH_FILE"):
        named.append(environ["REGISTRY_AUTH_FILE"])
    if environ.get("DOCKER_CONFIG"):
        named.append(os.path.join(environ["DOCKER_CONFIG"], "config.json"))
    if named:
        return tuple(named)
    home = environ.get("HOME") or os.path.expanduser("~")
    paths = [os.path.join(home, ".docker/config.json")]
    if environ.get("XDG_RUNTIME_DIR"):
        paths.append(os.path.join(environ["XDG_RUNTIME_DIR"], "containers/auth.json"))
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    paths.append(os.path.join(config, "containers/auth.json"))
    return tuple(paths)


def store_credential(registry: str, credential: Credential, *, path: str | None = None) -> str:
    """Remember a credential as `docker login` does: by helper when one is configured, else in the file.

    Returns where it went, for the user. Atomic. Raises InvalidCredentials.
    """
    path = path or default_paths(os.environ)[0]
    document = _document(path)
    file = _parse(msgspec.json.encode(document), path)
    server = _server_key(registry)
    helper = _helper_for(file, registry, "")
    if helper is not None:
        user = _TOKEN_USER if credential.identity_token else credential.username
        secret = credential.identity_token or credential.password
        _run_helper(helper, "store", json.dumps({"ServerURL": server, "Username": user, "Secret": secret}))
        # As Docker does: an empty entry says that the helper has one.
        document.setdefault("auths", {})[server] = {}
        _write(path, document)
        return f"docker-credential-{helper}"
    entry = {}
    if credential.username or credential.password:
        pair = f"{credential.username}:{credential.password}".encode()
        entry["auth"] = base64.b64encode(pair).decode()
    if credential.identity_token:
        entry["identitytoken"] = credential.identity_token
    document.setdefault("auths", {})[server] = entry
    _write(path, document)
    return path


def erase_credential(registry: str, *, path: str | None = None) -> bool:
    """Forget a registry's credential; False when there was none. Atomic."""
    path = path or default_paths(os.environ)[0]
    document = _document(path)
    file = _parse(msgspec.json.encode(document), path)
    helper = _helper_for(file, registry, "")
    known = False
    if helper is not None:
        known = _ask_helper(helper, _server_key(registry)) is not None
        if known:
            _run_helper(helper, "erase", _server_key(registry))
    auths = document.get("auths") or {}
    gone = [key for key in auths if normalise_key(key) == normalise_key(registry)]
    for key in gone:
        known = known or bool(auths[key])
        del auths[key]
    if gone:
        _write(path, document)
    return known


def _from_file(file: _File, path: str, registry: str, repository: str) -> list[Credential]:
    found: list[Credential] = []
    helper = _helper_for(file, registry, repository)
    if helper is not None:
        credential = _ask_helper(helper, _server_key(registry))
        if credential is not None:
            found.append(credential)
    auths = file.auths or {}
    for key in matching_keys(auths, registry, repository):
        credential = auths[key].credential(f"{path}, entry {key!r}")
        if credential is not None:
            found.append(credential)
    return found


def _helper_for(file: _File, registry: str, repository: str) -> str | None:
    helpers = file.cred_helpers or {}
    for key in matching_keys(helpers, registry, repository):
        # An empty name turns the helper off for that registry.
        return helpers[key] or None
    return file.creds_store or None


def _server_key(registry: str) -> str:
    return DOCKER_KEY if normalise_key(registry) == "docker.io" else registry


def _ask_helper(helper: str, server: str) -> Credential | None:
    output = _run_helper(helper, "get", server, may_lack=True)
    if output is None:
        return None
    try:
        answer = _HELPER_ANSWER.decode(output)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidCredentials(
            f"docker-credential-{helper} answered with something else than JSON",
            next_step="run it by hand: echo HOST | docker-credential-NAME get",
        ) from None
    if not answer.secret:
        return None
    if answer.username == _TOKEN_USER:
        return Credential(identity_token=answer.secret)
    return Credential(answer.username, answer.secret)


def _run_helper(helper: str, verb: str, text: str, *, may_lack: bool = False) -> bytes | None:
    """Run a helper; None when it has nothing and that is allowed. Its output may be a secret: never shown."""
    if not _HELPER_NAME.fullmatch(helper):
        raise InvalidCredentials(
            f"{helper[:80]!r} is not the name of a credential helper",
            next_step="correct credsStore or credHelpers",
        )
    program = f"docker-credential-{helper}"
    ran = run([program, verb], text.encode(), seconds=_HELPER_SECONDS)
    if ran.status == 0:
        return ran.output
    if may_lack and _HELPER_NOTHING in ran.output.decode("utf-8", "replace").lower():
        return None
    raise InvalidCredentials(
        f"{program} {verb} failed with exit status {ran.status}",
        next_step=f"run it by hand: echo {'HOST' if verb != 'store' else '…'} | {program} {verb}",
    )


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidCredentials(
            f"{path} cannot be read: {error.strerror}", next_step="check its permissions"
        ) from error
    if len(data) > _MAX_BYTES:
        raise InvalidCredentials(
            f"{path} is larger than {_MAX_BYTES} bytes", next_step="check what the file is"
        )
    return data


def _parse(data: bytes, path: str) -> _File:
    if not data.strip():
        return _File()
    try:
        return _FILE.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        # Not `from error`: the text may quote a secret.
        raise InvalidCredentials(
            f"{path} is not a Docker or Podman credential file", next_step="correct it, or log in again"
        ) from None


def _document(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    data = _read(path)
    _parse(data, path)
    document: dict[str, Any] = json.loads(data) if data.strip() else {}
    if document.get("auths") is None:
        document.pop("auths", None)
    return document


def _write(path: str, document: dict[str, Any]) -> None:
    # Through a link: dotfile managers keep the real file elsewhere, and a rename would replace the link.
    real = os.path.realpath(path)
    directory = os.path.dirname(real)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".config-")  # mkstemp makes it 0600
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent="\t")
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, real)
    except BaseException:
        os.unlink(temporary)
        raise
