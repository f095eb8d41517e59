"""A small client of the Kubernetes API for tests: JSON in, JSON out, deadlines everywhere.

It exists so that tests of our controllers do not use the client the controllers use, and because a kubectl
process per call would take most of the time. Paths come from the API's own discovery. `until` is the one way
to wait: it names what was waited for and what was last seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import urllib3

T = TypeVar("T")
Json = dict[str, Any]


class ApiError(Exception):
    """The API server's refusal: HTTP status, reason and message."""

    def __init__(self, status: int, body: Json) -> None:
        self.status = status
        self.reason = str(body.get("reason", ""))
        self.message = str(body.get("message", ""))
        super().__init__(f"{status} {self.reason}: {self.message}")


class Overdue(AssertionError):
    """A deadline passed; the message says what was waited for and what was seen last."""


def until(what: str, probe: Callable[[], T | None], *, seconds: float = 30, pause: float = 0.1) -> T:
    """Call `probe` until it returns something true; Overdue names `what` and the last value or API error."""
    deadline = time.monotonic() + seconds
    while True:
        last: object
        try:
            value = probe()
        except (ApiError, urllib3.exceptions.HTTPError) as error:
            last = error
        else:
            if value:
                return value
            last = value
        if time.monotonic() > deadline:
            raise Overdue(f"not within {seconds:g} s: {what}; last seen: {last!r}")
        time.sleep(pause)


class Api:
    """One identity's connection to an API server."""

    def __init__(
        self,
        server: str,
        ca: Path,
        *,
        cert: Path | None = None,
        key: Path | None = None,
        token: str | None = None,
    ) -> None:
        self.server = server
        self.ca = ca
        headers = {"Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = urllib3.PoolManager(
            maxsize=16,
            headers=headers,
            ca_certs=str(ca),
            cert_file=str(cert) if cert else None,
            key_file=str(key) if key else None,
            retries=False,
        )
        self._resources: dict[str, dict[str, Json]] = {}

    def close(self) -> None:
        """Close the connections."""
        self._http.clear()

    def raw(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        seconds: float = 30,
    ) -> bytes:
        """One request; the body of the answer, or ApiError."""
        url = f"{self.server}{path}"
        if query:
            url += "?" + urlencode(query)
        headers = dict(self._http.headers)
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), content_type
        answer = self._http.request(method, url, body=data, headers=headers, timeout=seconds)
        if answer.status >= 400:
            try:
                status = json.loads(answer.data)
            except ValueError:
                status = {"message": answer.data.decode(errors="replace")}
            raise ApiError(answer.status, status)
        return answer.data

    def request(self, method: str, path: str, **options: Any) -> Json:
        """One request with a JSON answer."""
        parsed: Json = json.loads(self.raw(method, path, **options))
        return parsed

    def path(self, kind: str, namespace: str | None = None, name: str = "", *, version: str = "v1") -> str:
        """The path of a collection or object; `version` is an apiVersion such as "storage.k8s.io/v1"."""
        base = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        if kind not in self._resources.get(version, {}):
            found = self.request("GET", base)["resources"]
            self._resources[version] = {r["kind"]: r for r in found if "/" not in r["name"]}
            if kind not in self._resources[version]:
                raise ApiError(404, {"reason": "NotFound", "message": f"no {kind} in {version}"})
        resource = self._resources[version][kind]
        middle = f"/namespaces/{namespace}" if resource["namespaced"] and namespace else ""
        return f"{base}{middle}/{resource['name']}" + (f"/{name}" if name else "")

    def create(self, thing: Json) -> Json:
        """Create an object; what the server made of it."""
        version, kind = thing["apiVersion"], thing["kind"]
        path = self.path(kind, thing["metadata"].get("namespace"), version=version)
        return self.request("POST", path, body=thing)

    def get(self, kind: str, name: str, namespace: str | None = None, *, version: str = "v1") -> Json:
        """Read an object; ApiError 404 when there is none."""
        return self.request("GET", self.path(kind, namespace, name, version=version))

    def list(
        self, kind: str, namespace: str | None = None, *, version: str = "v1", **query: str
    ) -> list[Json]:
        """All objects of a kind; query arguments such as labelSelector, fieldSelector."""
        items: list[Json] = []
        token = ""
        while True:
            page = self.request(
                "GET",
                self.path(kind, namespace, version=version),
                query={**query, "limit": "500", "continue": token},
            )
            items += page["items"]
            token = page["metadata"].get("continue", "")
            if not token:
                return items

    def patch(
        self, kind: str, name: str, change: Any, namespace: str | None = None, *, version: str = "v1"
    ) -> Json:
        """A JSON merge patch (a mapping) or a JSON patch (a list)."""
        form = "application/json-patch+json" if isinstance(change, list) else "application/merge-patch+json"
        path = self.path(kind, namespace, name, version=version)
        return self.request("PATCH", path, body=change, content_type=form)

    def delete(
        self,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        version: str = "v1",
        grace: int | None = None,
        missing_ok: bool = True,
    ) -> None:
        """Delete an object; returns when the server has accepted, not when it is gone."""
        query = {} if grace is None else {"gracePeriodSeconds": str(grace)}
        try:
            self.request("DELETE", self.path(kind, namespace, name, version=version), query=query)
        except ApiError as error:
            if error.status != 404 or not missing_ok:
                raise

    def gone(
        self, kind: str, name: str, namespace: str | None = None, *, seconds: float = 60, version: str = "v1"
    ) -> None:
        """Wait until an object does not exist."""

        def missing() -> bool:
            try:
                self.get(kind, name, namespace, version=version)
            except ApiError as error:
                if error.status == 404:
                    return True
                raise
            return False

        until(f"{kind} {namespace or ''}/{name} gone", missing, seconds=seconds)

    def watch(
        self, kind: str, namespace: str | None = None, *, version: str = "v1", **query: str
    ) -> Iterator[Json]:
        """Events of a watch until the server ends it (give timeoutSeconds)."""
        path = self.path(kind, namespace, version=version)
        url = f"{self.server}{path}?" + urlencode({**query, "watch": "true"})
        answer = self._http.request("GET", url, preload_content=False)
        try:
            rest = b""
            for piece in answer.stream(1 << 16):
                *lines, rest = (rest + piece).split(b"\n")
                yield from (json.loads(line) for line in lines if line)
        finally:
            with suppress(urllib3.exceptions.HTTPError):
                answer.close()
