"""Our controller in the built-in one's place: a pod runs, and no fault loses or doubles a claim (E1, E2, E5).

The API server here enforces OwnerReferencesPermissionEnforcement, so the account's right to block a pod's
deletion is tested too, and the controller runs under the account of deploy/controller throughout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rig.cluster import Rig
from rig.kube import ApiError, until
from rig.local_storage import LocalStorage
from rig.pods import Namespace
from tests.rig.controllers.load import create_pods, wait_claims
from tests.rig.controllers.process import ACCOUNT, DEPLOY, NAMESPACE, ControllerProcess, apply_account
from tests.rig.controllers.proxy import Proxy

MakeRig = Callable[..., Rig]
WITHOUT = "*,-ephemeral-volume-controller"
FAST = ("--kube-api-qps=200", "--kube-api-burst=400")
DURATION, RENEW, RETRY = 6, 4, 1
LEASE = (f"--lease-duration={DURATION}", f"--renew-deadline={RENEW}", f"--retry-period={RETRY}")


@pytest.fixture(scope="module")
def rig(make_module_rig: MakeRig) -> Rig:
    plugins = "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement"
    return make_module_rig(controllers=WITHOUT, flags={"kube-apiserver": (plugins,)})


@pytest.fixture(scope="module")
def account(rig: Rig) -> Path:
    return apply_account(rig)


@pytest.fixture(scope="module")
def spaces(rig: Rig) -> list[str]:
    """Namespaces made before the first fault: after one, the controller manager may take half a minute."""
    return [Namespace(rig, f"f{number}").name for number in range(8)]


@pytest.fixture
def space(spaces: list[str]) -> str:
    """A namespace that no test has used yet; it goes with the rig."""
    return spaces.pop()


@pytest.fixture
def proxy(rig: Rig) -> Iterator[Proxy]:
    with Proxy(rig.control_plane.server) as made:
        yield made


@pytest.fixture
def count(full: bool) -> int:
    """How many pods a fault meets."""
    return 1000 if full else 120


def names(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def test_a_pod_runs_with_an_ephemeral_volume_and_takes_it_along(rig: Rig, account: Path) -> None:
    storage = LocalStorage(rig)
    (volume,) = storage.add()
    namespace = Namespace(rig)
    template = {
        "metadata": {"labels": {"type": "scratch"}},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": storage.name,
            "resources": {"requests": {"storage": "1Mi"}},
        },
    }
    with ControllerProcess(rig, account):
        source = {"/scratch": {"ephemeral": {"volumeClaimTemplate": template}}}
        pod = namespace.run("writer", command="echo kept >/scratch/file; sleep 1000000", volumes=source)
        pod.wait_ready()
        claim = rig.api.get("PersistentVolumeClaim", "writer-v0", namespace.name)
        assert claim["status"]["phase"] == "Bound"
        assert claim["spec"]["volumeName"] == volume
        assert claim["metadata"]["labels"] == {"type": "scratch"}
        written = rig.node.directory / "volumes" / volume / "file"
        until("the pod has written", lambda: written.exists() and written.read_text() == "kept\n")
        pod.delete()
        rig.api.gone("PersistentVolumeClaim", "writer-v0", namespace.name)
        until("released", lambda: rig.api.get("PersistentVolume", volume)["status"]["phase"] == "Released")
    storage.delete()


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("delete", "persistentvolumeclaims"),
        ("update", "persistentvolumeclaims"),
        ("patch", "persistentvolumeclaims"),
        ("get", "pods"),
        ("update", "pods"),
        ("delete", "pods"),
        ("list", "secrets"),
        ("list", "configmaps"),
        ("get", "leases.coordination.k8s.io"),
        ("delete", "events"),
    ],
)
def test_the_account_may_not_do_more_than_it_needs(rig: Rig, account: Path, verb: str, kind: str) -> None:
    resource, _dot, group = kind.partition(".")
    who = rig.account(NAMESPACE, ACCOUNT)
    attributes = {"verb": verb, "resource": resource, "group": group, "namespace": "default"}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = who.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
    who.close()
    assert answer["status"]["allowed"] is False


def test_a_missing_right_is_named_on_the_pod_and_readiness_fails_without_lists(rig: Rig, space: str) -> None:
    rig.api.create(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "weak", "namespace": space}}
    )
    weak = rig.account_kubeconfig(space, "weak")
    controller = ControllerProcess(rig, weak, "--no-leader-elect", ready=False)
    until("it says that it is not ready", lambda: "not synced" in controller.get("/readyz")[1])
    until("it says why", lambda: "is forbidden" in controller.log.read_text())
    assert controller.get("/healthz")[0] == 200
    controller.stop()


def test_the_manifests_are_what_the_api_server_takes(rig: Rig, account: Path) -> None:
    rig.kubectl("apply", "--dry-run=server", "-f", str(DEPLOY))
    with pytest.raises(ApiError) as missing:
        rig.api.get("Deployment", "unlade-controller", NAMESPACE, version="apps/v1")
    assert missing.value.status == 404


@pytest.mark.parametrize("grace", [10, 0], ids=["stopped", "killed"])
def test_the_api_server_restarts_under_load(
    rig: Rig, account: Path, space: str, count: int, grace: int
) -> None:
    with ControllerProcess(rig, account, *FAST, *LEASE) as controller:
        creator = threading.Thread(target=create_pods, args=(rig.api, space, names(count)))
        creator.start()
        for _round in range(2):
            time.sleep(0.3)
            rig.restart_apiserver(grace=grace)
        creator.join()
        wait_claims(rig.api, space, count, seconds=90)
        assert controller.process.poll() is None


def test_watches_are_cut_again_and_again(
    rig: Rig, account: Path, space: str, count: int, proxy: Proxy
) -> None:
    # without a lease: five cuts a second leave no time to renew one, and leadership is not the subject here
    with ControllerProcess(rig, proxy.kubeconfig(account), *FAST, "--no-leader-elect") as controller:
        creator = threading.Thread(target=create_pods, args=(rig.api, space, names(count)))
        creator.start()
        cuts = 0
        while creator.is_alive() or cuts < 10:
            time.sleep(0.2)
            cuts += proxy.cut() > 0
        creator.join()
        wait_claims(rig.api, space, count, seconds=90)
        for resource in ("pods", "persistentvolumeclaims"):
            assert controller.metric(f'unlade_informer_lists_total{{resource="{resource}"}}') == 1
            assert controller.metric(f'unlade_informer_watches_total{{resource="{resource}"}}') >= 5


def test_history_is_compacted_while_the_controller_is_away(
    rig: Rig, account: Path, space: str, count: int, proxy: Proxy
) -> None:
    all_names = names(count)
    early, late = all_names[: count // 2], all_names[count // 2 :]
    with ControllerProcess(rig, proxy.kubeconfig(account), *FAST, "--no-leader-elect") as controller:
        create_pods(rig.api, space, early)
        wait_claims(rig.api, space, len(early), seconds=90)
        proxy.refuse()
        # what it must find out without having seen: new pods, a pod made again, a claim deleted
        create_pods(rig.api, space, late)
        rig.api.delete("Pod", early[0], space, grace=0)
        rig.api.gone("PersistentVolumeClaim", f"{early[0]}-v", space)
        create_pods(rig.api, space, [early[0]])
        rig.api.delete("PersistentVolumeClaim", f"{early[1]}-v", space)
        rig.api.gone("PersistentVolumeClaim", f"{early[1]}-v", space)
        rig.compact_etcd()
        rig.restart_apiserver()
        # left alone, the garbage collector takes a minute to notice that the API server is back
        rig.restart_controller_manager(WITHOUT)
        proxy.resume()
        wait_claims(rig.api, space, count, seconds=90)
        expired = sum(
            controller.metric(f'unlade_informer_expired_total{{resource="{resource}"}}')
            for resource in ("pods", "persistentvolumeclaims")
        )
        assert expired >= 1, "the API server remembered: the test did not test"


def test_a_killed_leader_is_replaced_within_its_lease(
    rig: Rig,
    account: Path,
    space: str,
    count: int,
    full: bool,
    record_property: Callable[[str, object], None],
) -> None:
    duration, retry = (15, 2) if full else (DURATION, RETRY)
    flags = (*FAST, *(() if full else LEASE))  # the full run takes the defaults
    first = ControllerProcess(rig, account, *flags)
    until("the first leads", lambda: first.leads)
    with ControllerProcess(rig, account, *flags) as second:
        assert not second.leads
        creator = threading.Thread(target=create_pods, args=(rig.api, space, names(count)))
        creator.start()
        time.sleep(0.3)
        first.kill()
        died = time.monotonic()
        until("the second leads", lambda: second.leads, seconds=2 * duration, pause=0.02)
        takeover = time.monotonic() - died
        print(f"\nlease {duration} s, retry {retry} s: taken over after {takeover:.1f} s")
        record_property("takeover_seconds", round(takeover, 1))
        # a lease renewed just before the kill, a standby that had just looked, and a busy machine
        assert takeover <= duration + retry / 4 + 1.0
        creator.join()
        wait_claims(rig.api, space, count, seconds=90)


def test_a_leader_that_is_told_to_stop_hands_over_at_once(rig: Rig, account: Path) -> None:
    first = ControllerProcess(rig, account, *LEASE)
    until("the first leads", lambda: first.leads)
    with ControllerProcess(rig, account, *LEASE) as second:
        first.stop()
        until("the second leads", lambda: second.leads, seconds=2 * RETRY + 1, pause=0.02)


def test_an_outage_longer_than_the_lease_is_survived(
    rig: Rig, account: Path, space: str, proxy: Proxy
) -> None:
    with ControllerProcess(rig, proxy.kubeconfig(account), *FAST, *LEASE) as controller:
        until("it leads", lambda: controller.leads)
        proxy.refuse()
        create_pods(rig.api, space, names(20))
        until("it has stopped leading", lambda: not controller.leads, seconds=RENEW + 3 * RETRY)
        assert controller.get("/healthz")[0] == 200
        proxy.resume()
        wait_claims(rig.api, space, 20, seconds=DURATION + 20)
