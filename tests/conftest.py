"""For every test: property tests draw the same examples each time, unless the full run is asked for.

A red CI must mean that the change broke something, not that today's random examples found an old fault;
`make full` (UNLADE_FULL=1) explores, and what it finds becomes a test of its own.

Tests fork this process to see what a confined child may do. gRPC would start threads of its own in such a
child, which keep what the child gave up; the product never forks a process that speaks gRPC.
"""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

settings.register_profile("sampled", derandomize=True, deadline=None, database=None)
settings.register_profile("full", deadline=None, print_blob=True)
settings.load_profile("full" if os.environ.get("UNLADE_FULL") else "sampled")
