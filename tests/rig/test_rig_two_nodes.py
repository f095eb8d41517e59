"""Two kubelets with a containerd each on one machine: both run pods, and neither touches the other's."""

from __future__ import annotations

import time

from rig.cluster import Rig
from rig.kube import until
from rig.pods import Namespace, Pod

# Longer than a kubelet's sync and housekeeping periods: a kubelet that took the other's pods for strays would
# have killed them by then.
COEXISTENCE_SECONDS = 12


def _run(namespace: Namespace, name: str, node: str, command: str) -> Pod:
    return namespace.run(name, command=command, spec={"nodeName": node})


def test_pods_live_on_both_nodes_and_reach_each_other(two_nodes: Rig) -> None:
    namespace = Namespace(two_nodes)
    serve = "mkdir /tmp/www; hostname >/tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"
    pods = {node.name: _run(namespace, f"on-{node.name}", node.name, serve) for node in two_nodes.nodes}
    addresses = {name: pod.wait_ready()["status"]["podIP"] for name, pod in pods.items()}
    assert addresses["node1"].rpartition(".")[0] == addresses["node2"].rpartition(".")[0]

    for here, there in (("node1", "node2"), ("node2", "node1")):
        answer = pods[here].exec("wget", "-q", "-O", "-", f"http://{addresses[there]}:8080/")
        assert answer == f"on-{there}\n"

    time.sleep(COEXISTENCE_SECONDS)
    for pod in pods.values():
        status = pod.read()["status"]["containerStatuses"][0]
        assert status["restartCount"] == 0
        assert "running" in status["state"]
    namespace.delete()


def test_each_node_has_its_own_containerd_and_cgroup_root(two_nodes: Rig) -> None:
    namespace = Namespace(two_nodes)
    pod = _run(namespace, "only-second", "node2", "cat /proc/1/cgroup; sleep 1000000")
    pod.wait_ready()
    first, second = two_nodes.nodes
    image = two_nodes.image("busybox")
    assert image in two_nodes.ctr(second, "images", "ls", "-q").split()
    assert pod.read()["status"]["containerStatuses"][0]["containerID"].removeprefix(
        "containerd://"
    ) in two_nodes.ctr(second, "containers", "ls", "-q")
    assert first.cgroup != second.cgroup
    until("the container's cgroup in its log", lambda: second.cgroup in pod.logs())
    namespace.delete()
