"""The rig: a real Kubernetes on one machine, for tests.

`rig.engines` builds pinned engines into a cache; `rig.cluster` starts and stops them; `rig.images` makes the
container images; `python -m rig` is the command line. Nothing under `src/` imports this package.
"""
