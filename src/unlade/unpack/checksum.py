"""The checksum of each file in a file list: CRC-32, by isal where it is there.

It finds rot, not forgery: content was verified by its digest when it came in. isal computes it several times
faster than data arrives, so every file is checked for the price of reading it once.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this interpreter or machine
    from zlib import crc32

__all__ = ["crc32"]
