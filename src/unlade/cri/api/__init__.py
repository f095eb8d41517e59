"""CRI's ImageService, written down by ourselves: only the calls and fields we use, with true numbers.

What we do not name passes through as unknown fields, untouched. `scripts/protos` makes the `_pb2` module,
which is committed; a test compares the file with the official one, field by field (rig/protos.py).
"""
