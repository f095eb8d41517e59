"""CSI and the kubelet's plugin registration, written down by ourselves: the calls and fields of this driver.

What we do not name passes through as unknown fields, untouched. `scripts/protos` makes the `_pb2` modules,
which are committed; a test compares the files with the official ones, field by field (rig/protos.py).
"""
