"""Which lists are merged by key: the facts of Kubernetes 1.21.2, the schema that kpt carries.

A list is merged element by element only where the API says so (patch strategy "merge"); every other list,
and every list of a type that is not in this table, is one value. The table follows kpt's bundled schema on
purpose, newer types included as "unknown": a merge that differs between tools is worse than a coarse one.
A shape maps a field to (merge keys, shape of its value or elements); keys () mean a set of scalars.
"""

from collections.abc import Mapping

Keys = tuple[str, ...] | None
Shape = Mapping[str, tuple[Keys, str]]

_META = {"metadata": (None, "ObjectMeta")}
_STATUS = {"status": (None, "Status")}
_CONTAINER: dict[str, tuple[Keys, str]] = {
    "env": (("name",), ""),
    "volumeDevices": (("devicePath",), ""),
    "volumeMounts": (("mountPath",), ""),
}

SHAPES: Mapping[str, Shape] = {
    "": {},
    "ObjectMeta": {"finalizers": ((), ""), "ownerReferences": (("uid",), "")},
    "Plain": _META,
    "Status": {"conditions": (("type",), "")},
    "Conditions": {**_META, **_STATUS},
    "ComponentStatus": {**_META, "conditions": (("type",), "")},
    "Node": {**_META, "spec": (None, "NodeSpec"), "status": (None, "NodeStatus")},
    "NodeSpec": {"podCIDRs": ((), "")},
    "NodeStatus": {"addresses": (("type",), ""), "conditions": (("type",), "")},
    "Container": {**_CONTAINER, "ports": (("containerPort", "protocol"), "")},
    "EphemeralContainer": _CONTAINER,
    "Volume": {"ephemeral": (None, "EphemeralVolumeSource")},
    "EphemeralVolumeSource": {"volumeClaimTemplate": (None, "Plain")},
    "PodSpec": {
        "containers": (("name",), "Container"),
        "ephemeralContainers": (("name",), "EphemeralContainer"),
        "hostAliases": (("ip",), ""),
        "imagePullSecrets": (("name",), ""),
        "initContainers": (("name",), "Container"),
        "topologySpreadConstraints": (("topologyKey", "whenUnsatisfiable"), ""),
        "volumes": (("name",), "Volume"),
    },
    "PodStatus": {"conditions": (("type",), ""), "podIPs": (("ip",), "")},
    "Pod": {**_META, "spec": (None, "PodSpec"), "status": (None, "PodStatus")},
    "PodTemplateSpec": {**_META, "spec": (None, "PodSpec")},
    "PodTemplate": {**_META, "template": (None, "PodTemplateSpec")},
    "WorkloadSpec": {"template": (None, "PodTemplateSpec")},
    "Workload": {**_META, **_STATUS, "spec": (None, "WorkloadSpec")},
    "JobTemplateSpec": {**_META, "spec": (None, "WorkloadSpec")},
    "CronJobSpec": {"jobTemplate": (None, "JobTemplateSpec")},
    "CronJob": {**_META, "spec": (None, "CronJobSpec")},
    "ServiceSpec": {"ports": (("port", "protocol"), "")},
    "Service": {**_META, **_STATUS, "spec": (None, "ServiceSpec")},
    "ServiceAccount": {**_META, "secrets": (("name",), "")},
    "Webhooks": {**_META, "webhooks": (("name",), "")},
    "CSINodeSpec": {"drivers": (("name",), "")},
    "CSINode": {**_META, "spec": (None, "CSINodeSpec")},
}

# For each shape, the kinds that have it, by API version.
_KINDS: Mapping[str, Mapping[str, str]] = {
    "Workload": {
        "v1": "ReplicationController",
        "apps/v1": "DaemonSet Deployment ReplicaSet StatefulSet",
        "batch/v1": "Job",
    },
    "CronJob": {"batch/v1": "CronJob", "batch/v1beta1": "CronJob"},
    "Pod": {"v1": "Pod"},
    "PodTemplate": {"v1": "PodTemplate"},
    "Service": {"v1": "Service"},
    "ServiceAccount": {"v1": "ServiceAccount"},
    "Node": {"v1": "Node"},
    "ComponentStatus": {"v1": "ComponentStatus"},
    "CSINode": {"storage.k8s.io/v1": "CSINode", "storage.k8s.io/v1beta1": "CSINode"},
    "Webhooks": {
        "admissionregistration.k8s.io/v1": "MutatingWebhookConfiguration ValidatingWebhookConfiguration",
        "admissionregistration.k8s.io/v1beta1": "MutatingWebhookConfiguration ValidatingWebhookConfiguration",
    },
    "Conditions": {
        "v1": "Namespace PersistentVolumeClaim",
        "apiregistration.k8s.io/v1": "APIService",
        "apiregistration.k8s.io/v1beta1": "APIService",
        "policy/v1": "PodDisruptionBudget",
        "policy/v1beta1": "PodDisruptionBudget",
    },
    "Plain": {
        "v1": "Binding ConfigMap Endpoints Event LimitRange PersistentVolume ResourceQuota Secret",
        "apiextensions.k8s.io/v1": "CustomResourceDefinition",
        "apiextensions.k8s.io/v1beta1": "CustomResourceDefinition",
        "apps/v1": "ControllerRevision",
        "authentication.k8s.io/v1": "TokenRequest TokenReview",
        "authentication.k8s.io/v1beta1": "TokenReview",
        "authorization.k8s.io/v1": "LocalSubjectAccessReview SelfSubjectAccessReview SelfSubjectRulesReview"
        " SubjectAccessReview",
        "authorization.k8s.io/v1beta1": "LocalSubjectAccessReview SelfSubjectAccessReview"
        " SelfSubjectRulesReview SubjectAccessReview",
        "autoscaling/v1": "HorizontalPodAutoscaler Scale",
        "autoscaling/v2beta1": "HorizontalPodAutoscaler",
        "autoscaling/v2beta2": "HorizontalPodAutoscaler",
        "certificates.k8s.io/v1": "CertificateSigningRequest",
        "certificates.k8s.io/v1beta1": "CertificateSigningRequest",
        "coordination.k8s.io/v1": "Lease",
        "coordination.k8s.io/v1beta1": "Lease",
        "discovery.k8s.io/v1": "EndpointSlice",
        "discovery.k8s.io/v1beta1": "EndpointSlice",
        "events.k8s.io/v1": "Event",
        "events.k8s.io/v1beta1": "Event",
        "extensions/v1beta1": "Ingress",
        "flowcontrol.apiserver.k8s.io/v1beta1": "FlowSchema PriorityLevelConfiguration",
        "networking.k8s.io/v1": "Ingress IngressClass NetworkPolicy",
        "networking.k8s.io/v1beta1": "Ingress IngressClass",
        "node.k8s.io/v1": "RuntimeClass",
        "node.k8s.io/v1beta1": "RuntimeClass",
        "policy/v1beta1": "Eviction PodSecurityPolicy",
        "rbac.authorization.k8s.io/v1": "ClusterRole ClusterRoleBinding Role RoleBinding",
        "rbac.authorization.k8s.io/v1beta1": "ClusterRole ClusterRoleBinding Role RoleBinding",
        "scheduling.k8s.io/v1": "PriorityClass",
        "scheduling.k8s.io/v1beta1": "PriorityClass",
        "storage.k8s.io/v1": "CSIDriver StorageClass VolumeAttachment",
        "storage.k8s.io/v1beta1": "CSIDriver CSIStorageCapacity StorageClass VolumeAttachment",
    },
}

_BY_TYPE: dict[tuple[str, str], Shape] = {
    (version, kind): SHAPES[shape]
    for shape, versions in _KINDS.items()
    for version, kinds in versions.items()
    for kind in kinds.split()
}


def shape_of(api_version: str, kind: str) -> Shape | None:
    """The shape of a resource type, or None when the type is not known."""
    return _BY_TYPE.get((api_version, kind))
