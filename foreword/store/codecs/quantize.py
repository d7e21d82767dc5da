"""Lossy codecs `int8` and `int4`, and what they share with `entropy`: keys are quantised per channel, values per token.

They follow KIVI (Liu et al., 2024, arXiv:2402.02750): a channel of the keys has its own offset and step over the tokens of the
block, since outliers of keys stay in their channel; values have theirs per token, head and group of channels.

Encoded: one byte, 0 for a payload that follows as it is (numbers that are not finite, or next to the largest there are), 1 for
quantised. Then, for each run of layers of one shape, the keys' offsets (the block's dtype) and steps (the upper half of a
float32), and the values'; then the numbers of all steps in the order of the payload, int4 with the first half of them in the
low bits and the second in the high ones. Offsets are exact, steps rounded up and used as written: so a decoded number is at
most half a step away from what it was, but for the rounding to the block's own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Final

import numpy as np

from foreword.blocks.layout import LayerLayout, Layout
from foreword.errors import BadFrame
from foreword.store.codecs.base import Codec, check_length, check_tokens

AS_IS: Final = 0
QUANTISED: Final = 1
_LARGEST_GROUP: Final = 64
_SMALLEST_GROUP: Final = 16
TINY: Final = np.float32(2.0**-100)
# Below these nothing overflows on the way back, whatever is rounded up.
LIMITS: Final = {"float16": np.float32(3e4), "bfloat16": np.float32(1e37), "float32": np.float32(1e37)}

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers of one shape, the first of them layer `first`; `start` and `count` are in numbers of the payload."""

    first: int
    layers: int
    tokens: int
    shape: LayerLayout
    start: int

    @property
    def count(self) -> int:
        return self.layers * self.tokens * self.shape.elements

    @property
    def key_count(self) -> int:
        return self.layers * self.tokens * self.shape.kv_heads * self.shape.key_dim

    @property
    def channels(self) -> int:
        """Channels of keys, all layers."""
        return self.layers * self.shape.kv_heads * self.shape.key_dim

    @property
    def group(self) -> int:
        """Values that share a step: a divisor of the head's size, at most 64 where there is one that is not too small."""
        size = self.shape.value_dim
        return next((g for g in range(_LARGEST_GROUP, _SMALLEST_GROUP - 1, -1) if size % g == 0), size)

    @property
    def groups(self) -> int:
        """Groups of values, all layers and tokens."""
        return (self.count - self.key_count) // self.group if self.shape.value_dim else 0

    def split(self, numbers: Array) -> tuple[Array, Array]:
        """Views of the block's numbers: keys `[layers, tokens, channels]`, values `[layers, tokens, groups, group]`."""
        width = self.shape.kv_heads * self.shape.key_dim
        rows = numbers[self.start : self.start + self.count].reshape(self.layers, self.tokens * self.shape.elements)
        keys = rows[:, : self.tokens * width].reshape(self.layers, self.tokens, width)
        values = rows[:, self.tokens * width :].reshape(self.layers, self.tokens, -1, self.group or 1)
        return keys, values


@lru_cache(maxsize=64)
def runs(layout: Layout) -> tuple[Run, ...]:
    """The layers of a block by shape, without those that keep nothing."""
    found = []
    first = start = 0
    for shape, same in groupby(layout.layers):
        run = Run(first, len(list(same)), layout.block_size, shape, start)
        first += run.layers
        start += run.count
        if run.count:
            found.append(run)
    return tuple(found)


class Uniform:
    """`2**bits` steps between the least and the greatest number of a channel (keys) or of a token's group (values)."""

    lossy = True

    def __init__(self, name: str, number: int, bits: int) -> None:
        self.name = name
        self.number = number
        self._levels = 2**bits - 1
        self._per_byte = 8 // bits

    def encode(self, payload: memoryview, layout: Layout) -> bytes | memoryview:
        check_length(payload, layout)
        check_tokens(layout, self.name)
        numbers = read_numbers(payload, layout)
        if not numbers.size:
            return as_is(payload)
        out = np.empty(self._size(layout), np.uint8)
        out[0] = QUANTISED
        at = 1
        codes = np.empty(numbers.size, np.uint8)
        for run in runs(layout):
            for part, axis in zip(run.split(numbers), (1, 3), strict=True):
                if not part.size:
                    continue
                low, high = part.min(axis, keepdims=True), part.max(axis, keepdims=True)
                if not tame(low, high, LIMITS[layout.dtype]):
                    return as_is(payload)
                step = rounded_up((high - low) / np.float32(self._levels))
                np.subtract(part, low, out=part)
                np.multiply(part, 1 / step, out=part)
                at = _put(out, at, narrowed(low.ravel(), layout))
                at = _put(out, at, (step.ravel().view("<u4") >> 16).astype("<u2"))
        numbers += np.float32(0.5)
        np.copyto(codes, numbers, casting="unsafe")
        out[at:] = self._packed(codes)
        return out.data

    def decode(self, data: memoryview, out: memoryview, layout: Layout) -> None:
        check_length(out, layout)
        check_tokens(layout, self.name)
        if was_as_is(data, out):
            return
        if len(data) != self._size(layout):
            raise BadFrame("codec", f"{len(data)} bytes of {self.name}, not {self._size(layout)}")
        raw = np.frombuffer(data, np.uint8)
        count = layout.block_bytes // layout.item_bytes
        numbers = self._unpacked(raw[-self._code_bytes(count) :], count)
        at = 1
        with np.errstate(all="ignore"):
            for run in runs(layout):
                for part, axis, scales in zip(run.split(numbers), (1, 3), (run.channels, run.groups), strict=True):
                    if not part.size:
                        continue
                    shape = tuple(1 if n == axis else size for n, size in enumerate(part.shape))
                    low = widened(raw[at : at + scales * layout.item_bytes], layout).reshape(shape)
                    at += scales * layout.item_bytes
                    step = (raw[at : at + 2 * scales].view("<u2").astype("<u4") << 16).view("<f4").reshape(shape)
                    at += 2 * scales
                    np.multiply(part, step, out=part)
                    np.add(part, low, out=part)
            write_numbers(numbers, out, layout)

    def _code_bytes(self, count: int) -> int:
        return -(-count // self._per_byte)

    def _size(self, layout: Layout) -> int:
        scales = sum(run.channels + run.groups for run in runs(layout))
        return 1 + scales * (layout.item_bytes + 2) + self._code_bytes(layout.block_bytes // layout.item_bytes)

    def _packed(self, codes: Bytes) -> Bytes:
        """Of two halves of the codes one goes into the low bits and one into the high ones."""
        if self._per_byte == 1:
            return codes
        half = self._code_bytes(codes.size)
        packed = codes[:half].copy()
        packed[: codes.size - half] |= codes[half:] << 4
        return packed

    def _unpacked(self, packed: Bytes, count: int) -> Floats:
        if self._per_byte == 1:
            return packed.astype(np.float32)
        numbers = np.empty(count, np.float32)
        half = packed.size
        np.copyto(numbers[:half], packed & 15)
        np.copyto(numbers[half:], packed[: count - half] >> 4)
        return numbers


def read_numbers(payload: memoryview, layout: Layout) -> Floats:
    """The block's numbers as float32, in memory that may be written."""
    if layout.dtype == "bfloat16":
        return (np.frombuffer(payload, "<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return np.frombuffer(payload, f"<f{layout.item_bytes}").astype(np.float32)


def write_numbers(numbers: Floats, out: memoryview, layout: Layout) -> None:
    """Round float32 (overwritten) to the block's dtype."""
    if layout.dtype == "bfloat16":
        bits = numbers.view("<u4")
        bits += np.uint32(0x8000)
        np.right_shift(bits, np.uint32(16), out=bits)
        np.copyto(np.frombuffer(out, "<u2"), bits, casting="unsafe")
    else:
        np.copyto(np.frombuffer(out, f"<f{layout.item_bytes}"), numbers, casting="same_kind")


def narrowed(exact: Floats, layout: Layout) -> Array:
    """Numbers of the block's own dtype, as it writes them."""
    if layout.dtype == "bfloat16":
        return (exact.view("<u4") >> np.uint32(16)).astype("<u2")
    return exact.astype(f"<f{layout.item_bytes}")


def widened(raw: Bytes, layout: Layout) -> Floats:
    """What `narrowed` wrote, as float32."""
    return read_numbers(raw.data, layout)


def as_is(payload: memoryview) -> bytes:
    return bytes([AS_IS]) + payload


def was_as_is(data: memoryview, out: memoryview) -> bool:
    """Copy a payload that was not quantised. Raises BadFrame."""
    if not len(data) or data[0] > QUANTISED:
        raise BadFrame("codec", "neither quantised nor as it was")
    if data[0] == QUANTISED:
        return False
    if len(data) != 1 + len(out):
        raise BadFrame("codec", "a payload as it was has another length")
    out[:] = data[1:]
    return True


def _put(out: Bytes, at: int, numbers: Array) -> int:
    end = at + numbers.nbytes
    out[at:end] = numbers.view(np.uint8)
    return end


def tame(low: Floats, high: Floats, limit: np.float32) -> bool:
    """Whether all is finite and within the limit; a NaN makes the comparisons false."""
    return bool(low.min() > -limit and high.max() < limit)


def rounded_up(step: Floats) -> Floats:
    """To the next number that bfloat16 holds, and to something whose reciprocal is finite."""
    bits = np.maximum(step, TINY).view("<u4")
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view("<f4")


CODECS: Final[dict[str, Codec]] = {
    "int8": Uniform("int8", 2, 8),
    "int4": Uniform("int4", 3, 4),
}
