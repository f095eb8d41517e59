"""The nouns: references, digests, platforms, manifests. Frozen, strict, and without I/O.

Everything here is valid once it exists; whoever holds one need not check it again. Every other room may
import this one, and this one imports only `unlade.errors`.
"""

from unlade.model.deadline import Deadline
from unlade.model.digest import ChainID, DiffID, Digest, InvalidDigest, chain_id
from unlade.model.manifest import (
    MAX_MANIFEST_BYTES,
    Descriptor,
    Index,
    InvalidManifest,
    Manifest,
    decode_manifest,
    platform_to_json,
)
from unlade.model.platform import InvalidPlatform, Platform
from unlade.model.reference import InvalidReference, Reference

__all__ = [
    "MAX_MANIFEST_BYTES",
    "ChainID",
    "Deadline",
    "Descriptor",
    "DiffID",
    "Digest",
    "Index",
    "InvalidDigest",
    "InvalidManifest",
    "InvalidPlatform",
    "InvalidReference",
    "Manifest",
    "Platform",
    "Reference",
    "chain_id",
    "decode_manifest",
    "platform_to_json",
]
