"""The CSI driver `oci.unlade.dev`: what is in a registry as a volume, on any cluster.

A face beside the image service: it translates CSI's calls into deliveries and mounts. Nothing here talks to
the Kubernetes API; events and pull secrets come through small protocols that `unlade.cli` wires.
"""
