"""Zstandard under one name: `compression.zstd` from Python 3.14, its backport before.

Imported only when a zstd layer is met.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

__all__ = ["DecompressionParameter", "ZstdDecompressor", "ZstdError"]
