"""Credentials as the kubelet passes them: an AuthConfig per pull (V4).

The kubelet has looked already: pull secrets of the pod and its service account, credential-provider
plugins, the node's Docker file. It tries each candidate in a pull of its own. What comes without one is
left to the node's own Docker configuration, as containerd leaves it to its own.
"""

from __future__ import annotations

from unlade.cri.api import images_pb2 as api
from unlade.model import Reference
from unlade.registry import Credential, CredentialSource, NoCredentials, StaticCredentials
from unlade.registry.credentials import ANONYMOUS, decode_auth, matching_keys


def from_auth(auth: api.AuthConfig, reference: Reference) -> CredentialSource | None:
    """What to pull this reference with; None when the kubelet has nothing to say about it.

    A credential for another server is never sent: the pull is anonymous then. Raises InvalidCredentials.
    """
    username, password = auth.username, auth.password
    if not username and not password and auth.auth:
        username, password = decode_auth(auth.auth, "the pod's pull secret")
    credential = Credential(username, password, auth.identity_token, auth.registry_token)
    if credential == ANONYMOUS:
        return None
    registry = reference.registry
    if auth.server_address and not matching_keys([auth.server_address], registry, reference.repository):
        return NoCredentials()
    return StaticCredentials({registry: credential})
