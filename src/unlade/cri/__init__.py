"""The image service of a node: CRI for an unmodified kubelet, in front of an unmodified containerd.

A face: it translates CRI into calls of the engine and passes through what it has nothing to say about.
"""
