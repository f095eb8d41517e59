"""A disk that fails under a publish or unpublish: the call says so, nothing is left, the next one works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from tests.fakes.driver import Driver
from tests.fakes.registry import FakeRegistry
from tests.unit.csi.conftest import Put
from unlade.kernel import failpoints

pytestmark = pytest.mark.root

PUBLISHING = [
    "store.lease.pinned",
    "csi.publish.held",
    "store.layout.file-synced",
    "store.layout.file-renamed",
    "csi.record.written",
    "mount.target.made",
    "mount.attach.attached",
    "csi.publish.mounted",
]
UNPUBLISHING = [
    "mount.detach.detached",
    "mount.target.removed",
    "csi.unpublish.unmounted",
    "csi.record.unlinked",
    "csi.record.dropped",
    "csi.unpublish.released",
]


@contextmanager
def failing(point: str, error: str) -> Iterator[None]:
    """Let one step fail, once, in this process."""
    armed = failpoints._Armed(f"{point}:1={error}")
    failpoints._armed = armed
    try:
        yield
    finally:
        failpoints._armed = None
    assert armed.left <= 0, f"{point} was not passed"


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("point", PUBLISHING)
def test_a_publish_that_fails_leaves_nothing(
    driver: Driver, fake: FakeRegistry, put: Put, point: str, error: str
) -> None:
    put("team/site", "v1", {"file": b"x"})
    name = str(fake.reference("team/site", "v1"))
    driver.publish("first", reference=name)
    driver.unpublish("first")
    with failing(point, error), pytest.raises(grpc.RpcError) as failed:
        driver.publish("web", reference=name)
    assert failed.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED)
    # The kubelet may ask again, or forget the volume without another word.
    driver.nothing_left()
    assert not driver.target("web").exists()
    mounted = driver.publish("web", reference=name)
    assert (mounted / "file").read_bytes() == b"x"
    driver.unpublish("web")
    driver.nothing_left()


@pytest.mark.parametrize("point", UNPUBLISHING)
def test_an_unpublish_that_fails_succeeds_in_the_end(
    driver: Driver, fake: FakeRegistry, put: Put, point: str
) -> None:
    put("team/site", "v1", {"file": b"x"})
    driver.publish("web", reference=str(fake.reference("team/site", "v1")))
    with failing(point, "EIO"), pytest.raises(grpc.RpcError):
        driver.unpublish("web")
    driver.unpublish("web")
    driver.nothing_left()
    assert not driver.target("web").exists()
