"""Whom a volume is for, and what is asked of the cluster on their behalf.

The driver itself never talks to the Kubernetes API. Whoever starts it may hand in something that does: the
pull secrets of a pod (off unless RBAC grants it, because it means reading secrets), and events on the pod.
Both are implemented in `unlade.controllers` and wired by `unlade.cli`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from unlade.registry import CredentialSource

_PREFIX: Final = "csi.storage.k8s.io/"
# In volume_context, or in secrets where the CSIDriver object asks for that.
TOKENS_KEY: Final = f"{_PREFIX}serviceAccount.tokens"


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod that a volume is published for, as the kubelet names it; empty where it does not."""

    namespace: str = ""
    name: str = ""
    uid: str = ""
    service_account: str = ""

    @classmethod
    def of(cls, context: Mapping[str, str]) -> Pod:
        """From a volume context: the CSIDriver object has `podInfoOnMount: true`."""
        return cls(
            context.get(f"{_PREFIX}pod.namespace", ""),
            context.get(f"{_PREFIX}pod.name", ""),
            context.get(f"{_PREFIX}pod.uid", ""),
            context.get(f"{_PREFIX}serviceAccount.name", ""),
        )

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" if self.name else "no pod"


class PodCredentials(Protocol):
    """Reads the pull secrets that a pod and its service account name; thread-safe."""

    def of_pod(self, pod: Pod) -> CredentialSource:
        """What these secrets hold; raises UnladeError when the API server refuses or cannot be reached."""
        ...


class PodEvents(Protocol):
    """Writes events on pods; thread-safe, never raises and never waits long."""

    def tell(self, pod: Pod, *, reason: str, message: str, warning: bool) -> None:
        """An event of this pod; may be dropped."""
        ...


class NoEvents:
    """For a driver that may not write events: the kubelet's own say what our calls answered."""

    def tell(self, pod: Pod, *, reason: str, message: str, warning: bool) -> None:
        """Nothing."""
