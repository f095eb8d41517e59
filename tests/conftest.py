"""For every test: property tests draw the same examples each time, unless the full run is asked for.

A red CI must mean that the change broke something, not that today's random examples found an old fault;
`make full` (UNLADE_FULL=1) explores, and what it finds becomes a test of its own.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("sampled", derandomize=True, deadline=None, database=None)
settings.register_profile("full", deadline=None, print_blob=True)
settings.load_profile("full" if os.environ.get("UNLADE_FULL") else "sampled")
