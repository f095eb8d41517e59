"""containerd's protocols, written down by ourselves: only the calls and fields we use, with true numbers.

The .proto files beside this one are the source; `scripts/protos` makes the `_pb2` modules from them, which
are committed, so that nobody who installs or runs the package needs a compiler. A test compares each file
with the official one, field by field (rig/protos.py), and another that the modules are up to date. Imported
by `unlade.containerd` alone.
"""
