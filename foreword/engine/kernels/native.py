"""The compiled kernels as Python functions over tensors. Calls release the interpreter's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from foreword.engine.kernels import build
from foreword.engine.kernels.build import CannotBuild

TYPES = {torch.float32: 0, torch.bfloat16: 1}
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WORD_BYTES = 4


class Product(Structure):
    """A packed weight, `product.h`."""

    _fields_ = (("packed", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("outputs", c_int64))


class Plan(Structure):
    """The tasks of a step's attention, `attention.h`."""

    _fields_ = (
        ("tasks", c_void_p),
        ("num_tasks", c_int64),
        ("rows", c_void_p),
        ("tables", c_void_p),
        ("merges", c_void_p),
        ("num_merges", c_int64),
        ("merged", c_void_p),
        ("parts", c_void_p),
        ("window", c_int64),
        ("block_size", c_int64),
    )


class Layer(Structure):
    """One layer's paged tensors and how it attends, `attention.h`."""

    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("kv_heads", c_int64),
        ("group", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
    )


class Rows(Structure):
    """A step's queries and where the result goes, `attention.h`."""

    _fields_ = (("q", c_void_p), ("out", c_void_p), ("q_token", c_int64), ("q_head", c_int64))


class Decoder(Structure):
    """A decoder layer, `decoder.h`."""

    _fields_ = (
        ("layer", Layer),
        ("qkv", Product),
        ("output", Product),
        ("gate_up", Product),
        ("down", Product),
        ("input_norm", c_void_p),
        ("output_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("input_epsilon", c_float),
        ("output_epsilon", c_float),
        ("query_epsilon", c_float),
        ("key_epsilon", c_float),
        ("hidden", c_int64),
        ("inner", c_int64),
        ("rotated", c_int64),
    )


class Step(Structure):
    """What a decoder layer computes in one step, `decoder.h`."""

    _fields_ = (
        ("plan", POINTER(Plan)),
        ("slots", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("tokens", c_int64),
        ("x", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("between", c_void_p),
        ("gate_up", c_void_p),
        ("inner", c_void_p),
        ("out", c_void_p),
    )


class PackedProduct:
    """A weight `[outputs, inputs]` (several, one above the other) laid out for the kernel, with its bias."""

    __slots__ = ("_bias", "_packed", "struct", "type")

    def __init__(self, lib: ctypes.CDLL, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self.type = TYPES[weights[0].dtype]
        inputs, outputs = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
        self._packed = torch.zeros(lib.fw_packed_words(self.type, inputs, outputs), dtype=torch.int32)
        first = 0
        for weight in weights:
            held = weight.detach().contiguous()
            threads = torch.get_num_threads()
            lib.fw_pack(self.type, held.data_ptr(), inputs, weight.shape[0], first, self._packed.data_ptr(), threads)
            first += weight.shape[0]
        self._bias = torch.cat([bias.detach().float() for bias in biases]) if biases else None
        self.struct = Product(
            self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr(), inputs, outputs
        )


class Kernels:
    """The functions of one compiled library."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        pointer, number = c_void_p, c_int64
        lib.fw_packed_words.restype = number
        lib.fw_packed_words.argtypes = (c_int, number, number)
        lib.fw_pack.argtypes = (c_int, pointer, number, number, number, pointer, c_int)
        lib.fw_multiply.argtypes = (c_int, POINTER(Product), pointer, number, number, pointer, c_int)
        lib.fw_write.argtypes = (
            c_int, POINTER(Layer), pointer, number, pointer, number, number, pointer, number, number
        )  # fmt: skip
        lib.fw_attend.argtypes = (c_int, POINTER(Plan), POINTER(Layer), POINTER(Rows), c_int)
        lib.fw_norm.argtypes = (c_int, pointer, pointer, c_float, number, number, pointer, c_int)
        lib.fw_decode.argtypes = (c_int, POINTER(Decoder), POINTER(Step), c_int)
        for name in ("pack", "multiply", "write", "attend", "norm", "decode"):
            getattr(lib, f"fw_{name}").restype = None
        self.lanes: int = lib.fw_lanes()

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether its products are the fastest here: it has the widest registers and, for bfloat16, units for that."""
        if dtype == torch.bfloat16:
            return bool(self._lib.fw_bfloat16_units())
        return dtype == torch.float32 and self.lanes >= 16

    def pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> PackedProduct:
        """Lay out weights that are multiplied by the same input; there is a bias for each of them or for none."""
        return PackedProduct(self._lib, weights, biases)

    def multiply(self, product: PackedProduct, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`, in the weight's dtype."""
        struct = product.struct
        rows = x.reshape(-1, struct.inputs)
        # Rows are read in words of 32 bits.
        if rows.stride(1) != 1 or rows.stride(0) % 2:
            rows = rows.contiguous()
        out = x.new_empty(*x.shape[:-1], struct.outputs)
        self._lib.fw_multiply(
            product.type,
            byref(struct),
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def write(self, layer: Layer, slots: int, key: Tensor, value: Tensor) -> None:
        """`key` and `value` `[1, kv_heads, T, dim]` into slots; `slots` is the address of T numbers of 64 bits."""
        self._lib.fw_write(
            TYPES[key.dtype],
            byref(layer),
            slots,
            key.shape[2],
            key.data_ptr(),
            key.stride(2),
            key.stride(1),
            value.data_ptr(),
            value.stride(2),
            value.stride(1),
        )

    def attend(self, plan: Plan, layer: Layer, query: Tensor, out: Tensor) -> None:
        """`query` `[1, heads, T, key_dim]` to `out` `[T, heads, value_dim]`."""
        rows = Rows(query.data_ptr(), out.data_ptr(), query.stride(2), query.stride(1))
        self._lib.fw_attend(TYPES[query.dtype], byref(plan), byref(layer), byref(rows), torch.get_num_threads())

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root mean square norm over the last dimension."""
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._lib.fw_norm(
            TYPES[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            epsilon,
            x.numel() // size,
            size,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def decode(self, kind: int, decoder: Decoder, step: Step) -> None:
        """A whole decoder layer."""
        self._lib.fw_decode(kind, byref(decoder), byref(step), torch.get_num_threads())


@cache
def load() -> Kernels:
    """The kernels, compiled if need be. Raises CannotBuild."""
    return open_library(build.library())


def open_library(path: Path) -> Kernels:
    """The kernels of a compiled library. Raises CannotBuild."""
    try:
        lib = ctypes.CDLL(str(path))
        lib.fw_lanes.restype = c_int
        region = _region()
        lib.fw_use_threads_of.argtypes = (c_void_p,)
        lib.fw_use_threads_of(region)
        return Kernels(lib)
    except (OSError, AttributeError) as error:
        raise CannotBuild(f"{path} cannot be used: {error}") from error


def _region() -> c_void_p:
    """The function that opens a parallel region in the OpenMP runtime that torch has loaded: kernels use the same threads.
    LLVM's runtime has it too. Raises CannotBuild."""
    torch.empty(0)
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p)
    except AttributeError:
        raise CannotBuild("torch brings no OpenMP runtime whose threads they could use") from None
