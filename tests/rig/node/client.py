"""A CRI client for tests: the calls that the kubelet makes, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import Message

from unlade.cri.api import images_pb2 as api
from unlade.cri.passthrough import IMAGE_SERVICE, connect

_Answer = TypeVar("_Answer", bound=Message)


class Client:
    """A CRI client that speaks our messages."""

    def __init__(self, socket: object) -> None:
        self.channel = connect(str(socket))

    def call(self, name: str, request: Message, answer: type[_Answer], seconds: float = 30) -> _Answer:
        """One call; raises grpc.RpcError."""
        method = self.channel.unary_unary(
            f"/{IMAGE_SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        found: _Answer = method(request, timeout=seconds)
        return found

    def status(
        self, image: str, handler: str = "", annotations: Mapping[str, str] | None = None
    ) -> api.Image | None:
        """ImageStatus; None when it is not there."""
        spec = api.ImageSpec(image=image, runtime_handler=handler, annotations=dict(annotations or {}))
        answer = self.call("ImageStatus", api.ImageStatusRequest(image=spec), api.ImageStatusResponse)
        return answer.image if answer.HasField("image") else None

    def images(self) -> list[str]:
        """The IDs that ListImages tells."""
        answer = self.call("ListImages", api.ListImagesRequest(), api.ListImagesResponse)
        return sorted(image.id for image in answer.images)

    def details(self) -> list[list[str]]:
        """The names of each image that ListImages tells, pinned ones included."""
        answer = self.call("ListImages", api.ListImagesRequest(), api.ListImagesResponse)
        return [[*image.repo_tags, *image.repo_digests] for image in answer.images]

    def listed(self, handler: str, image: str = "") -> list[tuple[str, str]]:
        """ListImages with a filter that names a handler: IDs, and the handler that is told with each."""
        wanted = api.ImageFilter(image=api.ImageSpec(image=image, runtime_handler=handler))
        answer = self.call("ListImages", api.ListImagesRequest(filter=wanted), api.ListImagesResponse)
        return sorted((image.id, image.spec.runtime_handler) for image in answer.images)

    def pull(
        self,
        image: str,
        handler: str = "",
        annotations: Mapping[str, str] | None = None,
        auth: api.AuthConfig | None = None,
        seconds: float = 120,
    ) -> str:
        """PullImage; the ID."""
        spec = api.ImageSpec(image=image, runtime_handler=handler, annotations=dict(annotations or {}))
        request = api.PullImageRequest(image=spec, auth=auth)
        return self.call("PullImage", request, api.PullImageResponse, seconds=seconds).image_ref

    def remove(self, image: str, handler: str = "") -> None:
        """RemoveImage."""
        spec = api.ImageSpec(image=image, runtime_handler=handler)
        self.call("RemoveImage", api.RemoveImageRequest(image=spec), api.RemoveImageResponse)
