"""The connection to a Kubernetes API server: the official client's configuration, credentials and pool.

Every request of the controllers goes through `ApiServer.request`, which uses the official client for the
address, TLS, tokens (and their refresh) and the pooled connections, and adds what that client lacks: a
deadline on every call, one kind of error for "no answer" and one for "the answer was no", and raw bodies
(its models would cost fifty times the memory). Retries are off in the pool: whoever calls knows better
whether and when to try again.

Invariant: nothing but `ApiError` leaves this module for a failed request.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec
import urllib3
from kubernetes import client as kube
from kubernetes import config as kube_config

from unlade.controllers.objects import STATUS, Status
from unlade.errors import InvalidInput, UnladeError

JSON = "application/json"
# what a server that can strip objects to their metadata should do, and what one that cannot may do
METADATA_ONLY = "application/json;as={kind};g=meta.k8s.io;v=v1,application/json"

CONNECT_TIMEOUT = 10.0  # a healthy API server accepts in milliseconds; a dead one must not hold a worker
FRESH = 10.0  # credentials are looked at again after so long: far less than any token's overlap
CALL_TIMEOUT = 32.0  # the API server's own limit for an admission chain is 30 s: let it answer first


class ApiError(UnladeError):
    """A request that brought nothing. `status` 0: no answer at all (refused, cut, timed out)."""

    code = "kubernetes-api"
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        retry_after: float = 0.0,
        next_step: str = "",
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.status = status
        self.reason = reason
        self.retry_after = retry_after

    @property
    def unanswered(self) -> bool:
        """True when it is unknown whether the server did what was asked."""
        return self.status == 0

    @property
    def gone(self) -> bool:
        """True for 410: the resource version or page token is older than what the server remembers."""
        return self.status == 410

    @property
    def wants_patience(self) -> bool:
        """True when the server itself asks to come back later: overload, start-up, shutdown."""
        return self.status in {429, 503, 504}


class ApiServer:
    """An authenticated connection; thread-safe. `observe(verb, status, seconds)` is told of each answer."""

    def __init__(
        self, client: kube.ApiClient, *, observe: Callable[[str, int, float], None] = lambda *_: None
    ) -> None:
        self.client = client
        self._observe = observe
        self._lock = threading.Lock()
        self._credentials: dict[str, str] = {}
        self._credentials_until = 0.0

    def request(
        self,
        verb: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Mapping[str, Any] | None = None,
        accept: str = JSON,
        content_type: str = JSON,
        read_timeout: float = CALL_TIMEOUT,
    ) -> urllib3.BaseHTTPResponse:
        """The answer with its body unread (the caller reads or closes it). Raises ApiError from 300 up."""
        started = time.monotonic()
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = content_type
        status = 0
        try:
            headers.update(self._authorization())
            url = f"{self.client.configuration.host}{path}{'?' if query else ''}{urlencode(query)}"
            answer = self.client.call_api(
                verb, url, headers, body=body, _request_timeout=(CONNECT_TIMEOUT, read_timeout)
            ).response
            status = answer.status
            if status == 401:
                self._credentials_until = 0.0  # a token that was replaced: ask for the new one at once
            if status >= 300:
                raise _refusal(answer)
        except (urllib3.exceptions.HTTPError, OSError, kube.ApiException) as error:
            raise unanswered(verb, path, error) from error
        finally:
            self._observe(verb, status, time.monotonic() - started)
        assert isinstance(answer, urllib3.BaseHTTPResponse)
        return answer

    def read(self, verb: str, path: str, **options: Any) -> bytes:
        """The whole body of the answer; same errors as `request`."""
        answer = self.request(verb, path, **options)
        try:
            data: bytes = answer.data
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unanswered(verb, path, error) from error
        return data

    def _authorization(self) -> dict[str, str]:
        """The client's own headers, credentials included, as they were at most FRESH seconds ago.

        The client refreshes tokens and plugins' credentials on each call, by writing to its configuration
        and not thread-safely: hence one caller at a time, and not for every request.
        """
        with self._lock:
            if time.monotonic() >= self._credentials_until:
                made = self.client.param_serialize(
                    "GET", "/", header_params={}, query_params=[], auth_settings=["BearerToken"]
                )
                self._credentials = made[2]
                self._credentials_until = time.monotonic() + FRESH
            return self._credentials

    def close(self) -> None:
        """Drops the idle connections."""
        self.client.close()


def unanswered(verb: str, path: str, error: BaseException) -> ApiError:
    """A transport's failure as an ApiError with status 0."""
    cause = error.reason if isinstance(error, kube.ApiException) else error
    return ApiError(
        f"{verb} {path}: no answer from the API server: {cause}",
        next_step="check that the API server is up and that its address and certificates are right",
    )


def _refusal(answer: urllib3.BaseHTTPResponse) -> ApiError:
    """The error an answer from 300 up stands for; proxies in between may answer with anything."""
    data = answer.data
    try:
        status = STATUS.decode(data)
    except msgspec.DecodeError:
        text = data[:200].decode("utf-8", "replace").strip()
        status = Status(message=f"HTTP {answer.status}: {text}")
    wait = answer.headers.get("Retry-After", "")
    retry_after = float(wait) if wait.isdigit() else 0.0
    if status.details is not None and status.details.retry_after_seconds:
        retry_after = max(retry_after, float(status.details.retry_after_seconds))
    return ApiError(
        status.message or f"HTTP {answer.status}",
        status=answer.status,
        reason=status.reason,
        retry_after=retry_after,
    )


def load_client(
    *, kubeconfig: str | None, context: str | None, connections: int, user_agent: str
) -> kube.ApiClient:
    """An official client from the named kubeconfig, else the pod's own account, else the usual kubeconfig.

    Raises InvalidInput when none of them gives a server and credentials.
    """
    configuration = kube.Configuration()
    try:
        if kubeconfig is None and context is None:
            try:
                kube_config.load_incluster_config(client_configuration=configuration)
            except kube_config.ConfigException:
                kube_config.load_kube_config(client_configuration=configuration)
        else:
            kube_config.load_kube_config(kubeconfig, context=context, client_configuration=configuration)
    except (kube_config.ConfigException, OSError) as error:
        raise InvalidInput(
            f"no usable Kubernetes configuration: {error}",
            next_step="name one with --kubeconfig, or run in a pod with a service account",
        ) from error
    configuration.retries = False
    configuration.connection_pool_maxsize = connections
    result = kube.ApiClient(configuration)
    result.user_agent = user_agent
    return result
