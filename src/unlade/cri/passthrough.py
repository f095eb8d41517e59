"""Passing calls on as they are: bytes in, the same bytes out.

Requests and answers are not decoded, so fields that we do not know, or that a later Kubernetes adds, arrive
untouched. Metadata, deadlines and cancellation travel down; status codes, messages and trailing metadata
travel up. The channel reconnects by itself when containerd restarts: a call that finds it away waits for it
within a short patience instead of failing at once, because the kubelet would report a broken runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

IMAGE_SERVICE: Final = "runtime.v1.ImageService"
UNARY: Final = ("ListImages", "ImageStatus", "PullImage", "RemoveImage", "ImageFsInfo")
STREAMING: Final = ("StreamImages",)
# Answered from containerd's memory: not worth a hand-over between threads, which costs more than the answer.
_AT_ONCE: Final = frozenset({"ListImages", "ImageStatus", "ImageFsInfo"})
# A kubelet accepts messages up to 16 MiB, and nodes with thousands of images come near grpc's default of 4.
MESSAGE_BYTES: Final = 16 << 20
# How long a call waits for a containerd that is starting; the kubelet's own calls give up after 2 minutes.
_PATIENCE: Final = 10.0
# Between tries: a starting containerd listens some hundred milliseconds before it answers.
_PAUSE: Final = 0.1
# Pseudo headers and those that this hop's own transport sets.
_HOP: Final = ("grpc-", ":", "user-agent", "content-type", "te")

Handler = Callable[[bytes, grpc.ServicerContext], bytes]
StreamHandler = Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]


def connect(address: str) -> grpc.Channel:
    """A channel to a unix socket; it connects when first used and again whenever it must."""
    return grpc.insecure_channel(
        f"unix://{address.removeprefix('unix://')}",
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
            # containerd comes back within a second or two: look again quickly.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # How long one attempt may take, whatever its name says: a busy machine needs a second.
            ("grpc.min_reconnect_backoff_ms", 3000),
        ],
    )


class Upstream:
    """containerd's own image service; thread-safe."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._unary = {name: channel.unary_unary(f"/{IMAGE_SERVICE}/{name}") for name in UNARY}
        self._streaming = {name: channel.unary_stream(f"/{IMAGE_SERVICE}/{name}") for name in STREAMING}

    def call(self, name: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Pass one call on; ends the caller's call with containerd's status when it fails."""
        patience = time.monotonic() + _PATIENCE
        while True:
            try:
                return self._call(name, request, context)
            except grpc.RpcError as error:
                if not self._try_again(error, context, patience):
                    raise abort(context, error) from error

    def stream(self, name: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Pass a streamed answer on, message by message."""
        patience = time.monotonic() + _PATIENCE
        begun = False
        while True:
            try:
                for message in self._stream(name, request, context):
                    begun = True
                    yield message
                return
            except grpc.RpcError as error:
                # A second stream would repeat what was sent already.
                if begun or not self._try_again(error, context, patience):
                    raise abort(context, error) from error

    def ask(self, name: str, request: bytes, seconds: float = _PATIENCE) -> bytes:
        """A call of our own; waits for a containerd that is starting. Raises grpc.RpcError."""
        answer: bytes = self._unary[name](request, timeout=seconds, wait_for_ready=True)
        return answer

    def _call(self, name: str, request: bytes, context: grpc.ServicerContext) -> bytes:
        left = time_left(context)
        if left is not None and name in _AT_ONCE:
            # In this thread, until the caller's deadline: its cancellation is not waited for.
            answered: tuple[bytes, Any] = self._unary[name].with_call(
                request, timeout=left, metadata=_metadata(context)
            )
            _trailing(context, answered[1])
            return answered[0]
        call = self._unary[name].future(request, timeout=left, metadata=_metadata(context))
        if not context.add_callback(call.cancel):
            call.cancel()  # the caller is gone already
        try:
            answer: bytes = call.result()
        except grpc.FutureCancelledError as error:
            context.abort(grpc.StatusCode.CANCELLED, "the caller cancelled")
            raise error  # not reached: abort raises
        _trailing(context, call)
        return answer

    def _stream(self, name: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        call = self._streaming[name](request, timeout=time_left(context), metadata=_metadata(context))
        if not context.add_callback(call.cancel):
            call.cancel()
        yield from call
        _trailing(context, call)

    def _try_again(self, error: grpc.RpcError, context: grpc.ServicerContext, patience: float) -> bool:
        """Whether containerd was away, or listens but is still starting, and may answer now.

        Every call of this service may be repeated.
        """
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            return False
        left = time_left(context)
        until = patience if left is None else min(patience, time.monotonic() + left)
        time.sleep(_PAUSE)
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(timeout=max(0.0, until - time.monotonic()))
        except grpc.FutureTimeoutError:
            ready.cancel()
            return False
        return bool(context.is_active()) and time.monotonic() < until


def passing(upstream: Upstream) -> dict[str, Any]:
    """Handlers that pass every call of the service on."""
    handlers: dict[str, Any] = {}
    for name in UNARY:
        handlers[name] = grpc.unary_unary_rpc_method_handler(_bound(upstream.call, name))
    for name in STREAMING:
        handlers[name] = grpc.unary_stream_rpc_method_handler(_bound(upstream.stream, name))
    return handlers


def abort(context: grpc.ServicerContext, error: grpc.RpcError) -> RuntimeError:
    """End the caller's call as the call below ended: its code, message and trailing metadata."""
    trailing = error.trailing_metadata()
    if trailing:
        context.set_trailing_metadata(tuple(trailing))
    context.abort(error.code(), error.details() or "")
    return RuntimeError("abort did not raise")


def _bound(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def handle(request: bytes, context: grpc.ServicerContext) -> Any:
        return call(name, request, context)

    return handle


def time_left(context: grpc.ServicerContext) -> float | None:
    """Seconds until the caller's deadline; None when it has none."""
    left = context.time_remaining()
    # grpc tells "no deadline" as some hundreds of years, which overflows on the way down.
    return left if left is not None and left < 10**9 else None


def _metadata(context: grpc.ServicerContext) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key, value in context.invocation_metadata() if not key.lower().startswith(_HOP)]


def _trailing(context: grpc.ServicerContext, call: Any) -> None:
    trailing = call.trailing_metadata()
    if trailing:
        context.set_trailing_metadata(tuple(trailing))
