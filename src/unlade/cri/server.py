"""The server: a unix socket that the kubelet is told to use, and the threads behind it.

Every call has a thread while it runs. Pulls may take minutes, so they have a queue of their own: at most
`parallel` run at once, at most `per_registry` of them from one registry, at most `waiting` more wait for
their turn, and the threads of all of them together are fewer than the server has. So however many pulls there
are, a thread is free for Status, and a registry that hardly answers does not keep all turns (V20).

The socket is made under another name and renamed into place, so that a kubelet that starts at the same
moment finds either the old service or the new one; the kubelet exits when the socket is missing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import grpc

from unlade.cri.api import images_pb2 as api
from unlade.cri.images import Images
from unlade.cri.observed import Metrics
from unlade.cri.passthrough import IMAGE_SERVICE, MESSAGE_BYTES, Handler, Upstream, abort, passing
from unlade.cri.pulls import Pulls
from unlade.cri.statuses import message, status
from unlade.errors import InvalidInput, UnladeError
from unlade.model import Reference

_log = logging.getLogger(__name__)

# A kubelet with no limit of its own may start a pull for every pod of a full node.
WAITING_PULLS: Final = 256
# Calls that are no pulls, at once: a kubelet has a handful, `crictl` and we ourselves a few more.
_OTHER_CALLS: Final = 64
# Registries whose turns are counted; a node uses a handful.
_REGISTRIES: Final = 1024
# Only root may ask for images: whoever can, can fill the disk.
_SOCKET_MODE: Final = 0o600


class PullQueue:
    """At most so many pulls at once, in all and of one registry, at most so many waiting; thread-safe."""

    def __init__(self, parallel: int, waiting: int = WAITING_PULLS, *, per_registry: int = 0) -> None:
        """`per_registry` 0: as many as run at all."""
        self.capacity = parallel + waiting
        self._per_registry = per_registry or parallel
        self._registries: dict[str, threading.Semaphore] = {}
        self._turns = threading.Semaphore(parallel)
        self._admitted = threading.Semaphore(self.capacity)
        self._lock = threading.Lock()
        self.running = 0
        self.waiting = 0

    @contextmanager
    def turn(self, context: grpc.ServicerContext, registry: str = "") -> Iterator[None]:
        """Wait for a turn as long as the caller does; ends the call when the queue is full."""
        if not self._admitted.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.capacity} pulls are running or waiting on this node; the kubelet tries again",
            )
        try:
            # The registry's turn comes first: who waits for it keeps nobody else from running.
            with ExitStack() as turns:
                self._count(waiting=1)
                try:
                    for semaphore in (self._of(registry), self._turns):
                        _acquire(semaphore, context)
                        turns.callback(semaphore.release)
                finally:
                    self._count(waiting=-1)
                self._count(running=1)
                turns.callback(self._count, running=-1)
                yield
        finally:
            self._admitted.release()

    def _of(self, registry: str) -> threading.Semaphore:
        with self._lock:
            if len(self._registries) >= _REGISTRIES and registry not in self._registries:
                # Names come from pods. Whoever still waits for one that is forgotten is not lost, only
                # counted apart from those to come.
                self._registries.clear()
            return self._registries.setdefault(registry, threading.Semaphore(self._per_registry))

    def _count(self, *, running: int = 0, waiting: int = 0) -> None:
        with self._lock:
            self.running += running
            self.waiting += waiting


def _acquire(semaphore: threading.Semaphore, context: grpc.ServicerContext) -> None:
    while not semaphore.acquire(timeout=1.0):
        if not context.is_active():
            context.abort(grpc.StatusCode.CANCELLED, "the caller gave up while waiting for its turn")


class ImageServer:
    """Serves the image service on a socket; `close` lets running calls end within a grace."""

    def __init__(
        self,
        socket: str,
        upstream: Upstream,
        images: Images,
        metrics: Metrics,
        *,
        watched: Pulls | None = None,
        parallel_pulls: int = 8,
        parallel_pulls_per_registry: int = 0,
    ) -> None:
        self._socket = socket
        self.pulls = PullQueue(parallel_pulls, per_registry=parallel_pulls_per_registry)
        self._watched = watched or Pulls(metrics)
        self._images = images
        self._metrics = metrics
        self._closing = False
        metrics.watch_queue(lambda: self.pulls.running, lambda: self.pulls.waiting)
        self._server = grpc.server(
            ThreadPoolExecutor(self.pulls.capacity + _OTHER_CALLS, thread_name_prefix="unlade-cri"),
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_send_message_length", MESSAGE_BYTES),
            ],
        )
        handlers = passing(upstream)
        handlers["PullImage"] = grpc.unary_unary_rpc_method_handler(self._pull)
        handlers["ImageStatus"] = grpc.unary_unary_rpc_method_handler(self._status)
        handlers["RemoveImage"] = grpc.unary_unary_rpc_method_handler(self._remove)
        handlers["ListImages"] = grpc.unary_unary_rpc_method_handler(self._list)
        handlers["StreamImages"] = grpc.unary_stream_rpc_method_handler(self._stream)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(IMAGE_SERVICE, handlers),)
        )

    def _pull(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """PullImage, in its turn."""
        about = _about(request)
        came = time.monotonic()
        with self._watched.begin(request) as pull, self.pulls.turn(context, _registry(pull.reference)):
            began = time.monotonic()
            self._metrics.waits.observe(began - came)
            answer = self._answer("PullImage", partial(self._images.pull, pull=pull), request, context, about)
        seconds = round(time.monotonic() - began, 3)
        _log.info("pulled", extra={"about": {**about, "seconds": seconds}})
        return answer

    def _status(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return self._answer("ImageStatus", self._images.status, request, context, {})

    def _remove(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return self._answer("RemoveImage", self._images.remove, request, context, {})

    def _list(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return self._answer("ListImages", self._images.listed, request, context, {})

    def _stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from self._images.streamed(request, context)
        except UnladeError as error:
            self._refuse("StreamImages", error, context, {})

    def _answer(
        self, name: str, call: Handler, request: bytes, context: grpc.ServicerContext, about: dict[str, Any]
    ) -> bytes:
        """Turns our errors, and those of calls of our own below, into the caller's status."""
        began = time.monotonic()
        code = grpc.StatusCode.UNKNOWN
        try:
            answer = call(request, context)
            code = grpc.StatusCode.OK
            return answer
        except UnladeError as error:
            code = status(error)
            self._refuse(name, error, context, about)
            raise  # not reached: abort raises
        except grpc.RpcError as error:
            code = error.code()
            raise abort(context, error) from error
        except ValueError:
            if not self._closing:
                raise
            # gRPC's word for a channel that was closed: this call has outlived its grace.
            code = grpc.StatusCode.UNAVAILABLE
            context.abort(code, "the service is stopping; the kubelet tries again")
            raise  # not reached: abort raises
        finally:
            if code == grpc.StatusCode.UNKNOWN:
                code = context.code() or code  # containerd's own, passed on
            self._metrics.calls.labels(name, code.name).observe(time.monotonic() - began)

    def _refuse(
        self, name: str, error: UnladeError, context: grpc.ServicerContext, about: dict[str, Any]
    ) -> None:
        """End a call with our error; raises."""
        self._metrics.errors.labels(error.code).inc()
        told = {**about, "code": error.code, "next": error.next_step}
        _log.warning("%s: %s", name, error.message, extra={"about": told})
        context.abort(status(error), message(error))

    def start(self) -> None:
        """Listen; the socket is in its place when this returns."""
        directory = os.path.dirname(self._socket)
        os.makedirs(directory, mode=0o755, exist_ok=True)
        fresh = f"{self._socket}.{os.getpid()}"
        self._server.add_insecure_port(f"unix://{fresh}")
        self._server.start()
        os.chmod(fresh, _SOCKET_MODE)
        os.rename(fresh, self._socket)

    def wait(self) -> None:
        """Until the server ends."""
        self._server.wait_for_termination()

    def close(self, grace: float = 5.0) -> None:
        """Take no more calls, give running ones their grace; the socket stays for who comes next."""
        self._closing = True
        self._server.stop(grace).wait()


def _registry(reference: str) -> str:
    try:
        return Reference.parse(reference).registry
    except InvalidInput:
        return ""  # refused soon, by containerd


def _about(request: bytes) -> dict[str, Any]:
    """What a pull is for, as the log names it: never the credentials."""
    told = api.PullImageRequest.FromString(request)
    pod = told.sandbox_config.metadata
    about = {"reference": told.image.image}
    if told.image.runtime_handler:
        about["handler"] = told.image.runtime_handler
    if pod.name:
        about |= {"pod": f"{pod.namespace}/{pod.name}", "uid": pod.uid}
    return about
