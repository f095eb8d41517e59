"""The driver, wired: its socket, the kubelet's registration socket, and the threads behind them.

Started in this order: the store is open, what a killed predecessor left is tidied away, the driver's socket
is in its place, and only then the kubelet is told. Sockets are made under another name and renamed into
place, so that whoever connects finds the old driver or the new one. Every call has a thread while it runs;
those that wait for content are bounded by the queue of fetches, so a thread is free for the others.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from unlade.csi.api import csi_pb2 as api
from unlade.csi.api import registration_pb2
from unlade.csi.identity import Identity
from unlade.csi.node import Call, Node
from unlade.csi.observed import Metrics
from unlade.csi.pods import Pod
from unlade.csi.registration import SERVICE, Registration
from unlade.csi.statuses import message, status
from unlade.errors import InvalidInput, UnladeError

_log = logging.getLogger(__name__)

# Calls that do not wait for content, at once.
_OTHER_CALLS: Final = 64
# Only root may publish: whoever can, decides what is mounted where.
_SOCKET_MODE: Final = 0o600

# unix(7): 108 bytes with the final NUL.
_SOCKET_NAME: Final = 107

Answer = Callable[[Any, Call], Any]


class CsiServer:
    """Serves the driver on a socket; `close` lets running calls end within a grace.

    `controller` holds CSI's Controller calls by name; empty when only inline volumes are served.
    """

    def __init__(
        self,
        socket: str,
        identity: Identity,
        node: Node,
        metrics: Metrics,
        *,
        waiting: int,
        controller: Mapping[str, Answer] | None = None,
        registration: tuple[str, Registration] | None = None,
    ) -> None:
        self._socket = socket
        self._metrics = metrics
        self._server = _server(waiting + _OTHER_CALLS, "unlade-csi")
        self._serve("Identity", _identity(identity))
        self._serve("Node", _node(node))
        if controller:
            self._serve("Controller", controller)
        self._registrar: grpc.Server | None = None
        self._registration = registration
        if registration is not None:
            self._registrar = _server(2, "unlade-registration")
            self._registrar.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(SERVICE, _registration(registration[1])),)
            )

    def start(self) -> None:
        """Listen, then tell the kubelet; the sockets are in their places when this returns."""
        _listen(self._server, self._socket)
        if self._registrar is not None and self._registration is not None:
            _listen(self._registrar, self._registration[0])

    def close(self, grace: float = 5.0) -> None:
        """Take no more calls, give running ones their grace; the driver's socket stays for who comes next."""
        if self._registrar is not None:
            self._registrar.stop(None).wait()
        self._server.stop(grace).wait()

    def _serve(self, service: str, answers: Mapping[str, Answer]) -> None:
        handlers = {name: self._handler(name, answer) for name, answer in answers.items()}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(f"csi.v1.{service}", handlers),)
        )

    def _handler(self, name: str, answer: Answer) -> grpc.RpcMethodHandler:
        request, response = getattr(api, f"{name}Request"), getattr(api, f"{name}Response")

        def call(ask: Any, context: grpc.ServicerContext) -> Any:
            return self._answer(name, answer, ask, context)

        return grpc.unary_unary_rpc_method_handler(
            call, request_deserializer=request.FromString, response_serializer=response.SerializeToString
        )

    def _answer(self, name: str, answer: Answer, ask: Any, context: grpc.ServicerContext) -> Any:
        """Turns our errors into the caller's status, and counts."""
        began = time.monotonic()
        code = grpc.StatusCode.INTERNAL
        about = _about(ask)
        try:
            result = answer(ask, Call(context.time_remaining(), context.is_active))
            code = grpc.StatusCode.OK
            level = logging.INFO if about else logging.DEBUG
            _log.log(level, name, extra={"about": {**about, "seconds": round(time.monotonic() - began, 4)}})
            return result
        except UnladeError as error:
            code = status(error)
            self._metrics.errors.labels(error.code).inc()
            told = {**about, "code": error.code, "next": error.next_step}
            _log.warning("%s: %s", name, error.message, extra={"about": told})
            context.abort(code, message(error))
        except Exception as error:
            self._metrics.errors.labels("internal").inc()
            _log.exception("%s", name, extra={"about": about})
            context.abort(code, f"an error of the driver: {type(error).__name__}; next: see the driver's log")
        finally:
            self._metrics.calls.labels(name, code.name).observe(time.monotonic() - began)


def _identity(identity: Identity) -> dict[str, Answer]:
    return {
        "GetPluginInfo": lambda ask, _: identity.info(ask),
        "GetPluginCapabilities": lambda ask, _: identity.capabilities(ask),
        "Probe": lambda ask, _: identity.probe(ask),
    }


def _node(node: Node) -> dict[str, Answer]:
    return {
        "NodePublishVolume": node.publish,
        "NodeUnpublishVolume": node.unpublish,
        "NodeGetVolumeStats": node.stats,
        "NodeExpandVolume": node.expand,
        "NodeGetCapabilities": node.capabilities,
        "NodeGetInfo": node.info,
    }


def _registration(registration: Registration) -> dict[str, grpc.RpcMethodHandler]:
    pb = registration_pb2
    return {
        "GetInfo": grpc.unary_unary_rpc_method_handler(
            lambda ask, _: registration.info(ask),
            request_deserializer=pb.InfoRequest.FromString,
            response_serializer=pb.PluginInfo.SerializeToString,
        ),
        "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(
            lambda ask, _: registration.notified(ask),
            request_deserializer=pb.RegistrationStatus.FromString,
            response_serializer=pb.RegistrationStatusResponse.SerializeToString,
        ),
    }


def _server(threads: int, name: str) -> grpc.Server:
    # A socket of the same path may still belong to a predecessor: the port is never shared.
    return grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix=name), options=[("grpc.so_reuseport", 0)]
    )


def _listen(server: grpc.Server, socket: str) -> None:
    directory, name = os.path.split(socket)
    os.makedirs(directory, mode=0o755, exist_ok=True)
    # A dot in front: the kubelet's plugin watcher leaves such names alone.
    fresh = os.path.join(directory, f".{name}.{os.getpid()}")
    if len(os.fsencode(fresh)) > _SOCKET_NAME:
        raise InvalidInput(
            f"the socket's path {socket} is too long: the system allows {_SOCKET_NAME} bytes",
            next_step="choose a shorter directory",
        )
    server.add_insecure_port(f"unix://{fresh}")
    server.start()
    os.chmod(fresh, _SOCKET_MODE)
    os.rename(fresh, socket)


def _about(ask: Any) -> dict[str, Any]:
    """What a call is for, as the log names it: never secrets."""
    about: dict[str, Any] = {}
    if getattr(ask, "volume_id", ""):
        about["volume"] = ask.volume_id
    context = getattr(ask, "volume_context", None)
    if context:
        pod = Pod.of(context)
        if pod.name:
            about |= {"pod": str(pod), "uid": pod.uid}
        for name in ("reference", "references"):
            if context.get(name):
                about["reference"] = context[name]
    return about
