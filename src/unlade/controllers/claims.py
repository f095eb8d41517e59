"""Claims, volumes, classes and content sources as the provisioner reads and writes them (E7).

What a claim's volume starts with is said in one of three places: the storage class (then it is the
administrator's, and nothing else may say it), the claim's `dataSourceRef` to an `OCISource`, or the
claim's annotations. Each becomes the parameters that the node's volumes know, so there is one grammar. What
is written is a PersistentVolume that only its own node can use.

Spec: core/v1 PersistentVolumeClaim and PersistentVolume, storage.k8s.io/v1 StorageClass; the kind is ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from unlade.controllers import quantities
from unlade.controllers.objects import MetadataOnly, ObjectMeta
from unlade.errors import InvalidInput

DRIVER: Final = "oci.unlade.dev"
TOPOLOGY_KEY: Final = "oci.unlade.dev/node"
GROUP: Final = "unlade.dev"
KIND: Final = "OCISource"
SOURCES: Final = "/apis/unlade.dev/v1alpha1/namespaces/{namespace}/ocisources/{name}"

SELECTED_NODE: Final = "volume.kubernetes.io/selected-node"
# The first since Kubernetes 1.23; both are written by the control plane.
PROVISIONERS: Final = (
    "volume.kubernetes.io/storage-provisioner",
    "volume.beta.kubernetes.io/storage-provisioner",
)
PROVISIONED_BY: Final = "pv.kubernetes.io/provisioned-by"
FINALIZER: Final = "unlade.dev/volume"
NODE_LABEL: Final = "unlade.dev/node"
DIGEST: Final = "unlade.dev/digest"
SOURCE: Final = "unlade.dev/source"

# Annotation of a claim → parameter.
_ANNOTATIONS: Final = {
    f"unlade.dev/{kebab}": name
    for kebab, name in (
        ("reference", "reference"),
        ("references", "references"),
        ("platform", "platform"),
        ("unpack", "unpack"),
        ("pull-policy", "pullPolicy"),
        ("handler", "handler"),
        ("referrer", "referrer"),
    )
}
_CONTENT: Final = frozenset({"reference", "references"})
_MODES: Final = frozenset({"ReadWriteOnce", "ReadWriteOncePod"})
_LABEL_LIMIT: Final = 63


class AnnotatedMeta(ObjectMeta):
    """Metadata with annotations and finalizers, for those who look at them."""

    annotations: dict[str, str] | None = None
    finalizers: list[str] | None = None


class ClaimHeader(MetadataOnly):
    """A claim of which only the metadata was asked for."""

    metadata: AnnotatedMeta


class OwnClaim(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a claim that is this node's to serve."""

    uid: str
    resource_version: str


class DataSource(msgspec.Struct, rename="camel"):
    """What a claim says it starts with."""

    kind: str
    name: str
    api_group: str | None = None
    namespace: str | None = None


class Resources(msgspec.Struct):
    """What is asked for."""

    requests: dict[str, str] | None = None
    limits: dict[str, str] | None = None


class ClaimSpec(msgspec.Struct, rename="camel"):
    """The part of a claim's spec that matters here."""

    access_modes: list[str] | None = None
    resources: Resources | None = None
    volume_name: str = ""
    storage_class_name: str | None = None
    volume_mode: str | None = None
    data_source: DataSource | None = None
    data_source_ref: DataSource | None = None
    selector: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class ClaimStatus(msgspec.Struct):
    """The part of a claim's status that matters here."""

    phase: str = ""
    capacity: dict[str, str] | None = None


class Claim(msgspec.Struct):
    """A whole claim, as it is when it is worked on."""

    metadata: AnnotatedMeta
    spec: ClaimSpec
    status: ClaimStatus = msgspec.field(default_factory=ClaimStatus)

    @property
    def size(self) -> int:
        """Bytes asked for; 0 when nothing is said."""
        requests = (self.spec.resources.requests if self.spec.resources else None) or {}
        return quantities.parse(requests["storage"]) if "storage" in requests else 0

    @property
    def capacity(self) -> int:
        """Bytes that the claim shows it has."""
        return quantities.parse((self.status.capacity or {}).get("storage", "0"))


class ClassManifest(msgspec.Struct, rename="camel"):
    """A storage class."""

    metadata: ObjectMeta
    provisioner: str
    parameters: dict[str, str] | None = None
    reclaim_policy: str = "Delete"
    mount_options: list[str] | None = None
    volume_binding_mode: str = "Immediate"


class ClaimReference(msgspec.Struct):
    """Whose a volume is."""

    namespace: str = ""
    name: str = ""
    uid: str = ""


class CsiSource(msgspec.Struct, rename="camel"):
    """The volume behind a PersistentVolume."""

    driver: str
    volume_handle: str


class VolumeSpec(msgspec.Struct, rename="camel"):
    """The part of a PersistentVolume's spec that matters here."""

    csi: CsiSource | None = None
    claim_ref: ClaimReference | None = None
    persistent_volume_reclaim_policy: str = "Retain"
    capacity: dict[str, str] | None = None


class VolumeStatus(msgspec.Struct):
    """Its phase."""

    phase: str = ""


class VolumeManifest(msgspec.Struct):
    """A PersistentVolume."""

    metadata: AnnotatedMeta
    spec: VolumeSpec
    status: VolumeStatus = msgspec.field(default_factory=VolumeStatus)


class SourceSpec(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The spec of an OCISource; the API server checked it against the schema."""

    references: list[str]
    platform: str = ""
    unpack: str = ""
    pull_policy: str = ""
    handler: str = ""
    referrer: str = ""
    secret_name: str = ""

    def parameters(self) -> dict[str, str]:
        """As the node's volumes take them."""
        named = {
            "references": " ".join(self.references),
            "platform": self.platform,
            "unpack": self.unpack,
            "pullPolicy": self.pull_policy,
            "handler": self.handler,
            "referrer": self.referrer,
        }
        return {name: value for name, value in named.items() if value}


class Source(msgspec.Struct):
    """An OCISource."""

    spec: SourceSpec


CLAIM: Final = msgspec.json.Decoder(Claim)
VOLUME: Final = msgspec.json.Decoder(VolumeManifest)
SOURCE_OBJECT: Final = msgspec.json.Decoder(Source)


class CannotProvision(InvalidInput):
    """The claim or its class says something that this driver cannot do."""

    code = "cannot-provision"


def serves(annotations: Mapping[str, str] | None, node: str) -> bool:
    """Whether the control plane left a claim to this driver, and the scheduler to this node."""
    told = annotations or {}
    return told.get(SELECTED_NODE) == node and any(told.get(name) == DRIVER for name in PROVISIONERS)


def check(claim: Claim) -> None:
    """Raise CannotProvision for what no volume of ours can be."""
    spec = claim.spec
    if spec.volume_mode == "Block":
        raise CannotProvision("block volumes are not served", next_step="use volumeMode: Filesystem")
    modes = set(spec.access_modes or ())
    if not modes <= _MODES:
        raise CannotProvision(
            f"access mode {min(modes - _MODES)} is not served: a volume lives on one node",
            next_step="use ReadWriteOnce or ReadWriteOncePod; a pod may mount it readOnly",
        )
    if isinstance(spec.selector, msgspec.Raw) and bytes(spec.selector) != b"null":
        raise CannotProvision("a selector chooses among existing volumes", next_step="remove the selector")


def asked_parameters(claim: Claim) -> dict[str, str]:
    """What the claim's own annotations say."""
    told = claim.metadata.annotations or {}
    return {name: told[key] for key, name in _ANNOTATIONS.items() if told.get(key)}


def parameters_of(storage_class: ClassManifest, own: Mapping[str, str]) -> dict[str, str]:
    """The class's parameters with the claim's own; raises CannotProvision when both name the content."""
    fixed = dict(storage_class.parameters or {})
    if own and _CONTENT & fixed.keys():
        raise CannotProvision(
            f"the storage class {storage_class.metadata.name} names its content, and so does the claim",
            next_step="use a class without `reference`, or remove it from the claim",
        )
    return {**fixed, **own}


def data_source(claim: Claim) -> DataSource | None:
    """What the claim starts with, by its newer field or the older one; raises CannotProvision."""
    source = claim.spec.data_source_ref or claim.spec.data_source
    if source is not None and source.namespace not in (None, "", claim.metadata.namespace):
        raise CannotProvision(
            "a data source in another namespace is not served", next_step="copy it into the claim's namespace"
        )
    return source


def volume_name(claim: Claim) -> str:
    """The name of a claim's volume, and of the PersistentVolume: as other provisioners name theirs."""
    return f"pvc-{claim.metadata.uid}"


def node_label(node: str) -> str:
    """A node's name as a label's value: node names may be longer than those."""
    return node if len(node) <= _LABEL_LIMIT else hashlib.sha256(node.encode()).hexdigest()[:40]


def volume_body(
    claim: Claim,
    storage_class: ClassManifest,
    *,
    node: str,
    handle: str,
    size: int,
    digests: Sequence[str],
) -> dict[str, Any]:
    """The PersistentVolume of a claim, bound to it, usable on its node alone."""
    metadata = claim.metadata
    here = [{"key": TOPOLOGY_KEY, "operator": "In", "values": [node]}]
    spec: dict[str, Any] = {
        "capacity": {"storage": quantities.write(size)},
        "accessModes": claim.spec.access_modes,
        "persistentVolumeReclaimPolicy": storage_class.reclaim_policy,
        "storageClassName": storage_class.metadata.name,
        "volumeMode": "Filesystem",
        "claimRef": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": metadata.namespace,
            "name": metadata.name,
            "uid": metadata.uid,
        },
        "csi": {"driver": DRIVER, "volumeHandle": handle},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": here}]}},
    }
    if storage_class.mount_options:
        spec["mountOptions"] = storage_class.mount_options
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": volume_name(claim),
            "labels": {NODE_LABEL: node_label(node)},
            "annotations": {PROVISIONED_BY: DRIVER, **content_annotations(digests)},
            # Holds the object until the data on the node's disk is gone.
            "finalizers": [FINALIZER],
        },
        "spec": spec,
    }


def content_annotations(digests: Sequence[str]) -> dict[str, str]:
    """What the references resolved to: whole references, and the digests alone."""
    return {
        DIGEST: ",".join(text.rpartition("@")[2] for text in digests),
        SOURCE: ",".join(digests),
    }
