"""What can differ from rig to rig: node count, gates, kubelet configuration, controllers, flags.

Defaults are those of a stock cluster, apart from what one machine forces (see `rig.node`). Frozen: a running
rig changes by restarting a component with other values, never by editing these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """The choices for one rig; see docs/rig.md for examples of each."""

    nodes: int = 1
    # Given to every Kubernetes component.
    feature_gates: Mapping[str, bool] = field(default_factory=dict)
    # Merged over each kubelet's KubeletConfiguration, one level deep for mappings.
    kubelet_config: Mapping[str, Any] = field(default_factory=dict)
    # False: nodes have containerd but no kubelet until `Node.start_kubelet`, for an image service that must
    # listen before the kubelet starts.
    kubelets: bool = True
    # kube-controller-manager's --controllers, such as "*,-ephemeral-volume-controller".
    controllers: str = "*"
    # Runtime handler → a snapshotter of its own in containerd ({"second": "native"}).
    snapshotters: Mapping[str, str] = field(default_factory=dict)
    # Component → further flags, later ones win ("kube-controller-manager": ("--kube-api-qps=500",)).
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def gates(self) -> list[str]:
        """The feature gates as a command-line flag, or nothing."""
        if not self.feature_gates:
            return []
        return ["--feature-gates=" + ",".join(f"{k}={str(v).lower()}" for k, v in self.feature_gates.items())]
