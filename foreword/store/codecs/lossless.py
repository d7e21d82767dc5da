"""The codec `lossless`: byte planes of the numbers, each compressed with zstd if that makes it shorter.

zstd's Huffman coder runs without the GIL. A symbol takes a whole number of bits, at least one; docs/guides/codecs.md
says what that costs compared with an arithmetic coder.

Format of a list of streams: their number n (uint16, little-endian); n entries of 5 bytes, the encoding (0 stored, 1
zstd) and the encoded length (uint32, little-endian); the encoded streams. The decoded lengths follow from the layout.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import zstandard

from foreword.blocks.layout import Layout
from foreword.errors import BadFrame
from foreword.store.codec import Codec, check_length

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_STORED: Final = 0
_ZSTD: Final = 1
_COUNT = struct.Struct("<H")
_ENTRY = struct.Struct("<BI")
_PROBE_BYTES: Final = 4096
_WINDOW_LIMIT: Final = 1 << 27
# A tiny match table and only long matches: chance repetitions among few symbols cost more than the Huffman codes that they
# replace. Compared with plain level 1, exponent planes are a tenth smaller and take half the time.
_PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(
    1, hash_log=6, min_match=7, write_content_size=True, write_checksum=False, write_dict_id=False
)


class _Coders(threading.local):
    """zstd contexts, one pair per thread."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress
        self.decompress = zstandard.ZstdDecompressor(max_window_size=_WINDOW_LIMIT).decompress


_coders = _Coders()


def pack(streams: Sequence[Bytes]) -> bytes:
    """Encode a list of contiguous streams, each compressed if that makes it shorter."""
    parts: list[Any] = [b""]
    head = bytearray(_COUNT.pack(len(streams)))
    for stream in streams:
        kind, written = _shorter(stream)
        head += _ENTRY.pack(kind, len(written))
        parts.append(written)
    parts[0] = head
    return b"".join(parts)


def unpack(data: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """Decode streams of the given lengths, read-only. Raises BadFrame for data that `pack` cannot have written."""
    start = _COUNT.size + len(sizes) * _ENTRY.size
    if len(data) < start or _COUNT.unpack_from(data) != (len(sizes),):
        raise BadFrame("codec", "the list of streams is truncated or has the wrong number of streams")
    entries = list(_ENTRY.iter_unpack(data[_COUNT.size : start]))
    if len(data) != start + sum(length for _, length in entries):
        raise BadFrame("codec", "the lengths of the streams do not add up")
    streams = []
    for (kind, length), size in zip(entries, sizes, strict=True):
        streams.append(_read(kind, data[start : start + length], size))
        start += length
    return streams


def _shorter(stream: Bytes) -> tuple[int, Bytes | bytes]:
    """Encode one stream. A long one is compressed only if four samples of it shrink by at least 2 %."""
    size = stream.size
    if size > 4 * _PROBE_BYTES:
        part = _PROBE_BYTES // 4
        probe = np.concatenate([stream[at : at + part] for at in range(0, size - part + 1, (size - part) // 3)])
        if len(_coders.compress(probe.data)) > 0.98 * probe.size:
            return _STORED, stream
    written: bytes = _coders.compress(stream.data)
    return (_ZSTD, written) if len(written) < size else (_STORED, stream)


def _read(kind: int, data: memoryview, size: int) -> Bytes:
    if kind == _STORED:
        if len(data) != size:
            raise BadFrame("codec", f"a stream of {size} bytes has {len(data)}")
        return np.frombuffer(data, np.uint8)
    if kind != _ZSTD:
        raise BadFrame("codec", f"unknown encoding {kind} of a stream")
    try:
        # Check the claimed size first: the library allocates that much.
        if zstandard.get_frame_parameters(data).content_size != size or not size:
            raise BadFrame("codec", "a compressed stream has another length")
        decoded = _coders.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadFrame("codec", f"a compressed stream cannot be read: {error}") from error
    if len(decoded) != size:
        raise BadFrame("codec", "a compressed stream has another length")
    return np.frombuffer(decoded, np.uint8)


class Lossless:
    """Rotates each number left by one bit, so its exponent fills the highest byte, and splits the numbers into byte planes.

    Exponents take few values and shrink to about a third. Signs and mantissas are noise and are stored unless they
    shrink too.
    """

    name = "lossless"
    number = 1
    lossy = False

    def encode(self, payload: memoryview, layout: Layout) -> bytes:
        check_length(payload, layout)
        width = layout.item_bytes
        numbers = np.frombuffer(payload, f"<u{width}")
        rotated = numbers << 1
        rotated |= numbers >> (8 * width - 1)
        return pack([(rotated >> shift).astype(np.uint8) for shift in range(8 * width - 8, -1, -8)])

    def decode(self, data: memoryview, out: memoryview, layout: Layout) -> None:
        check_length(out, layout)
        width = layout.item_bytes
        numbers = np.frombuffer(out, f"<u{width}")
        planes = unpack(data, [numbers.size] * width)
        rotated = planes[0].astype(numbers.dtype)
        for plane in planes[1:]:
            rotated <<= 8
            rotated |= plane
        np.right_shift(rotated, 1, out=numbers)
        rotated <<= 8 * width - 1
        numbers |= rotated


CODECS: Final[dict[str, Codec]] = {"lossless": Lossless()}
