"""A token server as registries use them (distribution's token authentication): Basic GET or OAuth2 POST.

Invariant: a token grants what was asked for, cut down to what the user may do, and nothing else; `grants`
tells the registry what each token carries. Tests change `users`, `rights`, `anonymous` and the fault hooks.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs

from tests.fakes.httpd import FakeServer, Request, Response

Access = frozenset[tuple[str, str]]  # (repository, action)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token carries."""

    user: str | None
    access: Access
    expires: float


def basic_user(header: str | None, users: dict[str, str]) -> str | None:
    """The user whose name and password a Basic header carries rightly, else None."""
    if header is None or not header.startswith("Basic "):
        return None
    try:
        name, _, password = base64.b64decode(header[6:], validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return name if name in users and users[name] == password else None


class TokenServer(FakeServer):
    """Issues opaque tokens at /token. `rights(user, repository)` gives the actions: all, unless told."""

    def __init__(
        self,
        *,
        users: dict[str, str] | None = None,
        identity_tokens: dict[str, str] | None = None,
        anonymous: frozenset[str] = frozenset(),
        rights: Callable[[str, str], frozenset[str]] | None = None,
        expires_in: int | None = 300,
        address: str = "127.0.0.1",
        name: str | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.users = users or {}
        self.identity_tokens = identity_tokens or {}  # identity token → user
        self.anonymous = anonymous  # actions that need no user
        self.rights = rights or (lambda user, repository: frozenset({"pull", "push", "delete"}))
        self.expires_in = expires_in
        self.grants: dict[str, Grant] = {}
        super().__init__(address=address, name=name, tls=tls)

    @property
    def realm(self) -> str:
        """The URL to name in a challenge."""
        return f"{self.url}/token"

    def check(self, token: str, repository: str, action: str) -> bool:
        """True when the token is known, alive and carries that action."""
        grant = self.grants.get(token)
        return grant is not None and grant.expires > time.monotonic() and (repository, action) in grant.access

    def answer(self, request: Request) -> Response:
        """GET or POST /token."""
        if request.path != "/token":
            return Response(404)
        if request.method == "POST":
            form = parse_qs(request.body.decode())
            scopes = [one for value in form.get("scope", []) for one in value.split()]
            if form.get("grant_type") == ["refresh_token"]:
                user = self.identity_tokens.get(form.get("refresh_token", [""])[0])
            else:
                name, password = form.get("username", [""])[0], form.get("password", [""])[0]
                user = name if self.users.get(name) == password and name else None
            if user is None:
                return self._refused()
        else:
            scopes = [one for value in request.query.get("scope", []) for one in value.split()]
            user = basic_user(request.authorization, self.users)
            if request.authorization is not None and user is None:
                return self._refused()
        token = self.issue(user, scopes)
        answer: dict[str, object] = {"access_token" if request.method == "POST" else "token": token}
        if self.expires_in is not None:
            answer["expires_in"] = self.expires_in
        return Response(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def issue(self, user: str | None, scopes: list[str]) -> str:
        """A new token for the scopes, cut down to what the user may do."""
        access: set[tuple[str, str]] = set()
        for scope in scopes:
            kind, _, rest = scope.partition(":")
            repository, _, actions = rest.rpartition(":")
            if kind != "repository":
                continue
            allowed = self.anonymous if user is None else self.rights(user, repository)
            access.update((repository, action) for action in actions.split(",") if action in allowed)
        token = secrets.token_urlsafe(24)
        self.grants[token] = Grant(user, frozenset(access), time.monotonic() + (self.expires_in or 60))
        return token

    def _refused(self) -> Response:
        body = {"errors": [{"code": "UNAUTHORIZED", "message": "incorrect username or password"}]}
        return Response(401, {"Content-Type": "application/json"}, json.dumps(body).encode())
