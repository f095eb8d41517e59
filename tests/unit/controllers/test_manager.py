"""One process: options, health, readiness, metrics, a clean end; and the command that starts it."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.fakes.kube_api import FakeKubeApi, Request, status, wait_for
from unlade.cli.controller import controller
from unlade.controllers.manager import Manager, Options
from unlade.errors import InvalidInput


@pytest.fixture
def kubeconfig(api: FakeKubeApi, tmp_path: Path) -> str:
    path = tmp_path / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config))
    return str(path)


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_process_from_start_to_end(api: FakeKubeApi, kubeconfig: str) -> None:
    hold = threading.Event()

    def slow_list(request: Request) -> None:
        if request.path == "/api/v1/pods" and not request.watch:
            hold.wait(10)

    api.fault = slow_list
    options = Options(controllers=("ephemeral-volumes",), kubeconfig=kubeconfig, listen="127.0.0.1:0")
    manager = Manager(options, user_agent="test")
    ports: list[int] = []
    stop = threading.Event()
    thread = threading.Thread(target=manager.run, args=(stop,), kwargs={"on_listen": ports.append})
    thread.start()
    wait_for(lambda: bool(ports))
    wait_for(lambda: get(ports[0], "/readyz") == (500, "the caches are not synced yet\n"))
    assert get(ports[0], "/healthz") == (200, "ok\n")
    hold.set()
    wait_for(lambda: get(ports[0], "/readyz") == (200, "ok\n"))
    code, text = get(ports[0], "/metrics")
    assert code == 200
    assert "unlade_controller_leader 1.0" in text
    assert 'unlade_kubernetes_request_seconds_count{status="200",verb="GET"}' in text
    assert get(ports[0], "/elsewhere")[0] == 404
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert not api.all("leases")["default/unlade-controller"]["spec"].get("holderIdentity")


def test_a_standby_is_ready_once_it_has_read_the_lease(api: FakeKubeApi, kubeconfig: str) -> None:
    stamp = "2026-01-01T00:00:00.000000Z"
    spec = {"holderIdentity": "x", "leaseDurationSeconds": 60, "acquireTime": stamp, "renewTime": stamp}
    api.put("leases", {"metadata": {"name": "unlade-controller", "namespace": "default"}, "spec": spec})
    unreadable = [status(403, "Forbidden", "no lease for you")] * 2
    api.fault = lambda _request: unreadable.pop() if unreadable else None
    options = Options(controllers=("ephemeral-volumes",), kubeconfig=kubeconfig, listen="127.0.0.1:0")
    manager = Manager(options, user_agent="test")
    assert manager.unready() == ["the lease has not been read yet"]
    stop = threading.Event()
    thread = threading.Thread(target=manager.run, args=(stop,))
    thread.start()
    wait_for(lambda: not manager.unready())
    assert api.count("GET", "/pods") == 0
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def test_no_controller_runs_unless_named(kubeconfig: str) -> None:
    for names in ((), ("everything",)):
        with pytest.raises(InvalidInput) as error:
            Manager(Options(controllers=names, kubeconfig=kubeconfig), user_agent="test")
        assert "ephemeral-volumes" in error.value.next_step


def test_the_command_explains_itself_and_refuses_what_cannot_work(kubeconfig: str) -> None:
    runner = CliRunner()
    text = runner.invoke(controller, ["--help"]).output
    assert "--kube-api-qps" in text
    assert "Ordinary clusters make the claims of ephemeral volumes themselves" in text
    for arguments in (
        [],
        ["--controllers", "nonsense"],
        ["--controllers", "ephemeral-volumes", "--lease-duration", "5"],
        ["--controllers", "ephemeral-volumes", "--listen", "nowhere"],
        ["--controllers", "ephemeral-volumes", "--listen", "127.0.0.1:99999"],
        ["--controllers", "ephemeral-volumes", "--context", "missing"],
    ):
        result = runner.invoke(controller, ["--kubeconfig", kubeconfig, *arguments])
        assert isinstance(result.exception, InvalidInput), result.output
        assert result.exception.next_step
