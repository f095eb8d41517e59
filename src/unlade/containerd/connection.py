"""The connection to containerd: one channel, a namespace, calls that survive a restart of the other side.

Every call carries the namespace and, where content or snapshots are made, the lease that holds them from
birth. A call that finds containerd gone waits for it to come back, for a bounded time, and is sent again;
so a caller may see `Exists` or `Missing` for what its own first attempt did, and each call site says what
that means there. Nothing else is retried. `state` is a directory for locks (see store.locks): all who use
one containerd must name the same one. It holds nothing worth keeping; a reboot may empty it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from unlade.containerd.api import namespaces_pb2, version_pb2
from unlade.containerd.errors import ContainerdUnavailable, Exists, Missing, explained
from unlade.errors import DeadlineExceeded
from unlade.model import Deadline
from unlade.store.failure import explaining
from unlade.store.locks import KeyLocks, OwnerLock

DEFAULT_ADDRESS: Final = "/run/containerd/containerd.sock"
DEFAULT_STATE: Final = Path("/run/unlade")
# A restart of containerd takes a second or two; with many containers and a busy disk up to half a minute.
PATIENCE: Final = 30.0
# containerd's own limit for one message in either direction.
_MAX_MESSAGE: Final = 16 << 20
_RETRY_PAUSE: Final = 0.1
# Snapshots of artifacts are named by a hash with this secret. Without it, whoever knows an artifact's
# digests could state the snapshot's name as the diff ID of an image of their own, and containerd would
# take its layer for present and show them content that they may not pull (V5).
_SALT_LABEL: Final = "unlade.dev/salt"


_Q = TypeVar("_Q", bound=Message)
_R = TypeVar("_R", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[_Q, _R]):
    """One call of a service: its path, what goes in and what comes back."""

    path: str
    request: type[_Q]
    answer: type[_R]


_VERSION: Final = Method(
    "/containerd.services.version.v1.Version/Version", Empty, version_pb2.VersionResponse
)
_NAMESPACES: Final = "/containerd.services.namespaces.v1.Namespaces"
_GET: Final = Method(
    f"{_NAMESPACES}/Get", namespaces_pb2.GetNamespaceRequest, namespaces_pb2.GetNamespaceResponse
)
_CREATE: Final = Method(
    f"{_NAMESPACES}/Create", namespaces_pb2.CreateNamespaceRequest, namespaces_pb2.CreateNamespaceResponse
)
_UPDATE: Final = Method(
    f"{_NAMESPACES}/Update", namespaces_pb2.UpdateNamespaceRequest, namespaces_pb2.UpdateNamespaceResponse
)


class Containerd:
    """A client of one namespace; thread-safe. A context manager, or call `close`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        namespace: str = "k8s.io",
        state: Path = DEFAULT_STATE,
        patience: float = PATIENCE,
    ) -> None:
        self.address = address.removeprefix("unix://")
        self.namespace = namespace
        self.patience = patience
        self.state = state
        locks, owners = state / "locks", state / "owners"
        with explaining(f"use {state}"):
            for directory in (state, locks, owners):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.locks = KeyLocks(locks)
            self.owner = OwnerLock(owners, uuid.uuid4().hex)
        self._salt = b""
        self._salting = threading.Lock()
        self._stubs: dict[str, Any] = {}
        self._channel = grpc.insecure_channel(
            f"unix://{self.address}",
            options=[
                ("grpc.max_receive_message_length", _MAX_MESSAGE),
                ("grpc.max_send_message_length", _MAX_MESSAGE),
                # gRPC's own pauses grow to two minutes, far longer than a restart takes.
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 500),
                # How long one attempt may take, whatever its name says: a busy machine needs a second.
                ("grpc.min_reconnect_backoff_ms", 3000),
                # Two clients of one process share nothing, as two processes would not.
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; leases of this process are then dead for `recover`. Idempotent."""
        self._channel.close()
        self.owner.close()

    def patient(self, seconds: float) -> Containerd:
        """The same connection with other patience; it lives as long as this one, which the caller closes."""
        other = copy.copy(self)
        other.patience = seconds
        return other

    def version(self, *, deadline: Deadline | None = None) -> str:
        """containerd's version; waits for it, then raises ContainerdUnavailable."""
        return self.call(_VERSION, Empty(), "ask containerd's version", deadline=deadline).version

    def call(
        self,
        method: Method[_Q, _R],
        request: _Q,
        what: str,
        *,
        lease: str = "",
        deadline: Deadline | None = None,
        seconds: float = 0.0,
    ) -> _R:
        """One answer; sent again while containerd is away, as long as patience and deadline allow.

        `what` completes "cannot …" in the error's message; `seconds` is how long containerd may work on it
        where that is longer than our patience.
        """
        stub = self._stubs.get(method.path)
        if stub is None:
            stub = self._stubs[method.path] = self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
        until = time.monotonic() + self.patience
        while True:
            try:
                answer: _R = stub(
                    request,
                    metadata=self._metadata(lease),
                    timeout=_seconds(max(until, time.monotonic() + seconds), deadline),
                    wait_for_ready=True,
                )
                return answer
            except grpc.RpcError as error:
                self._pause_or_raise(error, what, until, deadline)

    def stream(self, method: Method[_Q, _R], request: _Q, what: str) -> Iterator[_R]:
        """The answers of a listing; not sent again, because half of it was given out already."""
        stub = self._channel.unary_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.answer.FromString,
        )
        try:
            yield from stub(request, metadata=self._metadata(""), wait_for_ready=True)
        except grpc.RpcError as error:
            raise explained(what, error) from error

    def exchange(
        self, method: Method[_Q, _R], requests: Iterator[_Q], *, lease: str, deadline: Deadline | None
    ) -> Any:
        """A call that streams both ways, as gRPC gives it: the caller handles RpcError and cancels it."""
        stub = self._channel.stream_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.answer.FromString,
        )
        left = deadline.remaining() if deadline else None
        return stub(requests, metadata=self._metadata(lease), timeout=left, wait_for_ready=True)

    def salt(self) -> bytes:
        """The secret of this node that names its snapshots; made once, kept in the namespace's labels."""
        with self._salting:
            if not self._salt:
                with self.locks.hold(f"salt-{self.namespace}"):
                    self._salt = self._read_or_make_salt()
            return self._salt

    def noted(self, label: str) -> str:
        """What a label of the namespace says; empty when it is not there."""
        what = f"read containerd's namespace {self.namespace}"
        try:
            found = self.call(_GET, namespaces_pb2.GetNamespaceRequest(name=self.namespace), what)
        except Missing:
            return ""
        text: str = found.namespace.labels.get(label, "")
        return text

    def note(self, label: str, value: str) -> None:
        """Set a label of the namespace, which is made where it is missing; others stay."""
        what = f"label containerd's namespace {self.namespace}"
        with contextlib.suppress(Exists):  # made by somebody else, or by our own first attempt
            new = namespaces_pb2.Namespace(name=self.namespace)
            self.call(_CREATE, namespaces_pb2.CreateNamespaceRequest(namespace=new), what)
        changed = namespaces_pb2.Namespace(name=self.namespace, labels={label: value})
        request = namespaces_pb2.UpdateNamespaceRequest(namespace=changed)
        request.update_mask.paths.append(f"labels.{label}")
        self.call(_UPDATE, request, what)

    def _read_or_make_salt(self) -> bytes:
        text = self.noted(_SALT_LABEL)
        if not text:
            text = uuid.uuid4().hex + uuid.uuid4().hex
            self.note(_SALT_LABEL, text)
        return text.encode()

    def _metadata(self, lease: str) -> tuple[tuple[str, str], ...]:
        namespace = ("containerd-namespace", self.namespace)
        return (namespace, ("containerd-lease", lease)) if lease else (namespace,)

    def _pause_or_raise(
        self, error: grpc.RpcError, what: str, until: float, deadline: Deadline | None
    ) -> None:
        """Pause when containerd is away and there is time left, else raise."""
        code = error.code()
        if deadline is not None:
            deadline.check()
        if code == grpc.StatusCode.UNAVAILABLE and time.monotonic() + _RETRY_PAUSE < until:
            time.sleep(_RETRY_PAUSE)
            return
        ours = explained(what, error)
        if isinstance(ours, DeadlineExceeded) and code != grpc.StatusCode.CANCELLED:
            # The caller's own time is not over: it is containerd that does not answer.
            ours = ContainerdUnavailable(
                f"cannot {what}: containerd does not answer at {self.address}",
                next_step="check that containerd runs",
            )
        raise ours from error


def _seconds(until: float, deadline: Deadline | None) -> float:
    patience = max(0.001, until - time.monotonic())
    left = deadline.remaining() if deadline is not None else None
    return patience if left is None else max(0.001, min(patience, left))
