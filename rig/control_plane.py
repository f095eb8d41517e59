"""Command lines and configuration of etcd, the Kubernetes control plane and kube-proxy.

Pure rendering: given a rig's addresses and certificates, each function returns an argument vector; nothing is
started here. All components share the rig's network namespace, so ports are the standard ones. Each component
has an identity of its own and RBAC is on, as in an installed cluster; so is ServiceAccount admission.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rig.engines import binary
from rig.pki import Authority, KeyPair
from rig.settings import Settings

APISERVER_PORT = 6443


@dataclass(frozen=True)
class ControlPlane:
    """Where the control plane of one rig listens and keeps its files."""

    directory: Path
    address: str
    service_network: str
    pod_network: str
    authority: Authority
    settings: Settings

    @property
    def server(self) -> str:
        """The API server's URL, reachable from the machine, the nodes and the pods."""
        return f"https://{self.address}:{APISERVER_PORT}"

    @property
    def cluster_ip(self) -> str:
        """The ClusterIP of the service `kubernetes`: the first address of the range."""
        return self.service_network.rpartition(".")[0] + ".1"

    def kubeconfig(self, name: str, *, user: str, groups: tuple[str, ...] = ()) -> Path:
        """A kubeconfig for a user with a client certificate; made once."""
        path = self.directory / f"{name}.kubeconfig"
        if not path.exists():
            pair = self.authority.issue(name, user=user, groups=groups)
            client = {"client-certificate": str(pair.cert), "client-key": str(pair.key)}
            path.write_text(json.dumps(self.kubeconfig_for(name, client), indent=1))
        return path

    def kubeconfig_for(self, name: str, credentials: Mapping[str, str]) -> dict[str, Any]:
        """A kubeconfig document with the given `user` entry (JSON is YAML, so every client reads it)."""
        cluster = {"server": self.server, "certificate-authority": str(self.authority.ca.cert)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rig", "cluster": cluster}],
            "users": [{"name": name, "user": dict(credentials)}],
            "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": name}}],
            "current-context": "rig",
        }

    def etcd(self) -> list[str]:
        """etcd, on loopback of the rig's namespace: nobody but the API server talks to it."""
        client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        return [
            str(binary("etcd")),
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            "--unsafe-no-fsync",  # the data does not outlive the rig
            *self._flags("etcd"),
        ]

    def apiserver(self) -> list[str]:
        """kube-apiserver with RBAC, the Node authorizer and service account tokens."""
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost")
        hosts = (*names, "127.0.0.1", self.address, self.cluster_ip)
        serving = self.authority.issue("apiserver", user="kube-apiserver", hosts=hosts)
        # Bound by RBAC to system:kubelet-api-admin when the rig is up: without it logs and exec are refused.
        kubelet_client = self.authority.issue("apiserver-kubelet", user="kube-apiserver-kubelet-client")
        accounts = self.authority.signing_key("service-accounts")
        return [
            str(binary("kube-apiserver")),
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=0.0.0.0",
            f"--advertise-address={self.address}",
            f"--secure-port={APISERVER_PORT}",
            *_serving(serving),
            f"--client-ca-file={self.authority.ca.cert}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={accounts}",
            f"--service-account-signing-key-file={accounts}",
            f"--service-cluster-ip-range={self.service_network}",
            f"--kubelet-certificate-authority={self.authority.ca.cert}",
            f"--kubelet-client-certificate={kubelet_client.cert}",
            f"--kubelet-client-key={kubelet_client.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            *self._flags("kube-apiserver"),
        ]

    def controller_manager(self, controllers: str) -> list[str]:
        """kube-controller-manager with the given controllers, each under an account of its own."""
        config = self.kubeconfig("controller-manager", user="system:kube-controller-manager")
        return [
            str(binary("kube-controller-manager")),
            *_clients(config),
            "--leader-elect=false",
            f"--controllers={controllers}",
            "--use-service-account-credentials=true",
            # At the stock 20 calls a second it takes 4 s until every controller has its token. Tests that
            # compare rates give their own limits, which come later on the command line and win.
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            f"--service-account-private-key-file={self.authority.signing_key('service-accounts')}",
            f"--root-ca-file={self.authority.ca.cert}",
            f"--cluster-signing-cert-file={self.authority.ca.cert}",
            f"--cluster-signing-key-file={self.authority.ca.key}",
            # Without a serving certificate it writes one of its own to a directory outside the rig.
            *_serving(self.authority.issue("manager", user="manager", hosts=("localhost", "127.0.0.1"))),
            *self._flags("kube-controller-manager"),
        ]

    def scheduler(self) -> list[str]:
        """kube-scheduler."""
        config = self.kubeconfig("scheduler", user="system:kube-scheduler")
        return [
            str(binary("kube-scheduler")),
            *_clients(config),
            "--leader-elect=false",
            *_serving(
                self.authority.issue("scheduling", user="scheduling", hosts=("localhost", "127.0.0.1"))
            ),
            *self._flags("kube-scheduler"),
        ]

    def proxy(self) -> list[str]:
        """kube-proxy: one serves all nodes of a rig, as they share one network namespace."""
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(self.kubeconfig("proxy", user="system:kube-proxy"))},
            "mode": "nftables",
            "clusterCIDR": self.pod_network,
            # Pods of a node share a bridge: an answer that skips the translation would be dropped.
            "nftables": {"masqueradeAll": True},
            "hostnameOverride": "node1",
            "nodePortAddresses": [f"{self.address}/32"],
            # Zero leaves the machine's connection tracking limits alone.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "featureGates": dict(self.settings.feature_gates),
        }
        path = self.directory / "kube-proxy.json"
        path.write_text(json.dumps(config, indent=1))
        return [str(binary("kube-proxy")), f"--config={path}", *self.settings.flags.get("kube-proxy", ())]

    def _flags(self, component: str) -> list[str]:
        gates = self.settings.gates() if component.startswith("kube-") else []
        return [*gates, *self.settings.flags.get(component, ())]


def _serving(pair: KeyPair) -> list[str]:
    return [f"--tls-cert-file={pair.cert}", f"--tls-private-key-file={pair.key}"]


def _clients(kubeconfig: Path) -> list[str]:
    names = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return [f"--{name}={kubeconfig}" for name in names]
