"""The compiled copy between units of a paged KV cache and frames of the portable layout (units.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int, c_int64, c_void_p
from functools import cache

from torch import Tensor

from foreword.engine.kernels import build
from foreword.engine.kernels.build import CannotBuild
from foreword.offload.portable_copies import UnitBox, UnitCopy, UnitPlane, copy_with_views

_AXES = 6


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


def copy_compiled(planes: Sequence[UnitPlane], units: tuple[int, int], arena: Tensor) -> UnitCopy:
    """Copies in one pass at the speed of the memory, without the interpreter lock. For memory of the CPU.

    The kernel is compiled at the first use on a machine. Without a compiler, and for a device, numpy or torch copy.
    """
    if any(plane.memory.device.type != "cpu" for plane in planes):
        return copy_with_views(planes, units, arena)
    try:
        function = _load()
    except CannotBuild:
        return copy_with_views(planes, units, arena)
    stride = arena.stride(0)
    table = (_Plane * len(planes))(*map(_plane, planes))
    slots = (c_int64 * 3)(units[0] * units[1] * stride, units[1] * stride, stride)
    three, base = c_int64 * 3, arena.data_ptr()
    kept = (arena, [plane.memory for plane in planes])

    def copy(box: UnitBox, into_frames: bool) -> None:
        frames = base + box.slot * stride
        failed = function(table, len(kept[1]), frames, three(*box.starts), three(*box.counts), slots, into_frames)
        assert not failed

    return copy


def _plane(plane: UnitPlane) -> _Plane:
    start = plane.memory.data_ptr() + plane.start
    lists = (plane.sizes, plane.strides, plane.frame_strides)
    arrays = [(c_int64 * _AXES)(*numbers) for numbers in lists]
    word = plane.memory.element_size()
    return _Plane(start, plane.offset, word, (c_int64 * 3)(*plane.unit_strides), len(plane.sizes), *arrays)


@cache
def _load() -> ctypes._NamedFuncPointer:
    """The compiled function. Raises CannotBuild."""
    path = build.library(names=build.UNIT_SOURCES)
    try:
        function = ctypes.CDLL(str(path)).fw_copy_units
    except (OSError, AttributeError) as error:
        raise CannotBuild(f"{path} cannot be used: {error}") from error
    function.restype = c_int
    function.argtypes = (c_void_p, c_int64, c_void_p, *(c_void_p,) * 3, c_int)
    return function
