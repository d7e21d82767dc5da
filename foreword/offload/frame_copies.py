"""Copies between paged tensors and frames: of whole blocks, and of units of the portable layout (`foreword/blocks/layout.py`).

Kernels pack K and V for their hardware. The known packings divide tokens and dimensions in two and permute the parts. So a
packed tensor is a strided view `[rows, t1, t2, heads, d1, d2]`: token `i` is at `(i // t2, i % t2)`, dimension `j` at
`(j // d2, j % d2)`. A copy between such a view and a frame is one pass without a buffer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword import compiled_code
from foreword.compiled_code import CannotBuild
from foreword.offload.device import Plane

_AXES = 6


@dataclass(frozen=True, slots=True)
class UnitBox:
    """Units that are copied together: `counts` of blocks, units of tokens and head units from `starts` on, in that order, to or
    from consecutive slots from `slot` on."""

    starts: tuple[int, int, int]
    counts: tuple[int, int, int]
    slot: int


@dataclass(frozen=True, slots=True)
class UnitPlane:
    """K or V of one layer, and where it lies in frames. Strides and offsets in bytes.

    Attributes:
        memory: the tensor's whole storage, in words of 1, 2, 4 or 8 bytes. `start` is where the tensor starts in it.
        offset: of the plane in a slot.
        unit_strides: of blocks, units of tokens and head units, in the tensor.
        sizes, strides, frame_strides: of the axes of one unit: words, their strides in the tensor and in a frame.
    """

    memory: Tensor
    start: int
    offset: int
    unit_strides: tuple[int, int, int]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    frame_strides: tuple[int, ...]

    @property
    def unit_bytes(self) -> int:
        """Bytes of the plane in one unit."""
        return math.prod(self.sizes) * self.memory.element_size()


# Copies a box of units: into the frames in an arena `[slots, stride]` of bytes, or out of them.
UnitCopy = Callable[[Tensor, UnitBox, bool], None]
# Makes such a function for planes of a number of units (tokens, heads) per block.
UnitCopyMaker = Callable[[Sequence[UnitPlane], tuple[int, int]], UnitCopy]


class PlaneGroup:
    """A group of paged tensors, divided into blocks or units that have a number each. Frames begin with a payload of one.

    On a CPU the calling thread copies: torch would start a team of OpenMP threads for each copying thread, which compete with
    the computing threads.

    Args:
        units: how many units of tokens and of heads a row has.
        make_copy: makes the function that copies.

    Attributes:
        block_bytes: bytes of a frame's payload.
    """

    def __init__(
        self, device: torch.device, planes: Sequence[UnitPlane], units: tuple[int, int], make_copy: UnitCopyMaker
    ) -> None:
        self.device = device
        self.block_bytes = sum(plane.unit_bytes for plane in planes)
        self._planes = planes
        self._per_row, self._head_units = units
        self._make_copy = make_copy
        self._copy: UnitCopy | None = None

    def prepare(self) -> None:
        """Compile what `copy` runs."""
        self._copy = self._make_copy(self._planes, (self._per_row, self._head_units))

    def copy(self, arena: Tensor, unit: int, slot: int, count: int, *, into_frames: bool) -> None:
        """Copy consecutive units into the frames of consecutive slots of `arena`, bytes `[slots, stride]`; or out of them."""
        assert self._copy is not None
        for box in unit_boxes(unit, slot, count, self._per_row, self._head_units):
            self._copy(arena, box, into_frames)

    def planes(self) -> list[Plane]:
        """Planes that a kernel on a device copies."""
        return [
            Plane(
                plane.memory.data_ptr() + plane.start, plane.offset, plane.unit_strides, plane.memory.element_size(),
                plane.sizes, plane.strides, plane.frame_strides,
            )
            for plane in self._planes
        ]  # fmt: skip

    def places(self, units: Sequence[int]) -> np.ndarray[Any, Any]:
        """Rows, units of tokens and head units: int64 `[units, 3]`."""
        numbers = np.asarray(units, np.int64)
        tokens = numbers // self._head_units
        row = tokens // self._per_row
        return np.stack([row, tokens - row * self._per_row, numbers - tokens * self._head_units], axis=1)


def unit_boxes(unit: int, slot: int, count: int, per_row: int, head_units: int) -> Iterator[UnitBox]:
    """Divide `count` consecutive units into boxes: single heads up to whole units of tokens, up to whole rows, and back."""
    while count:
        tokens, head = divmod(unit, head_units)
        row, first = divmod(tokens, per_row)
        if head or count < head_units:
            counts = (1, 1, min(head_units - head, count))
        elif first or count < per_row * head_units:
            counts = (1, min(per_row - first, count // head_units), head_units)
        else:
            counts = (count // (per_row * head_units), per_row, head_units)
        yield UnitBox((row, first, head), counts, slot)
        copied = math.prod(counts)
        unit, slot, count = unit + copied, slot + copied, count - copied


def copy_with_views(planes: Sequence[UnitPlane], units: tuple[int, int]) -> UnitCopy:
    """Copies between strided views, by numpy."""
    memories = [plane.memory.numpy() for plane in planes]

    def copy(arena: Tensor, box: UnitBox, into_frames: bool) -> None:
        frame_memory, stride = arena.numpy(), arena.stride(0)
        slots = (units[0] * units[1] * stride, units[1] * stride, stride)
        for plane, memory in zip(planes, memories, strict=True):
            start = plane.start + sum(map(operator.mul, box.starts, plane.unit_strides))
            offset = plane.offset + box.slot * stride
            sizes = (*box.counts, *plane.sizes)
            paged = np.ndarray(sizes, memory.dtype, memory, start, (*plane.unit_strides, *plane.strides))
            frames = np.ndarray(sizes, memory.dtype, frame_memory, offset, (*slots, *plane.frame_strides))
            np.copyto(*((frames, paged) if into_frames else (paged, frames)))

    return copy


_COPY_ARGUMENTS = (c_void_p, c_int64, c_void_p, *(c_void_p,) * 3, c_int)


class _Plane(Structure):
    _fields_ = [
        ("paged", c_void_p),
        ("offset", c_int64),
        ("word", c_int64),
        ("units", c_int64 * 3),
        ("count", c_int64),
        ("sizes", c_int64 * _AXES),
        ("strides", c_int64 * _AXES),
        ("frame_strides", c_int64 * _AXES),
    ]


def copy_compiled(planes: Sequence[UnitPlane], units: tuple[int, int]) -> UnitCopy:
    """Copies in one pass at the speed of the memory, without the interpreter lock. For memory of the CPU.

    The kernel is compiled at the first use on a machine. Without a compiler, and for a device, numpy or torch copy.
    """
    if any(plane.memory.device.type != "cpu" for plane in planes):
        return copy_with_views(planes, units)
    try:
        function = compiled_code.function(compiled_code.UNIT_SOURCES, "fw_copy_units", c_int, _COPY_ARGUMENTS)
    except CannotBuild:
        return copy_with_views(planes, units)
    table, three = (_Plane * len(planes))(*map(_plane, planes)), c_int64 * 3
    kept = [plane.memory for plane in planes]

    def copy(arena: Tensor, box: UnitBox, into_frames: bool) -> None:
        stride = arena.stride(0)
        frames, slots = arena.data_ptr() + box.slot * stride, (units[0] * units[1] * stride, units[1] * stride, stride)
        failed = function(table, len(kept), frames, three(*box.starts), three(*box.counts), three(*slots), into_frames)
        assert not failed

    return copy


def _plane(plane: UnitPlane) -> _Plane:
    start = plane.memory.data_ptr() + plane.start
    lists = (plane.sizes, plane.strides, plane.frame_strides)
    arrays = [(c_int64 * _AXES)(*numbers) for numbers in lists]
    word = plane.memory.element_size()
    return _Plane(start, plane.offset, word, (c_int64 * 3)(*plane.unit_strides), len(plane.sizes), *arrays)
