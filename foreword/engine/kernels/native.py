"""The compiled kernels as Python functions over tensors. Calls release the interpreter lock."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foreword import compiled_code
from foreword.compiled_code import CannotBuild
from foreword.offload import huge_pages

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Bytes of a packed weight, and of one of 8-bit integers.
_WORD_BYTES = {torch.float32: (4, 1), torch.bfloat16: (4, 2), torch.float16: (2, 1)}


def _fields(pointers: str, integers: str = "", floats: str = "", doubles: str = "") -> list[tuple[str, Any]]:
    """Fields of a C struct: all pointers, then all 64-bit integers, then all numbers."""
    kinds = ((c_void_p, pointers), (c_int64, integers), (c_float, floats), (c_double, doubles))
    return [(name, kind) for kind, names in kinds for name in names.split()]


# `count`: threads of the kernels that a thread calls, where PyTorch's operators have fewer.
_threads = threading.local()


def threads() -> int:
    """How many threads kernels that are called from here have."""
    return getattr(_threads, "count", 0) or torch.get_num_threads()


@contextmanager
def undivided() -> Iterator[None]:
    """Within, on this thread, kernels have as many threads as before, and PyTorch's operators one.

    PyTorch divides more than 32,768 numbers among threads, and what is left of a share after whole vectors is computed one by
    one, which rounds otherwise: the bits of a number would depend on how many others there are. With one thread, short steps
    show what happens in long ones (`check_bits` in self_check.py)."""
    before, outer = torch.get_num_threads(), getattr(_threads, "count", 0)
    _threads.count = threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _threads.count = outer


class PackedWeight(Structure):
    """A weight `[outputs, inputs]`, or several concatenated, laid out for the kernels, with its bias, and the scale of each
    output where it is of 8-bit integers (product.h).

    `memory` are the tensors that it points to, `type` is its dtype's number.
    """

    _fields_ = _fields("packed bias scales", "inputs outputs")
    memory: object
    type: int


class AttentionTasks(Structure):
    """The tasks of a step's attention (attention.h). `memory` is what it points to."""

    _fields_ = _fields("tasks rows tables merges merged parts", "num_tasks num_merges window block_size")
    memory: object


class AttentionLayer(Structure):
    """A layer's paged tensors and how it attends (attention.h)."""

    _fields_ = _fields("k v sinks", "kv_heads group key_dim value_dim", "scale softcap")


class QueryRows(Structure):
    """A step's queries, and where the result goes (attention.h)."""

    _fields_ = _fields("q out", "q_token q_head")


class DecoderLayer(Structure):
    """A whole decoder layer (decoder.h)."""

    _fields_ = [
        ("layer", AttentionLayer),
        *((name, PackedWeight) for name in ("qkv", "output", "gate_up", "down")),
        *_fields(
            "input_norm output_norm query_norm key_norm",
            "hidden inner rotated",
            "input_epsilon output_epsilon query_epsilon key_epsilon",
        ),
    ]


DecoderLayers = ctypes.Array["ctypes._Pointer[DecoderLayer]"]


def layer_pointers(decoders: Sequence[DecoderLayer]) -> DecoderLayers:
    """Decoder layers as `Kernels.decode` takes them."""
    return (POINTER(DecoderLayer) * len(decoders))(*map(ctypes.pointer, decoders))


class DecoderStep(Structure):
    """Arguments of a decoder layer in one step (decoder.h). `memory` is what it points to."""

    _fields_ = [
        ("tasks", POINTER(AttentionTasks)),
        *_fields(
            "slot_mapping cosines sines x normed qkv attended between gate_up inner out head last_norm logits",
            "tokens",
            "last_epsilon",
        ),
    ]
    memory: object


class OutputLayer(NamedTuple):
    """A model's last norm and its output layer."""

    norm: Tensor
    epsilon: float
    weight: PackedWeight


class SampledRow(Structure):
    """How one row of logits is sampled, and the token (sampling.h). `memory` is what it points to."""

    _fields_ = _fields(
        "seen generated times biased biases excluded allowed mask",
        "num_generated num_biased num_excluded num_allowed number top_k token",
        doubles="temperature top_p min_p repetition_penalty presence_penalty frequency_penalty",
    )
    memory: object


class Kernels:
    """The functions of one compiled library."""

    def __init__(self, lib: ctypes.CDLL, name: str) -> None:
        self._lib = lib
        # The name tells what decides the bits of their results: sources, compiler and processor.
        self.name = name
        pointer, number = c_void_p, c_int64
        tasks, layer = POINTER(AttentionTasks), POINTER(AttentionLayer)
        lib.fw_packed_words.restype = number
        lib.fw_packed_words.argtypes = (c_int, number, number)
        arguments: dict[str, tuple[Any, ...]] = {
            "pack": (pointer, number, number, number, pointer),
            "multiply": (POINTER(PackedWeight), pointer, number, number, pointer),
            "attend": (tasks, layer, POINTER(QueryRows)),
            "norm": (pointer, pointer, c_float, number, number, pointer),
            "gate": (pointer, number, number, pointer),
            "sample": (pointer, number, number, POINTER(SampledRow), number),
            "prepare": (POINTER(DecoderLayer), POINTER(DecoderStep)),
            "decode": (POINTER(POINTER(DecoderLayer)), number, POINTER(DecoderStep)),
        }
        for name, types in arguments.items():
            function = getattr(lib, f"fw_{name}")
            function.restype = None
            # The first is the dtype, the last the number of threads.
            function.argtypes = (c_int, *types, c_int)
        lib.fw_write.restype = None
        lib.fw_write.argtypes = (c_int, layer, pointer, number, *(pointer, number, number) * 2)
        self.lanes: int = lib.fw_lanes()
        # Keys of a row's attention that are computed together (attention.h).
        self.part_keys: int = lib.fw_part_keys()
        lib.fw_part_floats.argtypes, lib.fw_part_floats.restype = (number,), number
        # Floats of a part of one row and query head, by the size of values.
        self.part_floats: Callable[[int], int] = cache(lib.fw_part_floats)

    def pack(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor], scales: Sequence[Tensor | None] = ()
    ) -> PackedWeight:
        """Lay out weights that are multiplied by the same input; there is a bias for each of them or for none. With `scales`,
        one float32 per output, weights are multiples of them from -127 to 127 and kept as 8-bit integers."""
        kind, inputs = TYPES[weights[0].dtype], weights[0].shape[1]
        outputs = sum(weight.shape[0] for weight in weights)
        known = [scale for scale in scales if scale is not None]
        # Bytes that a word of 32 bits takes.
        word = _WORD_BYTES[weights[0].dtype][bool(known)]
        words = self._lib.fw_packed_words(kind, inputs, outputs)
        packed = huge_pages.zeros(words * word, dtype=torch.int8)
        bias = torch.cat([bias.detach().float() for bias in biases]) if biases else None
        scale = torch.cat(known) if known else None
        first, count = 0, threads()
        for place, weight in enumerate(weights):
            rows = quantized(weight.detach(), known[place]) if known else weight.detach().contiguous()
            row_words = inputs * rows.element_size() // word
            self._lib.fw_pack(word, rows.data_ptr(), row_words, len(rows), first, packed.data_ptr(), count)
            first += len(rows)
        pointers = [None if one is None else one.data_ptr() for one in (packed, bias, scale)]
        product = PackedWeight(*pointers, inputs, outputs)
        product.type, product.memory = kind, (packed, bias, scale)
        return product

    def multiply(self, weight: PackedWeight, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`, in the weight's dtype."""
        rows = x.reshape(-1, weight.inputs)
        # Rows are read in words of 32 bits.
        if rows.stride(1) != 1 or rows.stride(0) % 2:
            rows = rows.contiguous()
        out = x.new_empty(*x.shape[:-1], weight.outputs)
        source = (rows.data_ptr(), rows.stride(0), rows.shape[0])
        self._lib.fw_multiply(weight.type, byref(weight), *source, out.data_ptr(), threads())
        return out

    def write(self, layer: AttentionLayer, slot_mapping: int, key: Tensor, value: Tensor) -> None:
        """`key` and `value` `[1, kv_heads, T, dim]` into slots; `slot_mapping` is the address of T 64-bit integers."""
        tensors = [number for one in (key, value) for number in (one.data_ptr(), one.stride(2), one.stride(1))]
        self._lib.fw_write(TYPES[key.dtype], byref(layer), slot_mapping, key.shape[2], *tensors)

    def attend(self, tasks: AttentionTasks, layer: AttentionLayer, query: Tensor, out: Tensor) -> None:
        """`query` `[1, heads, T, key_dim]` to `out` `[T, heads, value_dim]`."""
        rows = QueryRows(query.data_ptr(), out.data_ptr(), query.stride(2), query.stride(1))
        self._lib.fw_attend(TYPES[query.dtype], byref(tasks), byref(layer), byref(rows), threads())

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root mean square norm over the last dimension."""
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        rows = (x.data_ptr(), weight.data_ptr(), epsilon, x.numel() // size, size)
        self._lib.fw_norm(TYPES[x.dtype], *rows, out.data_ptr(), threads())
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[1, T, 2 * inner]`, gates first, to `[1, T, inner]`."""
        tokens, inner = gate_up.shape[1], gate_up.shape[2] // 2
        out = gate_up.new_empty(1, tokens, inner)
        source = (gate_up.data_ptr(), tokens, inner)
        self._lib.fw_gate(TYPES[gate_up.dtype], *source, out.data_ptr(), threads())
        return out

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """A token of each row of `logits` `[rows, vocab]`, of rows that are contiguous."""
        table = (SampledRow * len(rows))(*rows)
        source = (logits.data_ptr(), logits.stride(0), logits.shape[1])
        self._lib.fw_sample(TYPES[logits.dtype], *source, table, len(rows), threads())
        return [row.token for row in table]

    def prepare(self, dtype: torch.dtype, decoder: DecoderLayer, step: DecoderStep) -> None:
        """Norms and rotary embedding of a step's queries and keys, in place in `step.qkv`; K and V go into their slots."""
        self._lib.fw_prepare(TYPES[dtype], byref(decoder), byref(step), threads())

    def decode(self, dtype: torch.dtype, decoders: DecoderLayers, step: DecoderStep) -> None:
        """Whole decoder layers of the same sizes, each over the output of the one before; then, if the step has one, the
        output layer."""
        self._lib.fw_decode(TYPES[dtype], decoders, len(decoders), byref(step), threads())


def quantized(weight: Tensor, scale: Tensor) -> Tensor:
    """A weight `[outputs, inputs]` in units of each output's scale, as 8-bit integers."""
    return (weight.float() / scale.unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)


@cache
def load() -> Kernels:
    """The kernels, compiled at the first use on this machine. Raises CannotBuild."""
    return open_library(compiled_code.library())


def open_library(path: Path) -> Kernels:
    """The kernels of a compiled library. Raises CannotBuild."""
    try:
        lib = ctypes.CDLL(str(path))
        lib.fw_lanes.restype = c_int
        lib.fw_use_openmp.argtypes = (c_void_p,)
        lib.fw_use_openmp(_parallel_region())
        return Kernels(lib, f"{path.name} {hashlib.sha256(compiled_code.processor().encode()).hexdigest()[:12]}")
    except (OSError, AttributeError) as error:
        raise CannotBuild(f"{path} cannot be used: {error}") from error


def _parallel_region() -> c_void_p:
    """The function that opens a parallel region in the OpenMP runtime that torch has loaded (GNU's or LLVM's), so the
    kernels use the same threads. Raises CannotBuild."""
    torch.empty(0)
    # Symbols that are visible everywhere come first: a preloaded runtime takes the place of torch's. On aarch64 torch's own is
    # visible to torch's library alone.
    for name in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, c_void_p)
        except (OSError, AttributeError):
            continue
    raise CannotBuild("torch has loaded no OpenMP runtime whose threads they could use")
