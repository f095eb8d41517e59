"""Asking an image service whether it answers: what `unlade node install` and `status` need to know."""

from __future__ import annotations

import os

import grpc

from unlade.cri.api import images_pb2 as api
from unlade.cri.passthrough import Upstream, connect


def unanswered(socket: str, seconds: float = 5.0) -> str:
    """The reason why a socket's image service does not answer; empty when it does, containerd included."""
    if not os.path.exists(socket):
        return "there is no such socket"
    with connect(socket) as channel:
        try:
            Upstream(channel).ask("ImageFsInfo", api.ImageFsInfoRequest().SerializeToString(), seconds)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details() or 'no answer'}"
    return ""
