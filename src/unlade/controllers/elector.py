"""One leader among the replicas, by a Lease; the official client's elector with its sharp edges covered.

The official `LeaderElection` decides (read the lease, compare, take or renew); this module drives it,
because its own loops cannot be stopped, let a refused connection end the process, and never give a lease
back. Here a transport error is a renewal that failed, every lease request has a deadline, a lease that
another holds ends leadership at once, and a clean stop releases the lease so that the next replica need
not wait for it to expire.

What leadership protects is work that is idempotent by name, so two leaders for the length of one request
are harmless; the lease exists to halve the load and the noise. Spec: coordination.k8s.io/v1 Lease.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import urllib3
from kubernetes import client as kube
from kubernetes.leaderelection import electionconfig, leaderelection
from kubernetes.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

from unlade.controllers.objects import STATUS
from unlade.controllers.throttle import Backoff
from unlade.errors import InvalidInput, UnladeError

log = logging.getLogger(__name__)
# the official elector says "acquired" at every renewal, twice a second a replica
logging.getLogger("leaderelection").setLevel(logging.WARNING)

STOP_TIMEOUT = 45.0  # longer than any single request may take: after that, work would outlive the lease


class LeadershipStuck(UnladeError):
    """The work of a leader did not end when its leadership did; the process must."""

    code = "leadership-stuck"
    retryable = True


@dataclass(frozen=True)
class LeaseTimes:
    """How long a lease lasts, how long a leader tries to renew it, and how often it does (seconds).

    A standby looks four times as often.
    """

    duration: int = 15
    renew: int = 10
    retry: float = 2.0

    def __post_init__(self) -> None:
        if not (1 <= self.retry * 1.2 < self.renew < self.duration):
            raise InvalidInput(
                f"lease times {self.duration}/{self.renew}/{self.retry} do not fit",
                next_step="choose duration > renew > 1.2 x retry >= 1 second",
            )


class Elector:
    """Runs for the lease until stopped; runs `lead` while it is held."""

    def __init__(
        self, client: kube.ApiClient, *, name: str, namespace: str, identity: str, times: LeaseTimes
    ):
        self.times = times
        self.leading = threading.Event()
        # two requests a try, a read and a write: both must fit between the last moment to renew and the end
        self._leases = _Leases(kube.CoordinationV1Api(client), timeout=(times.duration - times.renew) / 2)
        self._lock = LeaseLock(name, namespace, identity)
        self._lock.api_instance = self._leases  # type: ignore[assignment] # the three calls it makes
        self._election = leaderelection.LeaderElection(
            electionconfig.Config(
                self._lock,
                lease_duration=times.duration,
                renew_deadline=times.renew,
                retry_period=times.retry,
                onstarted_leading=lambda: None,
                onstopped_leading=lambda: None,
            )
        )

    @property
    def holder(self) -> str:
        """Who held the lease when it was last read."""
        record = self._election.observed_record
        return str(record.holder_identity or "") if record is not None else ""

    @property
    def silent_for(self) -> float:
        """Seconds since the lease was last read or written; infinite before the first time."""
        return time.monotonic() - self._leases.contact

    def run(self, stop: threading.Event, lead: Callable[[threading.Event], None]) -> None:
        """Until `stop`: wait for the lease, run `lead(lost)` while renewing it, start over when it is lost.

        `lead` must return soon after `lost` is set. What it raises is raised here, after the lease was
        given back; LeadershipStuck when it does not return.
        """
        while not stop.is_set():
            if not self._acquire(stop):
                return
            self._lead(stop, lead)

    def _acquire(self, stop: threading.Event) -> bool:
        # a standby counts a lease's time from when it saw the renewal: looking often keeps that close to
        # when it was made, and the takeover close to the lease's end
        spread = Backoff(self.times.retry / 4, self.times.retry / 4)
        while not stop.is_set():
            if self._try():
                return True
            stop.wait(spread.next())
        return False

    def _lead(self, stop: threading.Event, lead: Callable[[threading.Event], None]) -> None:
        lost = threading.Event()
        failure: list[BaseException] = []

        def work() -> None:
            try:
                lead(lost)
            except BaseException as error:
                failure.append(error)

        log.info("leading as %s", self._lock.identity)
        self.leading.set()
        worker = threading.Thread(target=work, name="leader", daemon=True)
        worker.start()
        try:
            held = self._hold(stop, worker)
        finally:
            lost.set()
            worker.join(STOP_TIMEOUT)
            self.leading.clear()
        if worker.is_alive():
            raise LeadershipStuck(
                "the leader's work did not end with its leadership", next_step="let the process restart"
            )
        if held:
            self._release()
        if failure:
            raise failure[0]
        log.info("stopped leading%s", "" if held else ": the lease was lost")

    def _hold(self, stop: threading.Event, worker: threading.Thread) -> bool:
        """Renews until told to stop (True) or the lease is lost (False).

        No try begins later than `renew` after the last success began, and none takes longer than what is
        left of `duration` then: this process knows that it lost the lease before another can take it.
        """
        renewed = time.monotonic()
        while True:
            left = renewed + self.times.renew - time.monotonic()
            if stop.wait(min(self.times.retry, max(0.0, left))) or not worker.is_alive():
                return True
            began = time.monotonic()
            if began - renewed >= self.times.renew:
                log.warning("the lease could not be renewed for %d s", self.times.renew)
                return False
            if self._try():
                renewed = began
            elif self.holder not in {"", self._lock.identity}:
                log.warning("the lease was taken by %s", self.holder)
                return False

    def _try(self) -> bool:
        """One read and at most one write of the lease; any failure is False."""
        try:
            return bool(self._election.try_acquire_or_renew())
        except Exception:
            # what the official code does not expect is still only a renewal that failed
            log.warning("lease: unexpected failure", exc_info=True)
            return False

    def _release(self) -> None:
        """Gives the lease back, so that a standby need not wait for it to expire; failing is no harm."""
        record = self._election.observed_record
        if record is None or record.holder_identity != self._lock.identity:
            return
        empty = LeaderElectionRecord("", "1", record.acquire_time, record.renew_time)
        try:
            found, _current = self._lock.get(self._lock.name, self._lock.namespace)
            if found:
                self._lock.update(self._lock.name, self._lock.namespace, empty)
        except Exception:
            log.info("the lease was not released and will expire", exc_info=True)


class _Leases:
    """The three calls that LeaseLock makes, each with a deadline.

    A transport error becomes the client's own ApiException, which LeaseLock takes for a failed try. Why a
    try failed is logged when the reason is a new one: the official elector would keep it to itself.
    """

    def __init__(self, api: kube.CoordinationV1Api, timeout: float) -> None:
        self._api = api
        self._timeout = timeout
        self._reason = ""
        self.contact = float("-inf")

    def read_namespaced_lease(self, name: str, namespace: str) -> Any:
        # absent is what every lease is before its first holder
        return self._call(self._api.read_namespaced_lease, name, namespace, usual=404)

    def create_namespaced_lease(self, namespace: str, body: Any) -> Any:
        return self._call(self._api.create_namespaced_lease, namespace, body)

    def replace_namespaced_lease(self, name: str, namespace: str, body: Any) -> Any:
        return self._call(self._api.replace_namespaced_lease, name, namespace, body)

    def _call(self, method: Callable[..., Any], *arguments: Any, usual: int = 0) -> Any:
        try:
            result = method(*arguments, _request_timeout=self._timeout)
        except kube.ApiException as error:
            if error.status != usual:
                self._say(_message(error))
            raise
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._say(f"no answer: {error}")
            raise kube.ApiException(status=0, reason=f"no answer: {error}") from error
        self._reason = ""
        self.contact = time.monotonic()
        return result

    def _say(self, reason: str) -> None:
        if reason != self._reason:
            log.warning("lease: %s", reason)
            self._reason = reason


def _message(error: kube.ApiException) -> str:
    """The server's words, where it sent any."""
    try:
        return STATUS.decode(error.body or "").message
    except msgspec.DecodeError:
        return f"{error.status} {error.reason}"
