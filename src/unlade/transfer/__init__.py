"""Verified streams between registries, stores and trees: fetch, push, copy, and their progress."""

from unlade.transfer.fetch import DigestMismatch, Fetcher, Readable, SizeMismatch, Verifier, pump
from unlade.transfer.progress import Progress, ProgressEvent, silent

__all__ = [
    "DigestMismatch",
    "Fetcher",
    "Progress",
    "ProgressEvent",
    "Readable",
    "SizeMismatch",
    "Verifier",
    "pump",
    "silent",
]
