"""The elector: one leader, failed renewals, takeover, release (E5)."""

import threading
import time
from collections.abc import Callable

import pytest
from kubernetes import client as kube

from tests.fakes.kube_api import Answer, FakeKubeApi, Request, status, wait_for
from unlade.controllers.elector import Elector, LeaseTimes
from unlade.errors import InvalidInput

TIMES = LeaseTimes(duration=4, renew=3, retry=1)


class Candidate:
    def __init__(self, api: FakeKubeApi, name: str) -> None:
        configuration = kube.Configuration(host=api.url)
        configuration.retries = False
        self.elector = Elector(
            kube.ApiClient(configuration), name="lease", namespace="ns", identity=name, times=TIMES
        )
        self.stop = threading.Event()
        self.terms: list[threading.Event] = []
        self.error: BaseException | None = None
        self.work: Callable[[threading.Event], None] = lambda lost: (None, lost.wait())[0]
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "Candidate":
        self.thread.start()
        return self

    def end(self) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        try:
            self.elector.run(self.stop, self._lead)
        except RuntimeError as error:
            self.error = error

    def _lead(self, lost: threading.Event) -> None:
        self.terms.append(lost)
        self.work(lost)

    @property
    def leads(self) -> bool:
        return self.elector.leading.is_set()


def test_the_first_leads_and_a_clean_end_hands_over_at_once(api: FakeKubeApi) -> None:
    first = Candidate(api, "first").start()
    wait_for(lambda: first.leads)
    second = Candidate(api, "second").start()
    wait_for(lambda: second.elector.holder == "first")
    assert not second.leads
    first.end()
    wait_for(lambda: second.leads, seconds=TIMES.retry + 1.0)
    second.end()


def test_a_dead_leader_is_replaced_when_its_lease_ends(api: FakeKubeApi) -> None:
    spec = {"holderIdentity": "dead", "leaseDurationSeconds": 4}
    stamp = "2026-01-01T00:00:00.000000Z"
    api.put(
        "leases",
        {
            "metadata": {"name": "lease", "namespace": "ns"},
            "spec": {**spec, "acquireTime": stamp, "renewTime": stamp},
        },
    )
    started = time.monotonic()
    second = Candidate(api, "second").start()
    wait_for(lambda: second.leads, seconds=TIMES.duration + 2 * TIMES.retry)
    assert time.monotonic() - started >= TIMES.duration - 0.1
    second.end()


def test_a_refused_connection_is_a_failed_renewal_not_the_end(api: FakeKubeApi) -> None:
    leader = Candidate(api, "leader").start()
    wait_for(lambda: leader.leads)
    api.refuse()
    time.sleep(1.2)
    api.listen()
    time.sleep(1.2)
    assert leader.leads
    assert len(leader.terms) == 1
    leader.end()


def test_a_long_outage_ends_leadership_and_the_process_runs_again(api: FakeKubeApi) -> None:
    leader = Candidate(api, "leader").start()
    wait_for(lambda: leader.leads)
    api.refuse()
    wait_for(lambda: not leader.leads, seconds=TIMES.renew + 3 * TIMES.retry)
    assert leader.terms[0].is_set()
    assert leader.elector.silent_for > 1
    api.listen()
    wait_for(lambda: len(leader.terms) == 2)
    leader.end()


def test_a_lease_that_another_took_ends_leadership_at_once(api: FakeKubeApi) -> None:
    leader = Candidate(api, "leader").start()
    wait_for(lambda: leader.leads)
    lease = api.all("leases")["ns/lease"]
    lease["spec"]["holderIdentity"] = "thief"
    api.put("leases", lease)
    wait_for(lambda: not leader.leads, seconds=TIMES.retry + 1.0)
    leader.end()


@pytest.mark.parametrize("code", [403, 404, 409, 500])
def test_a_server_that_refuses_the_lease_is_asked_again_and_quoted(
    api: FakeKubeApi, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = [status(code, "No", "not for you")]

    def refuse(request: Request) -> Answer | None:
        return refusals.pop() if refusals and request.verb != "GET" else None

    api.fault = refuse
    candidate = Candidate(api, "candidate").start()
    wait_for(lambda: candidate.leads, seconds=5)
    candidate.end()
    assert caplog.messages == ["lease: not for you"]


def test_garbage_from_a_proxy_is_a_failed_try(api: FakeKubeApi) -> None:
    garbage = [Answer(200, b"<html>hello</html>"), Answer(502, b"")]
    api.fault = lambda _request: garbage.pop() if garbage else None
    candidate = Candidate(api, "candidate").start()
    wait_for(lambda: candidate.leads, seconds=6)
    candidate.end()


def test_work_that_fails_gives_the_lease_back_and_ends_the_run(api: FakeKubeApi) -> None:
    candidate = Candidate(api, "candidate")

    def fail(_lost: threading.Event) -> None:
        raise RuntimeError("broken")

    candidate.work = fail
    candidate.start()
    candidate.thread.join(5)
    assert str(candidate.error) == "broken"
    assert not api.all("leases")["ns/lease"]["spec"].get("holderIdentity")


def test_times_that_cannot_work_are_refused() -> None:
    with pytest.raises(InvalidInput):
        LeaseTimes(duration=10, renew=10, retry=2)
    with pytest.raises(InvalidInput):
        LeaseTimes(duration=15, renew=2, retry=2)
