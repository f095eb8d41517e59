"""Which token realms a registry may name: where its credentials, or a request of ours, may be sent.

A 401 names the URL of a token server. A hostile registry could point it at a metadata service, at a machine
in the private network, or at a host that collects passwords; so the realm must be over TLS (plain HTTP only
where that very `host:port` is allowlisted for it) and at one of: - the registry's own host, on any port; -
a host that the caller allowlisted; - the known token host of a public registry (the table below); - a
sibling or parent name of the registry below one domain of its own (`registry.example.com` may name
  `gitlab.example.com` or `example.com`), the usual set-up of self-hosted forges. Not for addresses, and not
  across a public suffix or a hosting domain where neighbours are strangers.
All else is refused, with or without credentials.
"""

from __future__ import annotations

from typing import Final

from unlade.registry.config import RegistryConfig
from unlade.registry.errors import BadResponse, PlainHTTPRefused, UntrustedRealm
from unlade.registry.origins import Origin, Url, ip_literal, is_plain_allowed, parse_url

# Registries whose tokens come from a host outside their own domain's reach, as they announce it.
_KNOWN: Final = {
    "registry-1.docker.io": "auth.docker.io",
    "index.docker.io": "auth.docker.io",
    "docker.io": "auth.docker.io",
    "registry.gitlab.com": "gitlab.com",
    "registry.redhat.io": "sso.redhat.com",
    "registry.connect.redhat.com": "sso.redhat.com",
}
# Second-level names that belong to a country's registry, not to one owner: co.uk, com.au, …
_PUBLIC_SECOND_LEVEL: Final = frozenset(
    {"co", "com", "net", "org", "gov", "edu", "ac", "ne", "or", "go", "gob"}
)
# Domains whose subdomains belong to different customers.
_SHARED_DOMAINS: Final = frozenset(
    {
        "amazonaws.com",
        "appspot.com",
        "azurecr.io",
        "azurewebsites.net",
        "cloudapp.net",
        "cloudfront.net",
        "fly.dev",
        "github.io",
        "gitlab.io",
        "herokuapp.com",
        "jfrog.io",
        "netlify.app",
        "ngrok.io",
        "ngrok-free.app",
        "nip.io",
        "on.aws",
        "pages.dev",
        "pkg.dev",
        "run.app",
        "sslip.io",
        "trycloudflare.com",
        "vercel.app",
        "web.app",
        "windows.net",
        "workers.dev",
        "xip.io",
    }
)


def check_realm(unsafe_realm: str, registry: Origin, config: RegistryConfig) -> Url:
    """The realm's URL when it may be used for this registry; raises UntrustedRealm or PlainHTTPRefused."""
    try:
        url = parse_url(unsafe_realm)
    except BadResponse as error:
        raise UntrustedRealm(
            f"{registry} names a token realm that is not a usable URL", next_step="report it to its operator"
        ) from error
    realm = url.origin
    if realm.scheme == "http" and not is_plain_allowed(realm, config.plain_http) and realm != registry:
        raise PlainHTTPRefused(
            f"{registry} names a token realm without TLS at {realm}",
            next_step=f"if that host is trusted, allow it: UNLADE_PLAIN_HTTP={realm.authority}",
        )
    if realm.host == registry.host or realm.authority in config.token_realm_allowlist:
        return url
    if not realm.is_metadata and (
        realm == Origin("https", _KNOWN.get(registry.host, ""), 443) or _siblings(realm.host, registry.host)
    ):
        return url
    raise UntrustedRealm(
        f"{registry} names a token realm at {realm}, another host",
        next_step=f"if that host issues the registry's tokens: UNLADE_TOKEN_REALMS={realm.authority}",
    )


def _siblings(realm: str, registry: str) -> bool:
    """Whether two names are below (or at) one domain that has a single owner, as far as names can tell."""
    if ip_literal(realm) is not None or ip_literal(registry) is not None:
        return False
    domain = registry.rstrip(".").partition(".")[2]
    labels = domain.split(".")
    if len(labels) < 2 or (len(labels) == 2 and labels[0] in _PUBLIC_SECOND_LEVEL):
        return False
    if any(domain == shared or domain.endswith(f".{shared}") for shared in _SHARED_DOMAINS):
        return False
    name = realm.rstrip(".")
    return name == domain or name.endswith(f".{domain}")
