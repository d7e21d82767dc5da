"""The lossy codecs `int8` and `int4`: keys are quantized per channel, values per token.

They follow KIVI (Liu et al., 2024, arXiv:2402.02750). Outliers of keys stay in their channel, so each key channel has
its own offset and step over the tokens of the block. Values have theirs per token, head and group of channels.

Format: one byte, 0 for an unquantized payload (it has numbers that are not finite or are too large), 1 for a quantized
one. Then, for each run of layers of one shape: the offsets of the keys (in the dtype of the block) and their steps (the
upper half of a float32), then those of the values. Then the codes of all numbers in payload order; int4 has the first
half of them in the low bits and the second half in the high bits. Offsets are exact, and steps are rounded up and used
as stored. A decoded number is therefore at most half a step away from the original, plus the rounding to the dtype of
the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import Any, Final

import numpy as np

from foreword.blocks.layout import Layout
from foreword.errors import BadFrame
from foreword.store.codec import Codec, check_length, check_tokens

_UNQUANTIZED: Final = 0
_QUANTIZED: Final = 1
_STEP_BYTES: Final = 2
_LARGEST_GROUP: Final = 64
_SMALLEST_GROUP: Final = 16
_TINY: Final = np.float32(2.0**-100)
# Numbers below these limits do not overflow when they are decoded, whatever is rounded up.
_LIMITS: Final = {"float16": np.float32(3e4), "bfloat16": np.float32(1e37), "float32": np.float32(1e37)}

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class LayerPart:
    """The keys or the values of consecutive layers of one shape, as a view of the numbers of a block.

    Attributes:
        layers: range of numbers of these layers.
        columns: range of the keys or values in the numbers of one layer.
        shape: shape of the view. `axis` is the dimension along which numbers share an offset and a step.
    """

    layers: slice
    columns: slice
    shape: tuple[int, ...]
    axis: int

    @property
    def scales(self) -> tuple[int, ...]:
        """Shape of the offsets and of the steps."""
        return (*self.shape[: self.axis], 1, *self.shape[self.axis + 1 :])

    def of(self, numbers: Array) -> Array:
        return numbers[self.layers].reshape(self.shape[0], -1)[:, self.columns].reshape(self.shape)


@lru_cache(maxsize=64)
def _parts(layout: Layout) -> tuple[LayerPart, ...]:
    """The parts of a block that are not empty: keys `[layers, tokens, channels]`, values `[layers, tokens, groups, group]`."""
    found = []
    start, tokens = 0, layout.block_size
    for shape, same in groupby(layout.layers):
        count = len(list(same))
        end = start + count * tokens * shape.elements
        channels = shape.kv_heads * shape.key_dim
        keys, layers = tokens * channels, slice(start, end)
        if keys:
            found.append(LayerPart(layers, slice(keys), (count, tokens, channels), 1))
        if shape.elements > channels:
            # Values that share a step: the largest divisor of the head size from 16 to 64, or the head size.
            sizes = range(_LARGEST_GROUP, _SMALLEST_GROUP - 1, -1)
            group = next((size for size in sizes if shape.value_dim % size == 0), shape.value_dim)
            groups = (shape.elements - channels) // group
            found.append(LayerPart(layers, slice(keys, None), (count, tokens, groups, group), 3))
        start = end
    return tuple(found)


class UniformQuantizer:
    """Quantizes to `2**bits` levels between the minimum and maximum of a channel (keys) or of a group of a token
    (values)."""

    lossy = True

    def __init__(self, name: str, number: int, bits: int) -> None:
        self.name = name
        self.number = number
        self._levels = 2**bits - 1
        self._per_byte = 8 // bits

    def encode(self, payload: memoryview, layout: Layout) -> bytes | memoryview:
        check_length(payload, layout)
        check_tokens(layout, self.name)
        numbers = _read_numbers(payload, layout)
        if not numbers.size:
            return _unquantized(payload)
        out = np.empty(self._size(layout), np.uint8)
        out[0] = _QUANTIZED
        at = 1
        for view in _parts(layout):
            part = view.of(numbers)
            low, high = part.min(view.axis, keepdims=True), part.max(view.axis, keepdims=True)
            if not (low.min() > -_LIMITS[layout.dtype] and high.max() < _LIMITS[layout.dtype]):  # also false for NaN
                return _unquantized(payload)
            step = _rounded_up((high - low) / np.float32(self._levels))
            np.subtract(part, low, out=part)
            np.multiply(part, 1 / step, out=part)
            steps = at + low.size * layout.item_bytes
            end = steps + low.size * _STEP_BYTES
            _write_numbers(low.ravel(), out.data[at:steps], layout)
            out[steps:end] = (step.ravel().view("<u4") >> 16).astype("<u2").view(np.uint8)
            at = end
        numbers += np.float32(0.5)
        out[at:] = self._packed(numbers.astype(np.uint8))
        return out.data

    def decode(self, data: memoryview, out: memoryview, layout: Layout) -> None:
        check_length(out, layout)
        check_tokens(layout, self.name)
        if _copied_unquantized(data, out):
            return
        if len(data) != self._size(layout):
            raise BadFrame("codec", f"{len(data)} bytes of {self.name}, not {self._size(layout)}")
        raw = np.frombuffer(data, np.uint8)
        count = layout.block_bytes // layout.item_bytes
        numbers = self._unpacked(raw[-self._code_bytes(count) :], count)
        at = 1
        with np.errstate(all="ignore"):
            for view in _parts(layout):
                part = view.of(numbers)
                steps = at + prod(view.scales) * layout.item_bytes
                end = steps + prod(view.scales) * _STEP_BYTES
                low = _read_numbers(raw[at:steps].data, layout).reshape(view.scales)
                step = (raw[steps:end].view("<u2").astype("<u4") << 16).view("<f4").reshape(view.scales)
                at = end
                np.multiply(part, step, out=part)
                np.add(part, low, out=part)
            _write_numbers(numbers, out, layout)

    def _code_bytes(self, count: int) -> int:
        return -(-count // self._per_byte)

    def _size(self, layout: Layout) -> int:
        scales = sum(prod(view.scales) for view in _parts(layout))
        return (
            1 + scales * (layout.item_bytes + _STEP_BYTES) + self._code_bytes(layout.block_bytes // layout.item_bytes)
        )

    def _packed(self, codes: Bytes) -> Bytes:
        """Pack 4-bit codes: the first half into the low bits, the second half into the high bits."""
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


def _read_numbers(payload: memoryview, layout: Layout) -> Floats:
    """The numbers of the block as float32, in writable memory."""
    if layout.dtype == "bfloat16":
        return (np.frombuffer(payload, "<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return np.frombuffer(payload, f"<f{layout.item_bytes}").astype(np.float32)


def _write_numbers(numbers: Floats, out: memoryview, layout: Layout) -> None:
    """Round float32 numbers to the dtype of the block. Overwrites `numbers`."""
    if layout.dtype == "bfloat16":
        bits = numbers.view("<u4")
        bits += np.uint32(0x8000)
        np.right_shift(bits, np.uint32(16), out=bits)
        np.copyto(np.frombuffer(out, "<u2"), bits, casting="unsafe")
    else:
        np.copyto(np.frombuffer(out, f"<f{layout.item_bytes}"), numbers, casting="same_kind")


def _unquantized(payload: memoryview) -> bytes:
    return bytes([_UNQUANTIZED]) + payload


def _copied_unquantized(data: memoryview, out: memoryview) -> bool:
    """Copy the payload to `out` and return True if it was stored unquantized. Raises BadFrame."""
    if not len(data) or data[0] > _QUANTIZED:
        raise BadFrame("codec", "the payload is neither quantized nor unquantized")
    if data[0] == _QUANTIZED:
        return False
    if len(data) != 1 + len(out):
        raise BadFrame("codec", "an unquantized payload has another length")
    out[:] = data[1:]
    return True


def _rounded_up(step: Floats) -> Floats:
    """Round up to the next bfloat16 number whose reciprocal is finite."""
    bits = np.maximum(step, _TINY).view("<u4")
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view("<f4")


CODECS: Final[dict[str, Codec]] = {
    "int8": UniformQuantizer("int8", 2, 8),
    "int4": UniformQuantizer("int4", 3, 4),
}
