"""Registries: the distribution API, credentials, mirrors, uploads and referrers.

The only room that speaks HTTP. `Registry` is the client; a `CredentialSource` says who we are, a
`RegistryConfig` how to reach hosts. The errors are drawn in `unlade.registry.errors`.
"""

from typing import TYPE_CHECKING

from unlade.lazy import lazily
from unlade.registry.blobs import BlobStream
from unlade.registry.client import Registry, Resolved
from unlade.registry.config import RegistryConfig
from unlade.registry.credentials import (
    ChainCredentials,
    Credential,
    CredentialSource,
    NoCredentials,
    PullSecretCredentials,
    StaticCredentials,
)
from unlade.registry.dockerconfig import DockerConfigCredentials, erase_credential, store_credential
from unlade.registry.errors import (
    BadResponse,
    HTTPFailure,
    InvalidCredentials,
    InvalidHosts,
    NotFound,
    PlainHTTPRefused,
    RateLimited,
    Refused,
    ResponseTooLarge,
    TLSFailure,
    TooManyPages,
    TooSlow,
    Truncated,
    Unauthorized,
    Unavailable,
    Unreachable,
    UnsafeRedirect,
    UntrustedRealm,
    WrongContent,
    WrongSubject,
)
from unlade.registry.referrers import check_subject

if TYPE_CHECKING:
    from unlade.registry.providers import KubeletProviderCredentials, ServiceAccount
else:
    # Credentials of a node, which no command asks for.
    __getattr__ = lazily(__name__, {"providers": "KubeletProviderCredentials ServiceAccount"})

__all__ = [
    "BadResponse",
    "BlobStream",
    "ChainCredentials",
    "Credential",
    "CredentialSource",
    "DockerConfigCredentials",
    "HTTPFailure",
    "InvalidCredentials",
    "InvalidHosts",
    "KubeletProviderCredentials",
    "NoCredentials",
    "NotFound",
    "PlainHTTPRefused",
    "PullSecretCredentials",
    "RateLimited",
    "Refused",
    "Registry",
    "RegistryConfig",
    "Resolved",
    "ResponseTooLarge",
    "ServiceAccount",
    "StaticCredentials",
    "TLSFailure",
    "TooManyPages",
    "TooSlow",
    "Truncated",
    "Unauthorized",
    "Unavailable",
    "Unreachable",
    "UnsafeRedirect",
    "UntrustedRealm",
    "WrongContent",
    "WrongSubject",
    "check_subject",
    "erase_credential",
    "store_credential",
]
