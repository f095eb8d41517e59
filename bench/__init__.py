"""Side by side with the peers: the same work, the same registry, interleaved, trees compared.

`python -m bench` (or `make bench`) runs it; `--quick` (QUICK=1) is for a look. See docs/performance.md.
"""
