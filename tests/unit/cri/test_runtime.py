"""Handlers as containerd tells them, with the node's configuration on top (R2, R3, R6)."""

from __future__ import annotations

import json

import pytest

from unlade.containerd import Handler, Handlers, UnknownHandler
from unlade.cri.api import images_pb2 as api
from unlade.cri.runtime import from_status
from unlade.cri.service import NodeConfig
from unlade.model import Platform

HOST = Platform.host()


def _status(*names: str, config: object = None) -> api.StatusResponse:
    handlers = [api.RuntimeHandler(name=name) for name in names]
    info = {"config": json.dumps(config)} if config is not None else {}
    return api.StatusResponse(runtime_handlers=handlers, info=info)


def test_containerds_own() -> None:
    config = {"containerd": {"defaultRuntimeName": "kata", "runtimes": {"runc": {"snapshotter": "native"}}}}
    handlers = from_status(_status("", "kata", "runc", config=config), ())
    assert handlers.default == "kata"
    assert handlers.resolve("runc").snapshotter == "native"
    assert handlers.resolve("").platform == Platform.host()
    with pytest.raises(UnknownHandler):
        handlers.resolve("gone")


def test_the_configuration_says_what_runs_inside() -> None:
    guest = Handler("vm", Platform.parse("linux/arm64"))
    handlers = from_status(_status("", "runc", "vm"), [guest])
    assert handlers.default == "runc"
    assert handlers.resolve("vm") == guest


def test_a_platform_alone_leaves_the_snapshotter_containerds() -> None:
    config = {"containerd": {"runtimes": {"vm": {"snapshotter": "native"}}}}
    platform = Platform.parse("linux/arm64")
    for given, expected in (("", "native"), ("overlayfs", "overlayfs")):
        handlers = from_status(_status("runc", "vm", config=config), [Handler("vm", platform, given)])
        assert handlers.resolve("vm") == Handler("vm", platform, expected)
    assert (
        from_status(_status("runc"), [Handler("new", platform, "")]).resolve("new").snapshotter == "overlayfs"
    )


def test_artifacts_go_everywhere_only_where_nobody_says_where() -> None:
    """R6: several snapshotters, and a kubelet that does not name handlers."""
    two = Handlers("a", {"a": Handler("a", HOST), "b": Handler("b", HOST, "native")})
    assert NodeConfig().everywhere(two)
    assert not NodeConfig(handlers_are_told=True).everywhere(two)
    assert not NodeConfig().everywhere(Handlers.single())


@pytest.mark.parametrize(
    "config", [None, "text", {"containerd": 3}, {"containerd": {"defaultRuntimeName": "x"}}]
)
def test_an_answer_without_details_is_enough(config: object) -> None:
    assert from_status(_status("runc", "other", config=config), ()).default == "runc"
    assert from_status(_status("only", config=config), ()).default == "only"
    assert from_status(_status(config=config), ()).default == "runc"
