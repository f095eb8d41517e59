"""Events of pods for the node's service: the controllers' recorder behind the service's small protocol.

The two faces do not know each other; this joins them. The Kubernetes client is imported with the first event,
because most nodes run for days without a pull that is long enough for one. A kubeconfig that is not there yet
(the kubelet makes its own when the node joins) is looked for again later.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from unlade.errors import InvalidInput, UnladeError

if TYPE_CHECKING:
    from unlade.controllers.recorder import Recorder
    from unlade.cri.pulls import Pod

_log = logging.getLogger(__name__)
COMPONENT: Final = "unlade-node"
# Events a second of the whole node, and at once: far more than long pulls make.
_RATE: Final = 2.0
_BURST: Final = 10
# A kubeconfig that could not be used is tried again after so long.
_AGAIN: Final = 60.0


class RecordedEvents:
    """Writes events with the credentials of a kubeconfig; see `unlade.cri.announcing.PodEvents`."""

    def __init__(self, kubeconfig: str) -> None:
        """Raises InvalidInput when the Kubernetes client is not installed."""
        if importlib.util.find_spec("kubernetes") is None:
            raise InvalidInput(
                "events of pods need kubernetes, which is not installed",
                next_step="pip install 'unlade[kube]', or leave --kubeconfig out",
            )
        self._kubeconfig = kubeconfig
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None
        self._not_before = 0.0

    def tell(self, pod: Pod, reason: str, message: str) -> None:
        """An ordinary event about a pod; never raises."""
        recorder = self._connected()
        if recorder is not None:
            from unlade.controllers.recorder import Subject

            recorder.inform(Subject("Pod", pod.namespace, pod.name, pod.uid), reason, message)

    def close(self) -> None:
        """Send what is pending, for a short while."""
        with self._lock:
            if self._recorder is not None:
                self._recorder.stop()

    def _connected(self) -> Recorder | None:
        with self._lock:
            if self._recorder is None and time.monotonic() >= self._not_before:
                self._not_before = time.monotonic() + _AGAIN
                try:
                    self._recorder = self._connect()
                except (UnladeError, ImportError) as error:
                    _log.warning("no events of pods: %s", error)
            return self._recorder

    def _connect(self) -> Recorder:
        from unlade.controllers.api import ApiServer, load_client
        from unlade.controllers.recorder import Recorder
        from unlade.controllers.throttle import TokenBucket

        client = load_client(kubeconfig=self._kubeconfig, context=None, connections=1, user_agent=COMPONENT)
        recorder = Recorder(ApiServer(client), COMPONENT, limit=TokenBucket(_RATE, _BURST))
        recorder.start()
        return recorder
