"""zstd framing: the same bytes, however the input is cut, or a typed error; no large window."""

from __future__ import annotations

from typing import Final

from tests.fakes.tars import zst, zstd_header
from tests.fuzz.fuzz_gzip import decode
from unlade.unpack.compression import ZstdDecoder

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_WINDOW_LOG: Final = 23
CORPUS: Final = [
    zst(b""),
    zst(b"some content " * 50),
    zst(b"checked", checksum=True),
    zst(b"a") + zst(b"b"),
    b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zst(b"x"),
    zstd_header(31) + bytes(16),
    zst(bytes(100_000)),
]


def one_input(data: bytes) -> None:
    """Decode it in one piece and in many."""
    if data[:4] != _MAGIC and data[1:4] != b"\x2a\x4d\x18":
        data = _MAGIC + data[4:]
    whole = decode(ZstdDecoder(_WINDOW_LOG), data, len(data))
    pieces = decode(ZstdDecoder(_WINDOW_LOG), data, 5)
    # libzstd checks a little less when it sees a whole frame at once; bytes that it gives are the same.
    assert whole is None or pieces is None or whole == pieces
