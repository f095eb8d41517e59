"""The CSI driver `oci.unlade.dev`: what is in a registry as a volume, on any cluster.

A face beside the image service: it translates CSI's calls into deliveries and mounts. Nothing here talks to
the Kubernetes API; events and pull secrets come through small protocols that `unlade.cli` wires.
"""

from typing import Final

DRIVER_NAME: Final = "oci.unlade.dev"
# The node that a volume lives on: kubelets put it on the Node as a label.
TOPOLOGY_KEY: Final = "oci.unlade.dev/node"
# Volumes of this prefix are writable ones, made by CreateVolume; every other id is an inline volume's.
WRITABLE_PREFIX: Final = "w-"
