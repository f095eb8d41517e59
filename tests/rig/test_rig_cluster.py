"""The shared cluster does what later tests take for granted: logs, exec, accounts, services, registries."""

from __future__ import annotations

import base64
import json
import urllib.request
from pathlib import Path

import pytest

from rig import engines
from rig.cluster import USERS, Rig
from rig.images import BUSYBOX, tar
from rig.kube import ApiError, until
from rig.local_storage import LocalStorage
from rig.pods import Namespace


def test_versions_are_the_pinned_ones(cluster: Rig) -> None:
    assert cluster.api.request("GET", "/version")["gitVersion"] == f"v{engines.version('kube-apiserver')}"
    info = cluster.api.get("Node", "node1")["status"]["nodeInfo"]
    assert info["kubeletVersion"] == f"v{engines.version('kubelet')}"
    assert info["containerRuntimeVersion"] == f"containerd://{engines.version('containerd')}"


def test_pod_runs_with_logs_exec_and_events(namespace: Namespace) -> None:
    pod = namespace.run("hello", command="echo out; echo to-stderr >&2; touch /tmp/ready; sleep 1000000")
    pod.wait_ready()
    until("both lines in the log", lambda: {"out", "to-stderr"} <= set(pod.logs().split()))
    assert "ready" in pod.exec("ls", "/tmp")
    assert pod.exec("cat", stdin=b"through stdin") == "through stdin"
    assert pod.wait_event("Started")["source"]["component"] == "kubelet"
    pod.delete()


def test_failing_pod_shows_its_exit_status(namespace: Namespace) -> None:
    pod = namespace.run("fails", command="echo last words; exit 3")
    status = pod.wait("Failed")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert status["exitCode"] == 3
    assert pod.logs() == "last words\n"


def test_second_runtime_handler(namespace: Namespace) -> None:
    pod = namespace.run("second", command="echo ran", spec={"runtimeClassName": "second"})
    pod.wait("Succeeded")
    with pytest.raises(ApiError, match="absent"):
        namespace.run("third", spec={"runtimeClassName": "absent"})


def test_service_account_token_and_rbac(cluster: Rig, namespace: Namespace) -> None:
    namespace.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader"}})
    account = cluster.account(namespace.name, "reader")
    with pytest.raises(ApiError) as refused:
        account.list("ConfigMap", namespace.name)
    assert refused.value.status == 403
    group = "rbac.authorization.k8s.io"
    namespace.create(
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": {"name": "reader"},
            "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}],
        }
    )
    namespace.create(
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "reader"},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "reader"},
            "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace.name}],
        }
    )
    names = until("the binding is in force", lambda: account.list("ConfigMap", namespace.name))
    assert [c["metadata"]["name"] for c in names] == ["kube-root-ca.crt"]
    account.close()


ASK_THE_API = """
import json, os, ssl, urllib.error, urllib.request
secrets = "/var/run/secrets/kubernetes.io/serviceaccount"
trust = ssl.create_default_context(cafile=f"{secrets}/ca.crt")
base = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
def ask(path):
    headers = {"Authorization": "Bearer " + open(f"{secrets}/token").read()}
    try:
        request = urllib.request.Request(base + path, headers=headers)
        with urllib.request.urlopen(request, context=trust) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)
print(json.dumps({"version": ask("/version"), "secrets": ask("/api/v1/secrets")}))
"""


def test_pod_reaches_the_api_server_as_its_account(cluster: Rig, namespace: Namespace) -> None:
    pod = namespace.run("client", image=cluster.image("python"), command=("python3", "-c", ASK_THE_API))
    pod.wait("Succeeded", seconds=120)
    answer = json.loads(pod.logs())
    assert answer["version"]["gitVersion"] == f"v{engines.version('kubelet')}"
    assert answer["secrets"]["code"] == 403
    assert f"system:serviceaccount:{namespace.name}:default" in answer["secrets"]["message"]


def test_pods_and_services_are_reached_from_pods_and_from_the_machine(namespace: Namespace) -> None:
    script = "mkdir /tmp/www; echo served >/tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"
    pod = namespace.run("server", command=script, metadata={"labels": {"app": "server"}})
    address = pod.wait_ready()["status"]["podIP"]
    made = namespace.create(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "server"},
            "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
        }
    )
    cluster_ip = made["spec"]["clusterIP"]
    # Not `wget -T`: Debian's busybox dies of it.
    loop = f"until timeout 2 wget -q -O - http://{cluster_ip}/; do sleep 0.2; done"
    loop += f"; wget -q -O - http://{address}:8080/"
    client = namespace.run("client", command=loop)
    client.wait("Succeeded")
    assert client.logs() == "served\nserved\n"
    for url in (f"http://{address}:8080/", f"http://{cluster_ip}/"):
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read() == b"served\n"


def test_registry_with_tls_and_authentication(cluster: Rig, namespace: Namespace) -> None:
    layers: list[bytes | Path] = [BUSYBOX.layer(), tar({"marker": b"private\n"})]
    image = cluster.private_registry.push_image("team/private", layers, run=BUSYBOX.config)
    refused = namespace.run("refused", image=image.reference, command="cat /marker")
    refused.wait_event("Failed", contains="no basic auth credentials")
    user, password = list(USERS.items())[1]
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    config = {"auths": {cluster.private_registry.address: {"auth": auth}}}
    namespace.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "pull"},
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": json.dumps(config)},
        }
    )
    allowed = namespace.run(
        "allowed", image=image.reference, command="cat /marker", spec={"imagePullSecrets": [{"name": "pull"}]}
    )
    allowed.wait("Succeeded")
    assert allowed.logs() == "private\n"


def test_local_volume_binds_with_its_first_pod(namespace: Namespace, local_storage: LocalStorage) -> None:
    (volume,) = local_storage.add()
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": local_storage.name,
            "resources": {"requests": {"storage": "1Mi"}},
        },
    }
    namespace.create(claim)
    source = {"/data": {"persistentVolumeClaim": {"claimName": "data"}}}
    pod = namespace.run("writer", command="echo kept >/data/file && cat /data/file", volumes=source)
    pod.wait("Succeeded")
    assert pod.logs() == "kept\n"
    bound = namespace.api.get("PersistentVolumeClaim", "data", namespace.name)
    assert bound["spec"]["volumeName"] == volume
    assert (namespace.rig.node.directory / "volumes" / volume / "file").read_text() == "kept\n"
