"""The front door: four verbs as plain functions, for programs that want a directory and no ceremony.

::

    import unlade
    done = unlade.deliver("registry.example.com/team/model:v1", "./model")
    for row in unlade.plan("registry.example.com/team/model:v1").files(): ...

Each call makes what it needs and closes it again; a program that delivers often makes one `Engine` and keeps
it. Nothing here prints, reads the environment beyond Docker's and containerd's own configuration files, or
keeps state between calls. Errors are `unlade.errors`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

from unlade.delivery import (
    AsTree,
    Delivered,
    Destination,
    Directory,
    Engine,
    InStore,
    PullPolicy,
    Request,
)
from unlade.model import Deadline, Platform, Reference
from unlade.pack import Pushed, PushOptions
from unlade.pack import push as _push
from unlade.planning import Plan
from unlade.registry import CredentialSource, DockerConfigCredentials, Registry, RegistryConfig
from unlade.store import DirStore
from unlade.transfer import Progress, silent
from unlade.transfer.copy import Copied, End, RegistryEnd
from unlade.transfer.copy import copy as _copy
from unlade.transfer.image_layout import parse_end

References = str | Reference | Sequence[str | Reference]
Path = str | os.PathLike[str]


def connect(*, plain_http: Iterable[str] = (), credentials: CredentialSource | None = None) -> Registry:
    """A client with this machine's configuration: mirrors, certificates, Docker's and Podman's logins.

    `plain_http` names the registries (host[:port]) without TLS. The caller closes it.
    """
    system = RegistryConfig.system()
    config = RegistryConfig(plain_http=frozenset(plain_http), certs_dirs=system.certs_dirs)
    return Registry(config, credentials or DockerConfigCredentials())


def deliver(
    references: References,
    directory: Path | None = None,
    *,
    registry: Registry | None = None,
    plain_http: Iterable[str] = (),
    store: Path | DirStore | None = None,
    platform: str | Platform | None = None,
    pull: PullPolicy | None = "always",
    unpack: Literal["auto", "always", "never"] = "auto",
    only: Sequence[str] = (),
    as_file: Sequence[str] = (),
    family: str | None = None,
    artifact_type: str = "",
    annotations: Mapping[str, str] | None = None,
    sub_path: str = "",
    referrer: str = "",
    replace: bool = False,
    timeout: float | None = None,
    progress: Progress = silent,
) -> Delivered:
    """Make references a directory, atomically; several are merged in order.

    Without a directory, the content goes into the store and stays there: as a shared tree for several
    references, as blobs for one. `progress` is called from several threads. Raises UnladeError.
    """
    wanted = _references(references)
    destination: Destination
    if directory is not None:
        destination = Directory(os.fspath(directory), replace)
    else:
        destination = InStore() if len(wanted) == 1 else AsTree()
    request = Request(
        references=wanted,
        destination=destination,
        platform=_platform(platform),
        pull=pull,
        unpack=unpack,
        only=tuple(only),
        as_file=tuple(as_file),
        family=family,
        artifact_type=artifact_type,
        annotations=annotations or {},
        sub_path=sub_path,
        referrer=referrer,
    )
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(_client(stack, registry, plain_http), _store(stack, store)))
        return engine.deliver(request, deadline=_deadline(timeout), progress=progress)


def plan(
    references: References,
    *,
    registry: Registry | None = None,
    plain_http: Iterable[str] = (),
    platform: str | Platform | None = None,
    unpack: Literal["auto", "always", "never"] = "auto",
    only: Sequence[str] = (),
    as_file: Sequence[str] = (),
    family: str | None = None,
    artifact_type: str = "",
    annotations: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Plan:
    """What references would become: each file, its size, its layer and the rule that puts it there (V16).

    Fetches manifests, and the first bytes of a layer only where its types leave the question open.
    """
    request = Request(
        references=_references(references),
        destination=AsTree(),
        platform=_platform(platform),
        pull="always",
        unpack=unpack,
        only=tuple(only),
        as_file=tuple(as_file),
        family=family,
        artifact_type=artifact_type,
        annotations=annotations or {},
    )
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(_client(stack, registry, plain_http)))
        return engine.plan(request, deadline=_deadline(timeout))[0]


def push(
    sources: Path | Sequence[Path],
    reference: str | Reference,
    *,
    registry: Registry | None = None,
    plain_http: Iterable[str] = (),
    options: PushOptions | None = None,
    timeout: float | None = None,
    progress: Progress = silent,
) -> Pushed:
    """Publish a directory or files; the same content gives the same digest on any machine."""
    listed = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    with ExitStack() as stack:
        return _push(
            listed,
            _reference(reference),
            registry=_client(stack, registry, plain_http),
            options=options,
            deadline=_deadline(timeout),
            progress=progress,
        )


def copy(
    source: str | Reference,
    target: str | Reference,
    *,
    registry: Registry | None = None,
    plain_http: Iterable[str] = (),
    platform: str | Platform | None = None,
    referrers: bool = False,
    timeout: float | None = None,
    progress: Progress = silent,
) -> Copied:
    """Copy between repositories without unpacking; digests stay what they are, present blobs are skipped.

    Either side may also be `oci:DIR[:NAME]`, an OCI image layout.
    """
    with ExitStack() as stack:
        client = _client(stack, registry, plain_http)
        return _copy(
            _end(source, client),
            _end(target, client),
            platform=_platform(platform),
            referrers=referrers,
            deadline=_deadline(timeout),
            progress=progress,
        )


def _end(given: str | Reference, client: Registry) -> End:
    return RegistryEnd(client, given) if isinstance(given, Reference) else parse_end(given, client)


def _client(stack: ExitStack, registry: Registry | None, plain_http: Iterable[str]) -> Registry:
    return registry if registry is not None else stack.enter_context(connect(plain_http=plain_http))


def _store(stack: ExitStack, store: Path | DirStore | None) -> DirStore | None:
    if store is None or isinstance(store, DirStore):
        return store
    return stack.enter_context(DirStore(store))


def _references(given: References) -> tuple[Reference, ...]:
    if isinstance(given, str | Reference):
        return (_reference(given),)
    return tuple(_reference(one) for one in given)


def _reference(given: str | Reference) -> Reference:
    return given if isinstance(given, Reference) else Reference.parse(given)


def _platform(given: str | Platform | None) -> Platform | None:
    return Platform.parse(given) if isinstance(given, str) else given


def _deadline(timeout: float | None) -> Deadline:
    return Deadline.never() if timeout is None else Deadline.after(timeout)
