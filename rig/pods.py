"""Pods in a namespace of their own, for tests: run, read logs and events, exec, wait.

A `Namespace` is made per test and deleted after it, so tests do not see each other's objects. Pods get no
cluster DNS (the rig has none) and end at once when deleted.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rig.cluster import Rig
from rig.kube import Api, ApiError, Json, until

# A pod on a busy two-core machine: pull, sandbox, start.
POD_SECONDS = 60.0


class Pod:
    """A handle on one pod; every read asks the API server again."""

    def __init__(self, rig: Rig, namespace: str, name: str) -> None:
        self.rig = rig
        self.namespace = namespace
        self.name = name

    def read(self) -> Json:
        """The pod as it is now."""
        return self.rig.api.get("Pod", self.name, self.namespace)

    def wait(self, *phases: str, seconds: float = POD_SECONDS) -> Json:
        """Wait for one of the phases; Overdue tells the state of the containers and the events."""

        def reached() -> Json | None:
            pod = self.read()
            return pod if pod["status"].get("phase") in phases else None

        return self._explained(f"pod {self.namespace}/{self.name} {' or '.join(phases)}", reached, seconds)

    def wait_ready(self, seconds: float = POD_SECONDS) -> Json:
        """Wait until the pod's Ready condition is true."""

        def ready() -> Json | None:
            pod = self.read()
            conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
            return pod if conditions.get("Ready") == "True" else None

        return self._explained(f"pod {self.namespace}/{self.name} Ready", ready, seconds)

    def wait_event(self, reason: str, *, contains: str = "", seconds: float = POD_SECONDS) -> Json:
        """Wait for an event about this pod with a reason, and with some text in its message."""

        def seen() -> Json | None:
            found = [e for e in self.events() if e["reason"] == reason and contains in e["message"]]
            return found[0] if found else None

        return until(f"event {reason} {contains!r} on pod {self.name}", seen, seconds=seconds)

    def logs(self, container: str | None = None, *, previous: bool = False) -> str:
        """The log of a container (the only one when none is named), through the kubelet."""
        query = {"container": container} if container else {}
        if previous:
            query["previous"] = "true"
        path = self.rig.api.path("Pod", self.namespace, self.name) + "/log"
        return self.rig.api.raw("GET", path, query=query).decode(errors="replace")

    def events(self) -> list[Json]:
        """Events about this pod, oldest first."""
        selector = f"involvedObject.name={self.name},involvedObject.kind=Pod"
        found = self.rig.api.list("Event", self.namespace, fieldSelector=selector)
        return sorted(found, key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or "")

    def exec(self, *command: str, container: str | None = None, stdin: bytes | None = None) -> str:
        """Run a command in a container, as kubectl does; its stdout."""
        where = ["-n", self.namespace, "exec", self.name, *(["-c", container] if container else [])]
        return self.rig.kubectl(*where, *(["-i"] if stdin is not None else []), "--", *command, stdin=stdin)

    def delete(self, *, grace: int | None = 0, wait: bool = True, seconds: float = POD_SECONDS) -> None:
        """Delete the pod and, unless told otherwise, wait until it is gone."""
        self.rig.api.delete("Pod", self.name, self.namespace, grace=grace)
        if wait:
            self.rig.api.gone("Pod", self.name, self.namespace, seconds=seconds)

    def _explained(self, what: str, probe: Any, seconds: float) -> Json:
        try:
            found: Json = until(what, probe, seconds=seconds)
        except AssertionError as error:
            status = self.read()["status"]
            lines = [f"{e['reason']}: {e['message']}" for e in self.events()]
            error.add_note(f"status: {status}\nevents:\n" + "\n".join(lines))
            raise
        return found


class Namespace:
    """A namespace with its default service account, ready for pods."""

    def __init__(self, rig: Rig, name: str | None = None) -> None:
        self.rig = rig
        self.name = name or f"t-{secrets.token_hex(4)}"
        self.api: Api = rig.api
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.name}})
        until("default service account", lambda: self.api.get("ServiceAccount", "default", self.name))
        until("root CA config map", lambda: self.api.get("ConfigMap", "kube-root-ca.crt", self.name))

    def create(self, thing: Json) -> Json:
        """Create an object in this namespace."""
        return self.api.create({**thing, "metadata": {**thing["metadata"], "namespace": self.name}})

    def run(
        self,
        name: str,
        *,
        image: str | None = None,
        command: Sequence[str] | str = ("sleep", "1000000"),
        volumes: Mapping[str, Json] | None = None,
        spec: Mapping[str, Any] | None = None,
        container: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Pod:
        """Create a pod with one container `main` (busybox unless told); a command as string is a script.

        `volumes` maps a mount path to a volume source; `spec`, `container`, `metadata` are laid over it.
        """
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        names = {path: f"v{index}" for index, path in enumerate(volumes or {})}
        main: Json = {
            "name": "main",
            "image": image or self.rig.image("busybox"),
            "command": argv,
            "volumeMounts": [{"name": name, "mountPath": path} for path, name in names.items()],
            **(container or {}),
        }
        self.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, **(metadata or {})},
                "spec": {
                    "restartPolicy": "Never",
                    "dnsPolicy": "Default",
                    "terminationGracePeriodSeconds": 0,
                    "containers": [main],
                    "volumes": [{"name": names[path], **source} for path, source in (volumes or {}).items()],
                    **(spec or {}),
                },
            }
        )
        return Pod(self.rig, self.name, name)

    def pod(self, name: str) -> Pod:
        """A handle on a pod that exists already."""
        return Pod(self.rig, self.name, name)

    def delete(self) -> None:
        """Delete the namespace; its pods end at once. Does not wait."""
        path = self.api.path("Pod", self.name)
        self.api.request("DELETE", path, query={"gracePeriodSeconds": "0"})
        try:
            self.api.delete("Namespace", self.name)
        except ApiError as error:
            if error.status != 409:  # a deletion under way already
                raise
