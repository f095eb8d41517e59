"""The same scripts with the built-in controller and with ours: same claims, equivalent events (E6)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rig.cluster import Rig
from tests.rig.controllers.differential import Controller, Outcomes, Playground, Run
from tests.rig.controllers.process import ControllerProcess, apply_account
from tests.rig.controllers.scenarios import SCENARIOS

WITHOUT = "*,-ephemeral-volume-controller"
MakeRig = Callable[..., Rig]
# The same for both, and above what a hundred pods at once need: waiting for tokens is not the subject here.
QPS, BURST = "200", "400"
MODES = ("running", "restarted")
CONFLICT = re.compile(
    r"ephemeral volume \S+: PVC NAMESPACE/\S+ was not created for pod NAMESPACE/\S+ \(pod is not owner\)"
)
CREATING = re.compile(r"ephemeral volume \S+: create PVC (\S+): ")
LIMITS = (f"--kube-api-qps={QPS}", f"--kube-api-burst={BURST}")


def settled(outcome: Any) -> list[Any]:
    """The events, but those about creating a claim that is there: only a cache that lags behind says that.

    The built-in controller says "already exists" of its own claims, now and then, after a restart.
    """
    return [
        event
        for event in outcome["events"]
        if not ((tried := CREATING.match(event[-1])) and tried[1] in outcome["claims"])
    ]


@dataclass
class Ours:
    """Our controller as a process that can be started and stopped."""

    rig: Rig
    kubeconfig: Path
    process: ControllerProcess | None = field(default=None)

    def start(self) -> None:
        if self.process is None:
            self.process = ControllerProcess(self.rig, self.kubeconfig, *LIMITS)

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None


@dataclass
class BuiltIn:
    """The controller manager with its own controller; it carries the garbage collector and the binder too."""

    rig: Rig
    running: bool = True

    def start(self) -> None:
        if not self.running:
            self.rig.start("kube-controller-manager")
            self.running = True

    def stop(self) -> None:
        self.rig.stop("kube-controller-manager")
        self.running = False


@dataclass(frozen=True)
class Both:
    """What came of every scenario with the one and with the other."""

    built_in: Outcomes
    ours: Outcomes


@pytest.fixture(scope="module")
def outcomes(make_module_rig: MakeRig) -> dict[str, Both]:
    """All four runs: each controller running on, and restarted at each step."""
    rig = make_module_rig(flags={"kube-controller-manager": LIMITS})
    kubeconfig = apply_account(rig)
    playground = Playground(rig)
    scenarios = list(SCENARIOS.all.values())

    def play(controller: Controller, prefix: str, mode: str) -> Outcomes:
        return Run(playground, scenarios, controller, prefix=prefix, restart=mode == "restarted").play()

    built_in = BuiltIn(rig)
    theirs = {mode: play(built_in, f"b-{mode[:3]}", mode) for mode in MODES}
    rig.restart_controller_manager(WITHOUT)
    ours = Ours(rig, kubeconfig)
    try:
        return {mode: Both(theirs[mode], play(ours, f"o-{mode[:3]}", mode)) for mode in MODES}
    finally:
        ours.stop()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCENARIOS.all)
def test_same_claims_and_equivalent_events(outcomes: dict[str, Both], mode: str, name: str) -> None:
    scenario = SCENARIOS.all[name]
    built_in, ours = outcomes[mode].built_in[name], outcomes[mode].ours[name]
    for number, (step, theirs, mine) in enumerate(zip(scenario.steps, built_in, ours, strict=True), 1):
        where = f"step {number}"
        assert set(theirs["claims"]) == set(step.claims), f"{where}: the built-in controller"
        assert set(mine["claims"]) == set(step.claims), f"{where}: ours"
        assert mine["claims"] == theirs["claims"], where
        assert mine["refusals"] == theirs["refusals"], where
        if scenario.timing:
            # whether a conflict is seen depends on the garbage collector; what is said about one does not
            assert all(CONFLICT.fullmatch(event[-1]) for event in mine["events"]), where
        else:
            assert settled(mine) == settled(theirs), where


def test_there_are_enough_scenarios_and_they_say_something(outcomes: dict[str, Both]) -> None:
    assert len(SCENARIOS.all) >= 60
    for mode in MODES:
        events = [event for steps in outcomes[mode].ours.values() for event in steps[-1]["events"]]
        assert len(events) >= 20
        refused = {name for name, steps in outcomes[mode].ours.items() if steps[-1]["refusals"]}
        assert refused == {name for name in SCENARIOS.all if name.startswith("invalid-")}
