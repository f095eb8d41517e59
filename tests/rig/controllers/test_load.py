"""Thousands of pods at once: the rate beside the built-in controller's, and the memory (E5).

CI takes a sample; UNLADE_FULL=1 takes 5,000 pods and a cache of 50,000. Figures are printed, and recorded as
properties of the tests; docs/controllers.md has those of one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rig.cluster import Rig
from rig.kube import until
from rig.pods import Namespace
from tests.rig.controllers.load import count_claims, create_pods, wait_claims
from tests.rig.controllers.process import ControllerProcess, apply_account

MakeRig = Callable[..., Rig]
Record = Callable[[str, object], None]
WITHOUT = "*,-ephemeral-volume-controller"
MEGABYTE = 1_000_000
WORKERS = 10


@pytest.fixture(scope="module")
def rig(make_module_rig: MakeRig) -> Rig:
    """A control plane; pods here need not run, so no kubelet does."""
    return make_module_rig(controllers=WITHOUT, kubelets=False)


@pytest.fixture(scope="module")
def account(rig: Rig) -> Path:
    return apply_account(rig)


@pytest.fixture
def count(full: bool) -> int:
    return 5000 if full else 500


def names(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


def rate(rig: Rig, namespace: str, count: int, *, seconds: float) -> float:
    """Claims a second, from the first tenth (the burst is spent, connections are open) to the last claim."""
    tenth = until(
        "the first claims",
        lambda: (found := count_claims(rig.api, namespace)) >= count // 10 and found,
        seconds=seconds,
        pause=0.02,
    )
    started = time.monotonic()
    until(f"{count} claims", lambda: count_claims(rig.api, namespace) == count, seconds=seconds, pause=0.05)
    return (count - tenth) / (time.monotonic() - started)


def built_in_rate(rig: Rig, namespace: str, count: int, *flags: str) -> float:
    """The built-in controller on pods that wait for it; it is off again afterwards."""
    create_pods(rig.api, namespace, names(count))
    rig.restart_controller_manager("*", flags)
    try:
        return rate(rig, namespace, count, seconds=60 + count / 10)
    finally:
        rig.restart_controller_manager(WITHOUT)


def our_rate(rig: Rig, account: Path, namespace: str, count: int, *flags: str) -> float:
    """Ours on pods that wait for it."""
    create_pods(rig.api, namespace, names(count))
    with ControllerProcess(rig, account, "--no-leader-elect", *flags, ready=False):
        found = rate(rig, namespace, count, seconds=60 + count / 10)
        wait_claims(rig.api, namespace, count, seconds=60)
    return found


def test_the_rate_is_the_built_in_ones_at_the_same_limits(
    rig: Rig, account: Path, full: bool, record_property: Record
) -> None:
    """Both at the defaults of the Kubernetes components: 20 requests a second, 30 at once."""
    count = 5000 if full else 300
    spaces = [Namespace(rig, name).name for name in ("same-built-in", "same-ours")]
    limits = ("--kube-api-qps=20", "--kube-api-burst=30")
    theirs = built_in_rate(rig, spaces[0], count, *limits)
    ours = our_rate(rig, account, spaces[1], count, *limits)
    print(f"\n{count} pods at 20/s: built-in {theirs:.1f} claims/s, ours {ours:.1f}")
    record_property("built_in_claims_per_second", round(theirs, 2))
    record_property("our_claims_per_second", round(ours, 2))
    # both are held by the same bucket; the rest is how late a busy machine lets us see the last claim
    assert ours >= (0.995 if full else 0.97) * theirs


def test_the_rate_with_the_limits_raised(
    rig: Rig, account: Path, count: int, record_property: Record
) -> None:
    spaces = [Namespace(rig, name).name for name in ("raised-built-in", "raised-ours")]
    theirs = built_in_rate(
        rig,
        spaces[0],
        count,
        "--kube-api-qps=5000",
        "--kube-api-burst=10000",
        f"--concurrent-ephemeralvolume-syncs={WORKERS}",
    )
    ours = our_rate(rig, account, spaces[1], count, "--kube-api-qps=0", f"--workers={WORKERS}")
    print(f"\n{count} pods, no limit: built-in {theirs:.0f} claims/s, ours {ours:.0f}")
    record_property("built_in_claims_per_second", round(theirs))
    record_property("our_claims_per_second", round(ours))
    # twice what the default limits allow: the API server and whatever else runs share the cores, so the
    # figure is printed for people, and only a broken path fails here
    assert ours >= 40


def test_all_at_once_while_it_runs(rig: Rig, account: Path, count: int, record_property: Record) -> None:
    space = Namespace(rig, "at-once").name
    with ControllerProcess(rig, account, "--no-leader-elect", "--kube-api-qps=0") as controller:
        started = time.monotonic()
        creating = create_pods(rig.api, space, names(count), threads=16)
        wait_claims(rig.api, space, count, seconds=60 + count / 10)
        total = time.monotonic() - started
        _now, peak = controller.memory()
    print(f"\n{count} pods created in {creating:.1f} s, all claims after {total:.1f} s, {peak / 1e6:.0f} MB")
    record_property("seconds_creating", round(creating, 1))
    record_property("seconds_to_last_claim", round(total, 1))


def test_memory_with_a_large_cluster_in_the_cache(
    rig: Rig, account: Path, full: bool, record_property: Record
) -> None:
    """The peak is that of the first list: a controller that starts into a cluster full of pods and claims."""
    want = 50_000 if full else 2_000
    have = len(rig.api.list("Pod"))
    if have < want:
        space = Namespace(rig, "many").name
        create_pods(rig.api, space, names(want - have), threads=16)
        with ControllerProcess(rig, account, "--no-leader-elect", "--kube-api-qps=0"):
            wait_claims(rig.api, space, want - have, seconds=60 + want / 50)
    with ControllerProcess(rig, account, "--no-leader-elect", ready=False) as controller:
        started = time.monotonic()
        controller.wait_ready(300)
        ready = time.monotonic() - started
        pods = controller.metric('unlade_informer_kept{resource="pods"}')
        claims = controller.metric('unlade_informer_kept{resource="persistentvolumeclaims"}')
        time.sleep(5)
        now, peak = controller.memory()
    print(
        f"\n{pods:.0f} pods, {claims:.0f} claims: ready after {ready:.1f} s, "
        f"{now / MEGABYTE:.0f} MB, peak {peak / MEGABYTE:.0f} MB"
    )
    record_property("resident_megabytes", round(now / MEGABYTE))
    record_property("peak_megabytes", round(peak / MEGABYTE))
    record_property("seconds_to_ready", round(ready, 1))
    assert pods >= want
    assert claims >= want
    assert peak < 250 * MEGABYTE
