"""Entropy coding: streams of bytes through zstd, and two codecs made of them, `lossless` and the lossy `entropy`.

zstd's Huffman coder is a real entropy coder in C that runs without the GIL, but not an arithmetic coder: a symbol takes a
whole number of bits, at least one. docs/guides/codecs.md says what that costs.

A packed list of streams: their number n (uint16 little-endian); n times 5 bytes, how it is written (0 as it is, 1 zstd) and
its length as written (uint32 little-endian); the streams. How long each is when decoded follows from the layout.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
import zstandard

from foreword.blocks.layout import Layout
from foreword.errors import BadFrame
from foreword.store.codecs.base import Codec, check_length, check_tokens
from foreword.store.codecs.quantize import (
    LIMITS,
    QUANTISED,
    TINY,
    Bytes,
    Floats,
    Run,
    as_is,
    read_numbers,
    runs,
    tame,
    was_as_is,
    write_numbers,
)

_AS_IS: Final = 0
_ZSTD: Final = 1
_COUNT = struct.Struct("<H")
_ENTRY = struct.Struct("<BI")
_PROBE_BYTES: Final = 4096
_WINDOW_LIMIT: Final = 1 << 27
# A tiny table for matches, and only long ones: chance repetitions among few symbols cost more than the Huffman codes that they
# replace. Against level 1 as it is, planes of exponents get a tenth smaller, and are written and read in half the time.
_PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(
    1, hash_log=6, min_match=7, write_content_size=True, write_checksum=False, write_dict_id=False
)

# Steps of the entropy codec are powers of 2^(1/4).
_STEPS: Final = np.array([2.0 ** (code / 4) for code in range(-128, 128)], np.float32)
_FINENESSES: Final = (9, 7, 5)
_LARGEST_AMPLITUDE: Final = np.float32(1e9)


class _Coders(threading.local):
    """zstd's contexts, which one thread at a time may use."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress
        self.decompress = zstandard.ZstdDecompressor(max_window_size=_WINDOW_LIMIT).decompress


_coders = _Coders()


def pack(streams: Sequence[Bytes]) -> bytes:
    """Streams (contiguous) one after the other, each compressed if that makes it shorter."""
    parts: list[Any] = [b""]
    head = bytearray(_COUNT.pack(len(streams)))
    for stream in streams:
        kind, written = _shorter(stream)
        head += _ENTRY.pack(kind, len(written))
        parts.append(written)
    parts[0] = head
    return b"".join(parts)


def unpack(data: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """The streams, read-only, of these lengths. Raises BadFrame for anything that `pack` cannot have written."""
    start = _COUNT.size + len(sizes) * _ENTRY.size
    if len(data) < start or _COUNT.unpack_from(data) != (len(sizes),):
        raise BadFrame("codec", "the list of streams is cut short, or another number of them")
    entries = list(_ENTRY.iter_unpack(data[_COUNT.size : start]))
    if len(data) != start + sum(length for _, length in entries):
        raise BadFrame("codec", "the lengths of the streams do not add up")
    streams = []
    for (kind, length), size in zip(entries, sizes, strict=True):
        streams.append(_read(kind, data[start : start + length], size))
        start += length
    return streams


def _shorter(stream: Bytes) -> tuple[int, Bytes | bytes]:
    """What to write of a stream. A long one that shows no gain in four samples is not tried as a whole."""
    size = stream.size
    if size > 4 * _PROBE_BYTES:
        part = _PROBE_BYTES // 4
        probe = np.concatenate([stream[at : at + part] for at in range(0, size - part + 1, (size - part) // 3)])
        if len(_coders.compress(probe.data)) > 0.98 * probe.size:
            return _AS_IS, stream
    written: bytes = _coders.compress(stream.data)
    return (_ZSTD, written) if len(written) < size else (_AS_IS, stream)


def _read(kind: int, data: memoryview, size: int) -> Bytes:
    if kind == _AS_IS:
        if len(data) != size:
            raise BadFrame("codec", f"a stream of {size} bytes has {len(data)}")
        return np.frombuffer(data, np.uint8)
    if kind != _ZSTD:
        raise BadFrame("codec", f"no stream is written in the way {kind}")
    try:
        # The size that the data claims is checked first: the library allocates what it says.
        if zstandard.get_frame_parameters(data).content_size != size or not size:
            raise BadFrame("codec", "a compressed stream has another length")
        decoded = _coders.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadFrame("codec", f"a compressed stream cannot be read: {error}") from error
    if len(decoded) != size:
        raise BadFrame("codec", "a compressed stream has another length")
    return np.frombuffer(decoded, np.uint8)


class Lossless:
    """Each number turned left by a bit, so that its exponent fills the highest byte, then split into planes of bytes.

    Exponents are few and shrink to a third; sign and mantissa are noise and stay as they are, unless they shrink too.
    """

    name = "lossless"
    number = 1
    lossy = False

    def encode(self, payload: memoryview, layout: Layout) -> bytes:
        check_length(payload, layout)
        width = layout.item_bytes
        numbers = np.frombuffer(payload, f"<u{width}")
        turned = numbers << 1
        turned |= numbers >> (8 * width - 1)
        return pack([(turned >> shift).astype(np.uint8) for shift in range(8 * width - 8, -1, -8)])

    def decode(self, data: memoryview, out: memoryview, layout: Layout) -> None:
        check_length(out, layout)
        width = layout.item_bytes
        numbers = np.frombuffer(out, f"<u{width}")
        planes = unpack(data, [numbers.size] * width)
        turned = planes[0].astype(numbers.dtype)
        for plane in planes[1:]:
            turned <<= 8
            turned |= plane
        np.right_shift(turned, 1, out=numbers)
        turned <<= 8 * width - 1
        numbers |= turned


class Anchored:
    """Differences to an anchor in steps that fit each channel or token, fewer of them in later layers, then entropy-coded.

    In the spirit of CacheGen (Liu et al., SIGCOMM 2024, arXiv:2310.07240).

    Keys: the anchor is the channel's mean over the block, in 8 bits per head. Values have none. A step is the largest
    difference of a channel (keys), or of a token's group (values), over the layer's fineness, rounded up to a power of 2^(1/4).
    """

    name = "entropy"
    number = 4
    lossy = True

    def encode(self, payload: memoryview, layout: Layout) -> bytes | memoryview:
        check_length(payload, layout)
        check_tokens(layout, self.name)
        with np.errstate(all="ignore"):
            streams = self._streams(read_numbers(payload, layout), layout)
        return as_is(payload) if streams is None else bytes([QUANTISED]) + pack(streams)

    def _streams(self, numbers: Floats, layout: Layout) -> list[Bytes] | None:
        """Anchors and steps of all runs, then codes of keys and of values; None if there are no numbers or untamed ones."""
        limit = min(LIMITS[layout.dtype], _LARGEST_AMPLITUDE)
        streams: list[Bytes] = []
        heads: list[Bytes] = []
        for run in runs(layout):
            keys, values = run.split(numbers)
            fine, levels = _levels(run, layout)
            if keys.size:
                written = _written_anchor(keys.mean(1), run, limit)
                if written is None:
                    return None
                heads.append(written)
                np.subtract(keys, _read_anchor(written, run)[:, None], out=keys)
            for part, axis in ((keys, 1), (values, 3)):
                if not part.size:
                    continue
                size = np.maximum(part.max(axis, keepdims=True), -part.min(axis, keepdims=True))
                if not tame(-size, size, limit):
                    return None
                fine = fine.reshape(-1, *[1] * (part.ndim - 1))
                steps = _step_codes(size / fine)
                heads.append(steps.ravel())
                np.multiply(part, 1 / _STEPS[steps], out=part)
                np.add(part, fine + np.float32(0.5), out=part)
                codes = np.empty(part.shape, np.uint8)
                np.copyto(codes, part, casting="unsafe")
                streams += [codes[start:end].ravel() for start, end in levels]
        return [np.concatenate(heads), *streams] if heads else None

    def decode(self, data: memoryview, out: memoryview, layout: Layout) -> None:
        check_length(out, layout)
        check_tokens(layout, self.name)
        if was_as_is(data, out):
            return
        heads, *streams = unpack(data[1:], _stream_sizes(layout))
        numbers = np.empty(layout.block_bytes // layout.item_bytes, np.float32)
        at = 0
        rest = iter(streams)
        with np.errstate(all="ignore"):
            for run in runs(layout):
                keys, values = run.split(numbers)
                fine, levels = _levels(run, layout)
                anchor = heads[at : at + _anchor_bytes(run)]
                at += len(anchor)
                for part, axis, scales in ((keys, 1, run.channels), (values, 3, run.groups)):
                    if not part.size:
                        continue
                    fine = fine.reshape(-1, *[1] * (part.ndim - 1))
                    for start, end in levels:
                        level = part[start:end]
                        np.subtract(next(rest).reshape(level.shape), fine[start], out=level)
                    shape = tuple(1 if n == axis else size for n, size in enumerate(part.shape))
                    np.multiply(part, _STEPS[heads[at : at + scales]].reshape(shape), out=part)
                    at += scales
                if keys.size:
                    np.add(keys, _read_anchor(anchor, run)[:, None], out=keys)
            write_numbers(numbers, out, layout)


def _step_codes(step: Floats) -> Bytes:
    """Numbers of the least steps in the table that are no less, or of the last."""
    return np.minimum(np.searchsorted(_STEPS, step), len(_STEPS) - 1).astype(np.uint8)


def _levels(run: Run, layout: Layout) -> tuple[Floats, list[tuple[int, int]]]:
    """Steps to either side of zero for each of the run's layers, and the ranges of those that have the same number."""
    depth = len(layout.layers)
    fine = [_FINENESSES[(run.first + layer) * len(_FINENESSES) // depth] for layer in range(run.layers)]
    ranges = []
    start = 0
    for _, same in groupby(fine):
        end = start + len(list(same))
        ranges.append((start, end))
        start = end
    return np.array(fine, np.float32), ranges


def _stream_sizes(layout: Layout) -> list[int]:
    """Bytes of the streams that a block of this layout has."""
    found = runs(layout)
    sizes = [sum(_anchor_bytes(run) + run.channels + run.groups for run in found)]
    for run in found:
        for count in (run.key_count, run.count - run.key_count):
            if count:
                sizes += [count // run.layers * (end - start) for start, end in _levels(run, layout)[1]]
    return sizes


def _anchor_bytes(run: Run) -> int:
    """Of a run without keys, 0."""
    return run.layers * run.shape.kv_heads * 8 + run.channels if run.channels else 0


def _written_anchor(anchor: Floats, run: Run, limit: np.float32) -> Bytes | None:
    """Means of channels, 8 bits each between the least and greatest of their head; None if they are past the limit."""
    means = anchor.reshape(-1, run.shape.key_dim)
    low, high = means.min(1, keepdims=True), means.max(1, keepdims=True)
    if not tame(low, high, limit):
        return None
    step = np.maximum((high - low) / np.float32(255), TINY)
    codes = ((means - low) / step + np.float32(0.5)).astype(np.uint8)
    scales = np.concatenate([low, step], axis=1).astype("<f4")
    return np.concatenate([scales.ravel().view(np.uint8), codes.ravel()])


def _read_anchor(written: Bytes, run: Run) -> Floats:
    """`[layers, channels]`"""
    heads = run.layers * run.shape.kv_heads
    scales = written[: heads * 8].view("<f4").reshape(heads, 2)
    codes = written[heads * 8 :].reshape(heads, -1)
    anchor: Floats = codes * scales[:, 1:] + scales[:, :1]
    return anchor.reshape(run.layers, -1)


CODECS: Final[dict[str, Codec]] = {"lossless": Lossless(), "entropy": Anchored()}
