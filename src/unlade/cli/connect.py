"""From the shared options to a registry client: certificates, mirrors, plain hosts and credentials.

Imported when a command talks to a registry, not before: it brings the HTTP client with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from unlade.cli.settings import REALMS_ENV, listed_hosts
from unlade.errors import InvalidInput
from unlade.registry import (
    Credential,
    CredentialSource,
    DockerConfigCredentials,
    Registry,
    RegistryConfig,
    StaticCredentials,
)

if TYPE_CHECKING:
    from unlade.cli.settings import Settings


def connect(settings: Settings, named: frozenset[str]) -> Registry:
    """A client; what was said about TLS and credentials holds for the registries named by this command."""
    return Registry(registry_config(settings, named), credentials(settings, named))


def registry_config(settings: Settings, named: frozenset[str]) -> RegistryConfig:
    """The machine's configuration with this command's options on top."""
    config = RegistryConfig.system()
    certs_dirs = (settings.certs_dir, *config.certs_dirs) if settings.certs_dir else config.certs_dirs
    return replace(
        config,
        plain_http=settings.plain_hosts(named),
        insecure_skip_tls_verify=named if settings.insecure_skip_tls_verify else frozenset(),
        ca_files=(settings.ca_file,) if settings.ca_file else (),
        certs_dirs=certs_dirs,
        token_realm_allowlist=listed_hosts(REALMS_ENV),
    )


def credentials(settings: Settings, named: frozenset[str]) -> CredentialSource:
    """--creds for the named registries; otherwise what Docker and Podman have stored."""
    if settings.creds is None:
        return DockerConfigCredentials()
    user, colon, password = settings.creds.partition(":")
    if not colon or not user:
        raise InvalidInput("--creds is not USER:PASSWORD", next_step="write --creds USER:PASSWORD")
    credential = Credential(username=user, password=password)
    return StaticCredentials(dict.fromkeys(named, credential))
