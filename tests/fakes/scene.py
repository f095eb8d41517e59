"""A stage for tests of what a client does to others: a registry, its token server, and a stranger.

The registry is at 127.0.0.1, the stranger at 127.0.0.2 (another host, for every rule about origins). Alice
has a password; it and every token issued are secrets, and `assert_no_leak` looks for them in all that
strangers received. Waits are short, so that a storm of retries would be seen in the request counts and not
in the test's duration.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from tests.fakes.httpd import FakeServer
from tests.fakes.registry import FakeRegistry
from tests.fakes.tokens import TokenServer
from unlade.model import Deadline, Descriptor, Reference
from unlade.registry import Credential, Registry, RegistryConfig, StaticCredentials

USER, PASSWORD = "alice", "correct-horse-battery-staple"
FAST = RegistryConfig(
    connect_timeout=2.0,
    answer_timeout=1.0,
    min_rate=1024,
    rate_window=0.5,
    attempts=3,
    backoff=0.005,
    backoff_cap=0.01,
    retry_after_cap=0.2,
    mirror_penalty=30.0,
)
REPO = "team/app"


class Scene:
    """A context manager. `client()` is logged in as Alice; `auth` is "token", "basic" or None."""

    def __init__(self, *, auth: str | None = "token") -> None:
        self._stack = ExitStack()
        users = {USER: PASSWORD}
        self.tokens = self._stack.enter_context(TokenServer(users=users))
        self.registry = self._stack.enter_context(
            FakeRegistry(
                users=users if auth == "basic" else None,
                tokens=self.tokens if auth == "token" else None,
                strict=False,
            )
        )
        self.stranger = self._stack.enter_context(
            FakeRegistry(address="127.0.0.2", share=self.registry, strict=False)
        )
        self.credential = Credential(USER, PASSWORD)
        self.data = bytes(range(256)) * 40
        self.layer = self.registry.put_blob(REPO, self.data)
        self.image = self.registry.put_image(REPO, "v1", [self.layer])

    @property
    def ref(self) -> Reference:
        """The image by its tag."""
        return self.registry.reference(REPO, "v1")

    def deadline(self) -> Deadline:
        """Long enough for any test that passes."""
        return Deadline.after(30)

    def config(self, *, plain: tuple[FakeServer, ...] | None = None, **changes: Any) -> RegistryConfig:
        """FAST; plain HTTP to the registry and its token server, and to nobody else unless told."""
        servers = (self.registry, self.tokens) if plain is None else plain
        return replace(FAST, plain_http=frozenset(server.host for server in servers), **changes)

    def client(self, config: RegistryConfig | None = None) -> Registry:
        """A client with Alice's credentials for the registry; closed with the scene."""
        credentials = StaticCredentials({self.registry.host: self.credential})
        return self._stack.enter_context(Registry(config or self.config(), credentials))

    def layer_at(self, ref: Reference | None = None, **changes: Any) -> Descriptor:
        """The layer's descriptor, changed."""
        fields = {"media_type": self.layer.media_type, "digest": self.layer.digest, "size": self.layer.size}
        return Descriptor(**{**fields, **changes})

    def assert_no_leak(self, *others: FakeServer) -> None:
        """No stranger received a credential, in whatever part of a request."""
        secrets = [PASSWORD, self.credential.basic()[6:], *self.tokens.grants]
        for server in (self.stranger, *others):
            for request in server.requests:
                assert request.authorization is None, (request.method, request.path)
                text = f"{request.path} {request.query} {request.headers} {request.body!r}"
                assert not [secret for secret in secrets if secret in text]

    def assert_calm(self, limit: int) -> None:
        """At most so many requests in all: no retry storm."""
        count = sum(len(server.requests) for server in (self.registry, self.tokens, self.stranger))
        assert count <= limit, f"{count} requests"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
