"""The agent replaced while pods read shared content and write to volumes of their own (V21): none notices.

`UNLADE_FULL=1`: fifty pods; CI has three. The agent is asked to end and started again, then killed and
started again; meanwhile a pod that comes waits for it, and one that goes, goes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest

from rig.cluster import Rig
from rig.kube import until
from rig.pods import Namespace
from tests.figures import figure
from tests.rig.csi.conftest import inline
from tests.rig.csi.seeded import CLASS, Agent, ephemeral, install, source

# Reads all of the shared content and its own, writes and reads back; any error ends it for good. Builtins of
# the shell, but for the sleep: fifty of these must not be what the machine is busy with.
WORK = """
set -e
n=0
while :; do
  n=$((n + 1))
  read -r a < /shared/a; read -r b < /shared/d/b; read -r own < /own/a
  echo $n > /own/written
  read -r back < /own/written
  test "$a$b$own$back" = onetwoone$n
  echo $n
  sleep 1
done
"""


@pytest.fixture
def agent(cluster: Rig) -> Iterator[Agent]:
    made = Agent(cluster, install(cluster), cluster.node.directory / f"upgrade-{secrets.token_hex(3)}")
    made.start()
    yield made
    if made.process is not None and made.process.poll() is None:
        made.stop()
    cluster.kubectl("delete", "storageclass", CLASS)


def test_replaced_under_running_pods(cluster: Rig, agent: Agent, namespace: Namespace, full: bool) -> None:
    count = 50 if full else 3
    content = cluster.registry.push_artifact("upgrade/content", {"a": b"one\n", "d/b": b"two\n"})
    source(namespace, "content", content.reference)
    volumes = {"/shared": inline(content.reference), "/own": ephemeral("content", "16Mi")}
    pods = [namespace.run(f"worker-{number}", command=WORK, volumes=volumes) for number in range(count)]
    for pod in pods:
        pod.wait_ready(seconds=600)

    def turns(name: str) -> int:
        return int((namespace.pod(name).logs().split() or ["0"])[-1])

    before = {pod.name: turns(pod.name) for pod in pods}
    went = pods.pop()
    agent.stop()
    went.delete(wait=False)
    came = namespace.run("came-meanwhile", command=WORK, volumes=volumes)
    before_start = turns(pods[0].name)
    until("the pods go on without it", lambda: turns(pods[0].name) > before_start)
    began = time.monotonic()
    agent.start()
    came.wait_ready(seconds=200)
    away = time.monotonic() - began
    cluster.api.gone("Pod", went.name, namespace.name, seconds=120)
    agent.kill()
    agent.start()
    for pod in pods:
        until("it goes on", lambda pod=pod: turns(pod.name) > before[pod.name] + 2, seconds=60)  # type: ignore[misc]
    for pod in [*pods, came]:
        status = pod.read()["status"]["containerStatuses"][0]
        assert (status["restartCount"], list(status["state"])) == (0, ["running"]), pod.name
    figure("csi agent replaced", count, "pods", away, "s until a waiting pod was ready")
    for pod in [*pods, came]:
        pod.delete(wait=False)
    until("the volumes are gone", lambda: not agent.volumes(), seconds=300)
