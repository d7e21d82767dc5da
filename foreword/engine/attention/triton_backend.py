"""Attention backend of Triton kernels (kernels/paged_attention.py), for CUDA. Under Triton's interpreter
(`TRITON_INTERPRET=1`) it runs on a CPU, slowly: so it is tested.

A step needs three launches for each layer: K and V into their slots, the prompts' tiles, the decoding sequences; and a
fourth where so few sequences decode that their keys are divided among programs. What the kernels read of a step is in
tensors of fixed shape, so that a CUDA graph can replay them.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from foreword.engine.attention.kv_tensors import PagedLayer, pinned
from foreword.engine.attention.metadata import AttentionMetadata, AttentionParams, QueryChunk
from foreword.engine.kernels.paged_attention import attend_kernel, merge_kernel, write_kernel

# `tl.dot` multiplies at least this many rows.
_MIN_ROWS = 16
_PREFILL_ROWS = 128
_MAX_SPLITS = 64
# Programs for each multiprocessor: where there are fewer, the keys of a sequence are divided.
_PROGRAMS = 2


def pack_step(metadata: AttentionMetadata, rows: int = 0) -> tuple[array[int], dict[QueryChunk, int]]:
    """What the kernels read of a step, as one array: the slots of its tokens, the tiles of its decoding sequences, the block
    tables. And where each table starts. Slots and tiles are padded to `rows`: such tokens are written nowhere and
    attend to nothing."""
    chunks = (*metadata.prefills, *metadata.decodes)
    table_at: dict[QueryChunk, int] = {}
    tables = array("i")
    for chunk in chunks:
        table_at[chunk] = len(tables)
        tables.extend(chunk.block_table)
    numbers = array("i", metadata.slot_mapping)
    numbers.extend([-1] * (rows - len(numbers)))
    for chunk in metadata.decodes:
        numbers.extend((chunk.row, 1, chunk.start, table_at[chunk]))
    numbers.extend([0] * (4 * (rows - len(metadata.decodes))))
    return numbers + tables, table_at


@dataclass(slots=True)
class StepTensors:
    """A KV group's part of a step on the device: int32.

    Attributes:
        slots: `[tokens]`, the slot of each token's K and V, or -1.
        decodes: `[sequences, 4]`, tiles of one token (kernels/paged_attention.py).
        tables: the block tables, one after the other.
        block_size: tokens of a block.
        prefills: chunks of several tokens, each with the start of its table.
    """

    slots: Tensor
    decodes: Tensor
    tables: Tensor
    block_size: int
    prefills: Sequence[tuple[QueryChunk, int]] = ()
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: AttentionMetadata, device: torch.device) -> StepTensors:
        numbers, table_at = pack_step(metadata)
        packed = pinned(numbers, torch.int32, device).to(device, non_blocking=True)
        prefills = [(chunk, table_at[chunk]) for chunk in metadata.prefills]
        return cls.view(packed, metadata.num_tokens, len(metadata.decodes), metadata.block_size, prefills)

    @classmethod
    def view(
        cls,
        packed: Tensor,
        tokens: int,
        decodes: int,
        block_size: int,
        prefills: Sequence[tuple[QueryChunk, int]] = (),
    ) -> StepTensors:
        """The parts of what `pack_step` made."""
        slots, tiles, tables = packed.tensor_split((tokens, tokens + 4 * decodes))
        return cls(slots, tiles.view(decodes, 4), tables, block_size, prefills)

    def prefill_tiles(self, tokens: int) -> Tensor:
        """The prompts in tiles of at most that many tokens, those with the most keys first: the last to run are short."""
        tiles = self._tiles.get(tokens)
        if tiles is None:
            cut = [
                (chunk.row + first, min(tokens, chunk.count - first), chunk.start + first, table)
                for chunk, table in self.prefills
                for first in range(0, chunk.count, tokens)
            ]
            cut.sort(key=lambda tile: -tile[2])
            numbers = [number for tile in cut for number in tile]
            device = self.slots.device
            tiles = pinned(numbers, torch.int32, device).to(device, non_blocking=True).view(-1, 4)
            self._tiles[tokens] = tiles
        return tiles


class TritonAttention:
    """Attention of one step by Triton kernels."""

    def __init__(self, step: StepTensors, layers: Mapping[int, PagedLayer]) -> None:
        self._step = step
        self._layers = layers

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The step's K and V into their slots."""
        paged = self._layers[layer]
        kv_heads = paged.k.shape[1]
        key, value = _dense_last(key), _dense_last(value)
        sizes = _sizes(paged)
        write_kernel[(len(self._step.slots),)](
            key, value, paged.k, paged.v, self._step.slots,
            key.stride(1), key.stride(2), value.stride(1), value.stride(2), kv_heads,
            **sizes, HEADS=triton.next_power_of_2(kv_heads),
        )  # fmt: skip

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """As `StepAttention.attend`, after `write`."""
        paged, step = self._layers[layer], self._step
        query = _dense_last(query)
        heads, kv_heads = query.shape[1], paged.k.shape[1]
        out = query.new_empty(query.shape[2], heads, paged.v.shape[2])
        group = triton.next_power_of_2(heads // kv_heads)
        if step.prefills:
            rows = max(_prefill_rows(paged), group)
            self._launch(paged, query, out, step.prefill_tiles(rows // group), rows, group, 1, params)
        if len(step.decodes):
            splits = _splits(len(step.decodes) * kv_heads, query.device)
            self._launch(paged, query, out, step.decodes, max(_MIN_ROWS, group), group, splits, params)
        return out.unsqueeze(0)

    def _launch(
        self,
        paged: PagedLayer,
        query: Tensor,
        out: Tensor,
        tiles: Tensor,
        rows: int,
        group: int,
        splits: int,
        params: AttentionParams,
    ) -> None:
        heads, (_, kv_heads, _), value_dim = query.shape[1], paged.k.shape, paged.v.shape[2]
        parts = sums = out
        if splits > 1:
            parts = query.new_empty(len(tiles) * heads * splits * value_dim, dtype=torch.float32)
            sums = query.new_empty(len(tiles) * heads * splits, dtype=torch.float32)
        sinks = out if params.sinks is None else params.sinks.contiguous()
        has_sinks = params.sinks is not None
        sizes = _sizes(paged)
        attend_kernel[(len(tiles), kv_heads, splits)](
            out, parts, sums, query, paged.k, paged.v, tiles, self._step.tables, sinks,
            params.scale, params.softcap or 0.0, params.window or 0, query.stride(1), query.stride(2),
            kv_heads, heads // kv_heads, self._step.block_size,
            **sizes, ROWS=rows, GROUP=group, KEYS=_keys(paged), SPLITS=splits,
            SOFTCAP=params.softcap is not None, WINDOW=params.window is not None, SINKS=has_sinks,
            WIDEN=query.device.type == "cpu", num_warps=8 if rows > 64 else 4, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(len(tiles), heads)](
                out, parts, sums, tiles, sinks, heads,
                V_DIM=value_dim, V_PADDED=sizes["V_PADDED"], SPLITS=splits, SINKS=has_sinks,
            )  # fmt: skip


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _sizes(paged: PagedLayer) -> dict[str, Any]:
    key_dim, value_dim = paged.k.shape[2], paged.v.shape[2]
    return {
        "K_DIM": key_dim,
        "V_DIM": value_dim,
        "K_PADDED": max(16, triton.next_power_of_2(key_dim)),
        "V_PADDED": max(16, triton.next_power_of_2(value_dim)),
    }


def _wide(paged: PagedLayer) -> bool:
    """Whether tiles of the usual size would not fit into a multiprocessor's shared memory and registers."""
    return max(paged.k.shape[2], paged.v.shape[2]) * paged.k.element_size() > 256


def _keys(paged: PagedLayer) -> int:
    """Keys that a program handles at a time."""
    return 32 if _wide(paged) else 64


def _prefill_rows(paged: PagedLayer) -> int:
    return _PREFILL_ROWS // 4 if _wide(paged) else _PREFILL_ROWS


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def _splits(programs: int, device: torch.device) -> int:
    """Into how many shares the keys of each sequence are divided: a power of two. It does not depend on the contexts, which
    a CUDA graph does not know."""
    shares = max(1, _PROGRAMS * _multiprocessors(device) // programs)
    return min(_MAX_SPLITS, int(triton.next_power_of_2(shares)))
