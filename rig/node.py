"""One node: a containerd with two runtime handlers, and a kubelet.

Files, sockets, cgroup root, bridge and address are the node's own, so several nodes live on one machine: the
second kubelet would otherwise kill the first one's pods, which it finds in a cgroup it takes for its own. The
node's directory is a shared mount, so that volumes mounted by a CSI driver reach the kubelet's pods.

What one machine forces, and how it is answered, stands beside each setting. `Node` renders; `rig.cluster`
starts and stops.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rig.control_plane import ControlPlane
from rig.engines import binary
from rig.machine import CGROUP_PARENT
from rig.oci import Registry

# The handlers every node offers; `second` is runc again, under a name of its own.
HANDLERS = ("runc", "second")


@dataclass
class Node:
    """Where a node keeps its files, and what its two daemons are started with."""

    rig: str
    name: str
    address: str
    pod_network: str
    directory: Path
    # Where shims listen: a short path, as containerd allows no more than 42 characters.
    shim_sockets: Path
    control_plane: ControlPlane
    registries: tuple[Registry, ...]
    sandbox: str
    # The image service the kubelet talks to; None: containerd's own.
    image_service: Path | None = None
    kubelet_config: dict[str, Any] = field(default_factory=dict)
    # Text appended to containerd's configuration, for tables that tests need.
    containerd_extra: str = ""

    @property
    def containerd_socket(self) -> Path:
        """containerd's gRPC socket (CRI included)."""
        return self.directory / "containerd.sock"

    @property
    def cgroup(self) -> str:
        """The node's cgroup below the rigs' parent; pods live in it."""
        return f"{self.rig}/{self.name}"

    @property
    def kubelet_root(self) -> Path:
        """The kubelet's --root-dir; plugins register in `plugins_registry` below it."""
        return self.directory / "kubelet"

    def containerd(self) -> list[str]:
        """Write containerd's configuration; its command line."""
        self._write_registry_hosts()
        self._write_network()
        path = self.directory / "containerd.toml"
        path.write_text(self._containerd_config() + self.containerd_extra)
        return [str(binary("containerd")), "--config", str(path)]

    def kubelet(self) -> list[str]:
        """Write the kubelet's configuration; its command line."""
        path = self.directory / "kubelet.json"
        path.write_text(json.dumps(self._kubelet_config(), indent=1))
        user = f"system:node:{self.name}"
        kubeconfig = self.control_plane.kubeconfig(self.name, user=user, groups=("system:nodes",))
        return [
            str(binary("kubelet")),
            f"--config={path}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self.kubelet_root}",
            f"--cert-dir={self.directory / 'pki'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            *self.control_plane.settings.flags.get("kubelet", ()),
        ]

    def _containerd_config(self) -> str:
        own = self.control_plane.settings.snapshotters
        handlers = "".join(
            f'''
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{handler}]
runtime_type = "io.containerd.runc.v2"
snapshotter = "{own.get(handler, "")}"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{handler}.options]
BinaryName = "{binary("runc")}"
Root = "{self.directory}/runc"
'''
            for handler in HANDLERS
        )
        return f'''version = 3
root = "{self.directory}/containerd/root"
state = "{self.directory}/containerd/state"
# Two containerds would fight over the default paths of these.
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing"]
[grpc]
address = "{self.containerd_socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{self.directory}/containerd/opt"
[plugins."io.containerd.shim.v1.manager"]
# The default is one fixed directory for all containerds, which nobody would empty.
socket_dir = "{self.shim_sockets}"
[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
max_concurrent_downloads = 8
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{self.sandbox}"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{self.directory}/certs.d"
[plugins."io.containerd.cri.v1.runtime"]
# Containers and virtual machines often lack CAP_SYS_RESOURCE: runc could not lower oom_score_adj.
restrict_oom_score_adj = true
# Pods' network namespaces go with the node's directory instead of staying in /run/netns.
netns_mounts_under_state_dir = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{binary("bridge").parent}"]
conf_dir = "{self.directory}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "{HANDLERS[0]}"
{handlers}'''

    def _write_registry_hosts(self) -> None:
        for registry in self.registries:
            directory = self.directory / "certs.d" / registry.address
            directory.mkdir(parents=True, exist_ok=True)
            url = f"{'https' if registry.ca else 'http'}://{registry.address}"
            hosts = f'server = "{url}"\n[host."{url}"]\ncapabilities = ["pull", "resolve"]\n'
            if registry.ca:
                hosts += f'ca = "{registry.ca}"\n'
            (directory / "hosts.toml").write_text(hosts)

    def _write_network(self) -> None:
        directory = self.directory / "cni"
        directory.mkdir(parents=True, exist_ok=True)
        network = ipaddress.ip_network(self.pod_network)
        bridge = {
            "type": "bridge",
            "bridge": f"br-{self.name}",
            "isGateway": True,
            "hairpinMode": True,
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.directory / "ipam"),
                "ranges": [[{"subnet": str(network)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
        config = {"cniVersion": "1.0.0", "name": f"unlade-{self.rig}", "plugins": plugins}
        (directory / "10-rig.conflist").write_text(json.dumps(config, indent=1))

    def _kubelet_config(self) -> dict[str, Any]:
        settings = self.control_plane.settings
        authority = self.control_plane.authority
        serving = authority.issue(
            f"{self.name}-serving", user=f"system:node:{self.name}", hosts=(self.address,)
        )
        endpoint = f"unix://{self.containerd_socket}"
        config: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": endpoint,
            "imageServiceEndpoint": f"unix://{self.image_service}" if self.image_service else endpoint,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{CGROUP_PARENT}/{self.cgroup}",
            # Machines that still mount cgroup v1 are refused unless this is said.
            "failCgroupV1": False,
            "failSwapOn": False,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority.ca.cert)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving.cert),
            "tlsPrivateKeyFile": str(serving.key),
            "address": self.address,
            "healthzBindAddress": self.address,
            "readOnlyPort": 0,
            "serializeImagePulls": False,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
            "makeIPTablesUtilChains": False,
            "enforceNodeAllocatable": [],
            "podLogsDir": str(self.directory / "pods"),
            "volumePluginDir": str(self.directory / "volume-plugins"),
            "resolvConf": "",
            # The developer's disk may be nearly full; that is not what the tests are about.
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 99,
            "imageGCLowThresholdPercent": 98,
            "featureGates": dict(settings.feature_gates),
        }
        return merged(merged(config, settings.kubelet_config), self.kubelet_config)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, one level deep for mappings; neither is changed."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result
