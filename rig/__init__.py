"""The rig: a real Kubernetes on one machine, for tests.

`rig.engines` builds pinned engines into a cache; `rig.cluster` starts and stops them; `rig.images` makes the
container images; `rig.pods` and `rig.kube` are what tests speak; `python -m rig` is the command line. Nothing
under `src/` imports this package, and this file imports nothing: the builder runs with the standard library.
"""


class RigError(Exception):
    """The rig cannot do what was asked; the message says what to look at or to run."""
