"""A running rig: starts every engine in a network namespace of its own, and takes all of it away again.

`Rig.up` returns when each component answered and every node is Ready; `down` leaves no process, mount,
namespace, bridge, cgroup or file. Components can be stopped, killed and started again one by one, with other
flags: that is how tests make faults. Everything started is on record first (see `rig.state`), so a rig whose
owner was killed is removed by the next start.

Callers: the fixtures in tests/rig/conftest.py, `python -m rig`.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rig import RigError, images, machine, state
from rig.control_plane import ControlPlane
from rig.engines import ENGINES, binary
from rig.kube import Api, ApiError, Json, until
from rig.machine import Process
from rig.node import HANDLERS, Node
from rig.oci import Pushed, Registry
from rig.pki import Authority
from rig.settings import Settings

# Who may use the registry with authentication; tests name these. Not secrets: they exist while a rig does.
USERS = {"alice": "wonderland", "bob": "builder"}

# A start takes 6 to 10 s on two idle cores; other work on the machine may take its share.
START_SECONDS = 120.0


class Rig:
    """One cluster with its registries. Use as a context manager, or call `down` in the end."""

    def __init__(self, record: state.State, settings: Settings) -> None:
        self.state = record
        self.settings = settings
        self.directory = record.directory
        self.logs = self.directory / "logs"
        self.authority = Authority(self.directory / "pki")
        self.control_plane = ControlPlane(
            directory=self.directory / "control",
            address=record.address(2),
            service_network=record.service_network,
            pod_network=record.pod_network,
            authority=self.authority,
            settings=settings,
        )
        self.control_plane.directory.mkdir(parents=True, exist_ok=True)
        self.registry = Registry(f"{record.address(2)}:5000")
        user, password = next(iter(USERS.items()))
        self.private_registry = Registry(
            f"{record.address(2)}:5443", ca=self.authority.ca.cert, credentials=(user, password)
        )
        self.nodes = self._nodes()
        self.kubeconfig = self.control_plane.kubeconfig("admin", user="admin", groups=("system:masters",))
        admin = self.authority.issue("admin", user="admin", groups=("system:masters",))
        self.api = Api(self.control_plane.server, self.authority.ca.cert, cert=admin.cert, key=admin.key)
        self._pushed: dict[str, Pushed] = {}

    @classmethod
    def up(cls, name: str, settings: Settings | None = None, *, owned: bool = True) -> Rig:
        """Start a rig; an `owned` one is removed by the next start should this process be killed."""
        for engine in ENGINES.values():
            if not engine.built:
                raise RigError(f"{engine.name} is not built; run `make rig`")
        owner = Process.of(os.getpid()) if owned else None
        rig = cls(state.claim(name, owner), settings or Settings())
        try:
            rig._start()
        except BaseException:
            rig.keep_artefacts(failed_starts() / name)
            rig.down()
            raise
        return rig

    @classmethod
    def attach(cls, name: str, settings: Settings | None = None) -> Rig:
        """A handle on a rig that runs already."""
        record = state.load(name)
        if record is None:
            raise RigError(f"there is no rig {name}; `python -m rig up {name}` starts it")
        nodes = sum(component.startswith("containerd-") for component in record.processes)
        return cls(record, settings or Settings(nodes=nodes))

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def name(self) -> str:
        """The rig's name, unique on this machine."""
        return self.state.name

    @property
    def node(self) -> Node:
        """The first node."""
        return self.nodes[0]

    def down(self) -> None:
        """Stop everything and remove every trace; safe to call again."""
        self.api.close()
        self.registry.close()
        self.private_registry.close()
        with state.lock():
            self.state.remove()

    # Components

    def start(self, component: str, argv: Sequence[str] | None = None) -> None:
        """Start a component that does not run: as before, or with another command line."""
        if argv is not None:
            self.state.commands[component] = list(argv)
        env = {"PATH": f"{self._tools()}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(self.directory)}
        self.state.processes[component] = machine.spawn(
            self.state.commands[component],
            log=self.logs / f"{component}.log",
            namespace=self.state.netns,
            # A leaf of their own: version 2 allows no process beside a child group, and pods have theirs.
            cgroup=f"{self.name}/daemons",
            env=env,
        )
        self.state.save()

    def stop(self, component: str, *, grace: float = 10) -> None:
        """Ask a component to end and wait; kill it after `grace` seconds (0: at once, as kill -9)."""
        self.state.processes[component].stop(grace)

    def restart(self, component: str, argv: Sequence[str] | None = None, *, grace: float = 10) -> None:
        """Stop and start a component, with another command line if one is given."""
        self.stop(component, grace=grace)
        self.start(component, argv)

    def restart_apiserver(self, *, grace: float = 10) -> None:
        """Restart kube-apiserver and wait until it is ready."""
        self.restart("kube-apiserver", grace=grace)
        self.wait_apiserver()

    def restart_controller_manager(self, controllers: str | None = None, flags: Sequence[str] = ()) -> None:
        """Restart kube-controller-manager, with other controllers or further flags; wait for its health."""
        chosen = controllers if controllers is not None else self.settings.controllers
        self.restart("kube-controller-manager", [*self.control_plane.controller_manager(chosen), *flags])
        self._wait_healthy("kube-controller-manager", 10257)

    def start_kubelet(
        self, node: Node, *, config: Mapping[str, Any] | None = None, image_service: Path | None = None
    ) -> None:
        """Start a node's kubelet.

        `config`, if given, replaces earlier overrides. `image_service` is a socket that listens already; None
        is containerd's own.
        """
        if config is not None:
            node.kubelet_config = dict(config)
        node.image_service = image_service
        self.start(f"kubelet-{node.name}", node.kubelet())

    def restart_kubelet(
        self, node: Node, *, config: Mapping[str, Any] | None = None, image_service: Path | None = None
    ) -> None:
        """As `start_kubelet`, for one that runs; returns when the node is Ready and knows its pods again."""
        self.stop(f"kubelet-{node.name}")
        self.start_kubelet(node, config=config, image_service=image_service)
        self.wait_node(node)

        def knows_its_pods() -> bool:
            known = self.api.request("GET", f"/api/v1/nodes/{node.name}/proxy/pods")["items"] or []
            assigned = self.api.list("Pod", fieldSelector=f"spec.nodeName={node.name}")
            return {p["metadata"]["uid"] for p in assigned} <= {p["metadata"]["uid"] for p in known}

        until(f"the kubelet of {node.name} knows its pods", knows_its_pods)

    def restart_containerd(self, node: Node, *, grace: float = 10) -> None:
        """Restart a node's containerd with its present configuration; running containers go on."""
        self.restart(f"containerd-{node.name}", node.containerd(), grace=grace)
        self._wait_containerd(node)

    def compact_etcd(self) -> None:
        """Drop etcd's history up to now: watches and continue tokens from before get 410 Gone."""
        revision = json.loads(self._etcd("kv/range", {"key": "AA==", "limit": 1}))["header"]["revision"]
        self._etcd("kv/compaction", {"revision": revision, "physical": True})

    # Content

    def image(self, name: str) -> str:
        """The reference of one of our images (`busybox`, `python`, `pause`) in the plain registry."""
        if name not in self._pushed:
            self._pushed[name] = images.IMAGES[name].push(self.registry)
        return self._pushed[name].reference

    # Reaching it

    def kubectl(self, *argv: str, seconds: float = 60, stdin: bytes | None = None) -> str:
        """Run kubectl as the administrator; its stdout."""
        return machine.run(
            str(binary("kubectl")), f"--kubeconfig={self.kubeconfig}", *argv, timeout=seconds, stdin=stdin
        )

    def account(self, namespace: str, name: str, *, seconds: int = 3600) -> Api:
        """The API as a service account, with a token from the TokenRequest API."""
        token = self.account_token(namespace, name, seconds=seconds)
        return Api(self.control_plane.server, self.authority.ca.cert, token=token)

    def account_token(self, namespace: str, name: str, *, seconds: int = 3600) -> str:
        """A bound token of a service account."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        path = self.api.path("ServiceAccount", namespace, name) + "/token"
        return str(self.api.request("POST", path, body=body)["status"]["token"])

    def account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig file for a service account."""
        token = self.account_token(namespace, name, seconds=24 * 3600)
        path = self.control_plane.directory / f"account-{namespace}-{name}.kubeconfig"
        path.write_text(json.dumps(self.control_plane.kubeconfig_for(name, {"token": token}), indent=1))
        return path

    def versions(self) -> dict[str, str]:
        """Engine → version, as built."""
        return {engine.name: engine.version for engine in ENGINES.values()}

    def keep_artefacts(self, target: Path) -> None:
        """Copy the log of each component, and dump events, pods and nodes, into a directory."""
        target.mkdir(parents=True, exist_ok=True)
        if self.logs.is_dir():
            shutil.copytree(self.logs, target, dirs_exist_ok=True)
        for kind in ("Event", "Pod", "Node", "PersistentVolumeClaim"):
            with suppress(Exception):  # a dead API server is why we are here; the logs are kept either way
                found = self.api.list(kind)
                (target / f"{kind.lower()}s.json").write_text(json.dumps(found, indent=1))
                if kind == "Event":
                    (target / "events.txt").write_text("".join(map(_event_line, found)))

    # Waiting

    def wait_apiserver(self, seconds: float = START_SECONDS) -> None:
        """Wait until kube-apiserver says it is ready."""
        until(
            "kube-apiserver ready",
            lambda: self._alive("kube-apiserver") and self.api.raw("GET", "/readyz"),
            seconds=seconds,
        )

    def wait_node(self, node: Node, seconds: float = START_SECONDS) -> None:
        """Wait until a kubelet answers and its node is Ready."""

        def ready() -> bool:
            self._alive(f"kubelet-{node.name}")
            found = self.api.get("Node", node.name)
            conditions = {c["type"]: c for c in found["status"].get("conditions", [])}
            return conditions.get("Ready", {}).get("status") == "True" and self._kubelet_answers(node)

        until(f"{node.name} Ready", ready, seconds=seconds)

    # Starting

    def _nodes(self) -> list[Node]:
        per_node = list(ipaddress.ip_network(self.state.pod_network).subnets(new_prefix=26))
        if self.settings.nodes > len(per_node):
            raise RigError(f"a rig has at most {len(per_node)} nodes")
        return [
            Node(
                rig=self.name,
                name=f"node{index + 1}",
                address=self.state.address(2 + index),
                pod_network=str(per_node[index]),
                directory=self.directory / f"node{index + 1}",
                shim_sockets=self.state.sockets / str(index + 1),
                control_plane=self.control_plane,
                registries=(self.registry, self.private_registry),
                sandbox=f"{self.registry.address}/pause:1",
            )
            for index in range(self.settings.nodes)
        ]

    def _start(self) -> None:
        self._make_machine()
        plane = self.control_plane
        self.start("etcd", plane.etcd())
        self.start("kube-apiserver", plane.apiserver())
        self._start_registries()
        for node in self.nodes:
            self.start(f"containerd-{node.name}", node.containerd())
        until("registry ready", self.registry.ready, seconds=START_SECONDS)
        until("registry with authentication ready", self.private_registry.ready, seconds=START_SECONDS)
        for name in ("pause", "busybox"):
            self.image(name)
        self.wait_apiserver()
        self._bind_kubelet_client()
        self.start("kube-controller-manager", plane.controller_manager(self.settings.controllers))
        self.start("kube-scheduler", plane.scheduler())
        for node in self.nodes:
            self._wait_containerd(node)
            if self.settings.kubelets:
                self.start_kubelet(node)
        self._make_runtime_classes()
        for node in self.nodes:
            if self.settings.kubelets:
                self.wait_node(node)
        self.start("kube-proxy", plane.proxy())
        self._wait_healthy("kube-controller-manager", 10257)
        self._wait_healthy("kube-scheduler", 10259)
        until(
            "service account of the default namespace",
            lambda: self.api.get("ServiceAccount", "default", "default"),
        )
        self.state.ready = True
        self.state.save()

    def _make_machine(self) -> None:
        record = self.state
        self.logs.mkdir(parents=True, exist_ok=True)
        machine.make_cgroup(f"{self.name}/daemons")
        inside = [f"{node.address}/24" for node in self.nodes]
        machine.make_network(
            record.netns,
            record.link,
            host=f"{record.address(1)}/24",
            inside=inside,
            routed=(record.pod_network, record.service_network),
        )
        for node in self.nodes:
            machine.make_cgroup(node.cgroup)
            node.directory.mkdir(parents=True, exist_ok=True)
            node.shim_sockets.mkdir(parents=True, exist_ok=True, mode=0o700)
            machine.run("mount", "--bind", str(node.directory), str(node.directory))
            machine.run("mount", "--make-rshared", str(node.directory))

    def _start_registries(self) -> None:
        serving = self.authority.issue("registry", user="registry", hosts=(self.state.address(2),))
        passwords = self.directory / "htpasswd"
        lines = [machine.run("htpasswd", "-nbB", "-C", "4", user, secret) for user, secret in USERS.items()]
        passwords.write_text("".join(line.strip() + "\n" for line in lines))
        base: Json = {"version": "0.1", "log": {"level": "info", "accesslog": {"disabled": False}}}
        plain = {"addr": self.registry.address}
        tls = {
            "addr": self.private_registry.address,
            "tls": {"certificate": str(serving.cert), "key": str(serving.key)},
        }
        auth = {"auth": {"htpasswd": {"realm": "unlade-rig", "path": str(passwords)}}}
        for component, more in (("registry", {"http": plain}), ("registry-private", {"http": tls, **auth})):
            storage = {
                "filesystem": {"rootdirectory": str(self.directory / component)},
                "delete": {"enabled": True},
            }
            path = self.directory / f"{component}.json"
            path.write_text(json.dumps({**base, "storage": storage, **more}, indent=1))
            self.start(component, [str(binary("registry")), "serve", str(path)])

    def _bind_kubelet_client(self) -> None:
        """Let the API server use the kubelets' API (logs, exec)."""
        role = {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "system:kubelet-api-admin",
        }
        subject = {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "User",
            "name": "kube-apiserver-kubelet-client",
        }
        self._create_once(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRoleBinding",
                "metadata": {"name": "rig:apiserver-kubelet"},
                "roleRef": role,
                "subjects": [subject],
            }
        )

    def _make_runtime_classes(self) -> None:
        for handler in HANDLERS:
            self._create_once(
                {
                    "apiVersion": "node.k8s.io/v1",
                    "kind": "RuntimeClass",
                    "metadata": {"name": handler},
                    "handler": handler,
                }
            )

    def _create_once(self, thing: Json) -> None:
        def created() -> bool:
            try:
                self.api.create(thing)
            except ApiError as error:
                # The bootstrap roles appear a moment after readyz; a binding may name one not there yet.
                return error.status == 409
            return True

        until(f"{thing['kind']} {thing['metadata']['name']} created", created)

    def _alive(self, component: str) -> bool:
        if not self.state.processes[component].alive:
            log = self.logs / f"{component}.log"
            tail = log.read_text(errors="replace")[-1500:] if log.exists() else ""
            raise RigError(f"{component} ended; its log ({log}) ends with:\n{tail}")
        return True

    def _wait_containerd(self, node: Node) -> None:
        def answers() -> bool:
            self._alive(f"containerd-{node.name}")
            try:
                self.ctr(node, "version")
            except RigError:
                return False
            return True

        until(f"containerd of {node.name}", answers, seconds=START_SECONDS)

    def ctr(self, node: Node, *argv: str) -> str:
        """Run ctr on a node's containerd, in the namespace the kubelet uses."""
        return machine.run(
            str(binary("ctr")), "--address", str(node.containerd_socket), "-n", "k8s.io", *argv
        )

    def _kubelet_answers(self, node: Node) -> bool:
        return self._inside("curl", "-fsS", "-m", "5", f"http://{node.address}:10248/healthz") == "ok"

    def _wait_healthy(self, component: str, port: int) -> None:
        def healthy() -> bool:
            self._alive(component)
            return self._inside("curl", "-fsSk", "-m", "5", f"https://127.0.0.1:{port}/healthz") == "ok"

        until(f"{component} healthy", healthy, seconds=START_SECONDS)

    def _inside(self, *argv: str) -> str:
        """Run a command in the rig's network namespace; its stdout, whatever its exit status."""
        enter = ["nsenter", f"--net=/run/netns/{self.state.netns}", "--", *argv]
        return subprocess.run(enter, capture_output=True, text=True, timeout=60, check=False).stdout

    def _etcd(self, call: str, body: Json) -> str:
        answer = self._inside(
            "curl", "-fsS", "-m", "30", f"http://127.0.0.1:2379/v3/{call}", "-d", json.dumps(body)
        )
        if not answer:
            raise RigError(f"etcd does not answer {call}; see {self.logs}/etcd.log")
        return answer

    def _tools(self) -> str:
        """Directories of the engines' binaries, for programs that look for each other on PATH (the shim)."""
        return ":".join(str(engine.output / "bin") for engine in ENGINES.values())


def failed_starts() -> Path:
    """Where the logs of rigs that did not start are kept."""
    return Path(os.environ.get("UNLADE_RIG_ARTIFACTS", "artifacts/rig")).resolve() / "failed-starts"


def _event_line(event: Json) -> str:
    where = event.get("involvedObject", {})
    when = event.get("lastTimestamp") or event.get("eventTime") or ""
    return (
        f"{when} {event.get('type')} {event.get('reason')} "
        f"{where.get('kind')}/{where.get('namespace', '')}/{where.get('name')}: {event.get('message')}\n"
    )
