"""kpt-compatible packages over OCI registries and git (P1-P11).

A package is a directory with a Kptfile: Kubernetes resources, plain files, sub-packages. This room fetches
packages, merges upstream's changes into a local copy the way kpt does, and publishes them as deterministic
OCI images. It stands on the engine below for registries, transfer and safe unpacking, and on the git
command for git upstreams. It never prints: results are values, the command line shows them.
"""
