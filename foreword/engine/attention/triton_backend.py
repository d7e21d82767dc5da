"""Attention backend of Triton kernels (kernels/paged_attention.py), for CUDA. Under Triton's interpreter
(`TRITON_INTERPRET=1`) it runs on a CPU, slowly: so it is tested.

A step needs three launches for each layer: K and V into their slots, the prompts' tiles, the decoding sequences; and a
fourth, to merge results, where so few sequences decode that their keys are divided among programs. Where many of their
keys are shared, a fifth reads these once. What the kernels read of a step is in tensors of fixed shape, so that a CUDA
graph can replay them.
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

from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, AttentionParams, QueryChunk, pinned
from foreword.engine.kernels.paged_attention import attend_kernel, merge_kernel, write_kernel

# `tl.dot` multiplies at least this many rows.
_MIN_ROWS = 16
_PREFILL_ROWS = 128
_SHARED_ROWS = 64
_MAX_SPLITS = 64
# Programs for each multiprocessor: where there are fewer, the keys of a sequence are divided.
_PROGRAMS = 2
# Groups of a step that read a shared prefix once.
_MAX_GROUPS = 4
# Numbers of a tile or a group (kernels/paged_attention.py).
_TILE = 5
# Bytes of K and V of a layer, read again and again, that make a shared prefix worth a launch and the merge of the parts:
# an estimate. They come mostly from an L2 cache of some TB/s, so 32 MiB take longer than the 5 us or so of two launches.
_SAVED_BYTES = 32 << 20


def sharing_pays(layers: Mapping[int, PagedLayer]) -> int:
    """Tokens that need not be read again, from which on decoding sequences read their common prefix once."""
    sizes = (layer.k[0].nbytes + layer.v[0].nbytes for layer in layers.values())
    return -(-_SAVED_BYTES // max(sizes))


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Metadata of a step that the kernels read, as one array: the slots of its tokens, the tiles of its decoding sequences,
    the groups that share a prefix, the block tables, the members of the groups.

    Attributes:
        table_at: where each table starts.
        shares: there are groups.
    """

    numbers: array[int]
    table_at: Mapping[QueryChunk, int]
    shares: bool


def pack_step(metadata: AttentionMetadata, saving: int, rows: int = 0) -> PackedStep:
    """Pack a step. Slots and tiles are padded to `rows`: such tokens are written nowhere and attend to nothing. Groups save
    `saving` tokens or more (`sharing_pays`)."""
    table_at: dict[QueryChunk, int] = {}
    tables = array("i")
    for chunk in (*metadata.prefills, *metadata.decodes):
        table_at[chunk] = len(tables)
        tables.extend(chunk.block_table)
    # A window's last tokens are few, and soon not shared.
    found = metadata.decode_groups(None, saving) if metadata.window is None and metadata.decodes else []
    shared = sorted((one for one in found if one.shared), key=lambda one: -one.saved)[:_MAX_GROUPS]
    groups = array("i")
    for group in shared:
        groups.extend((len(tables), len(group.chunks), group.shared - 1, table_at[group.chunks[0]], 0))
        tables.extend(group.numbers)
    grouped = {number: group.shared for group in shared for number in group.numbers}
    numbers = array("i", metadata.slot_mapping)
    numbers.extend([-1] * (rows - len(numbers)))
    for number, chunk in enumerate(metadata.decodes):
        numbers.extend((chunk.row, 1, chunk.start, table_at[chunk], grouped.get(number, 0)))
    numbers.extend([0] * (_TILE * (rows - len(metadata.decodes))))
    groups.extend([0] * (_TILE * _MAX_GROUPS - len(groups)))
    return PackedStep(numbers + groups + tables, table_at, bool(shared))


@dataclass(slots=True)
class StepTensors:
    """A KV group's part of a step on the device: int32.

    Attributes:
        slots: `[tokens]`, the slot of each token's K and V, or -1.
        decodes: `[sequences, 5]`, tiles of one token (kernels/paged_attention.py).
        groups: `[groups, 5]`, decoding sequences that share a prefix.
        tables: the block tables, one after the other, and the members of the groups.
        block_size: tokens of a block.
        shares: prefixes that decoding sequences share are read once for each group.
        prefills: chunks of several tokens, each with the start of its table.
    """

    slots: Tensor
    decodes: Tensor
    groups: Tensor
    tables: Tensor
    block_size: int
    shares: bool
    prefills: Sequence[tuple[QueryChunk, int]] = ()
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: AttentionMetadata, device: torch.device, saving: int) -> StepTensors:
        step = pack_step(metadata, saving)
        packed = pinned(step.numbers, torch.int32, device).to(device, non_blocking=True)
        prefills = [(chunk, step.table_at[chunk]) for chunk in metadata.prefills]
        return cls.view(packed, metadata.num_tokens, len(metadata.decodes), metadata.block_size, step.shares, prefills)

    @classmethod
    def view(
        cls,
        packed: Tensor,
        tokens: int,
        decodes: int,
        block_size: int,
        shares: bool,
        prefills: Sequence[tuple[QueryChunk, int]] = (),
    ) -> StepTensors:
        """The parts of what `pack_step` made."""
        groups_at = tokens + _TILE * decodes
        slots, tiles, groups, tables = packed.tensor_split((tokens, groups_at, groups_at + _TILE * _MAX_GROUPS))
        return cls(slots, tiles.view(-1, _TILE), groups.view(-1, _TILE), tables, block_size, shares, prefills)

    @staticmethod
    def numbers(rows: int, blocks: int) -> int:
        """The most numbers of a padded step of `rows` decoding sequences with that many blocks in their tables."""
        return rows * (1 + _TILE + 1) + _TILE * _MAX_GROUPS + blocks

    def prefill_tiles(self, tokens: int) -> Tensor:
        """The prompts in tiles of at most that many tokens, those with the most keys first: the last to run are short."""
        tiles = self._tiles.get(tokens)
        if tiles is None:
            cut = [
                (chunk.row + first, min(tokens, chunk.count - first), chunk.start + first, table, 0)
                for chunk, table in self.prefills
                for first in range(0, chunk.count, tokens)
            ]
            cut.sort(key=lambda tile: -tile[2])
            numbers = [number for tile in cut for number in tile]
            device = self.slots.device
            tiles = pinned(numbers, torch.int32, device).to(device, non_blocking=True).view(-1, _TILE)
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
        """Attend as `StepAttention.attend`, after `write`."""
        paged, step = self._layers[layer], self._step
        query = _dense_last(query)
        out = query.new_empty(query.shape[2], query.shape[1], paged.v.shape[2])
        work = _LayerAttention(paged, step, query, out, params)
        if step.prefills:
            work.prefill()
        if len(step.decodes):
            work.decode()
        return out.unsqueeze(0)


class _LayerAttention:
    """The launches of one layer: `query` `[1, heads, T, key_dim]` to `out` `[T, heads, value_dim]`."""

    def __init__(
        self, paged: PagedLayer, step: StepTensors, query: Tensor, out: Tensor, params: AttentionParams
    ) -> None:
        self._paged, self._step, self._query, self._out, self._params = paged, step, query, out, params
        self._kv_heads = paged.k.shape[1]
        self._group = triton.next_power_of_2(query.shape[1] // self._kv_heads)
        self._sizes = _sizes(paged)
        self._sinks = out if params.sinks is None else params.sinks.contiguous()
        # Results to be merged: [tiles, heads, parts of a row, value_dim] and [tiles, heads, parts of a row].
        self._parts = self._sums = out
        self._parts_per_row = 1

    def prefill(self) -> None:
        rows = max(_prefill_rows(self._paged), self._group)
        self._attend(self._step.prefill_tiles(rows // self._group), rows, 1)

    def decode(self) -> None:
        tiles = self._step.decodes
        count, device = len(tiles), self._query.device
        rows, shared_rows = max(_MIN_ROWS, self._group), max(min(_SHARED_ROWS, _prefill_rows(self._paged)), self._group)
        splits, shared = _splits(count * self._kv_heads, device), 0
        # Every key of a shared prefix is in a layer's window only if that is none.
        if self._step.shares and self._params.window is None:
            programs = -(-count // (shared_rows // self._group))
            splits, shared = (
                min(one, _MAX_SPLITS // 2) for one in (splits, _splits(programs * self._kv_heads, device))
            )
        parts = splits + shared
        if parts > 1:
            heads, value_dim = self._out.shape[1:]
            self._parts = self._query.new_empty(count * heads * parts * value_dim, dtype=torch.float32)
            self._sums = self._query.new_empty(count * heads * parts, dtype=torch.float32)
            self._parts_per_row = parts
        if shared:
            self._attend(self._step.groups, shared_rows, shared, programs=programs)
        self._attend(tiles, rows, splits, first_part=shared)
        if parts > 1:
            merge_kernel[(count, heads)](
                self._out, self._parts, self._sums, tiles, self._sinks, heads, parts, shared,
                V_DIM=value_dim, V_PADDED=self._sizes["V_PADDED"], PARTS=triton.next_power_of_2(parts),
                SINKS=self._params.sinks is not None,
            )  # fmt: skip

    def _attend(self, tiles: Tensor, rows: int, splits: int, *, first_part: int = 0, programs: int = 0) -> None:
        """Attend with tiles of `rows` rows; or with groups, each in `programs` tiles, if that is given."""
        params, query = self._params, self._query
        attend_kernel[(len(tiles) * max(programs, 1), self._kv_heads, splits)](
            self._out, self._parts, self._sums, query, self._paged.k, self._paged.v, tiles, self._step.decodes,
            self._step.tables, self._sinks, params.scale, params.softcap or 0.0, params.window or 0,
            query.stride(1), query.stride(2), self._kv_heads, query.shape[1] // self._kv_heads, self._step.block_size,
            len(tiles), first_part, self._parts_per_row,
            **self._sizes, ROWS=rows, GROUP=self._group, KEYS=32 if _wide(self._paged) else 64, PARTS=self._parts_per_row > 1,
            SHARED=programs > 0, REST=first_part > 0, SOFTCAP=params.softcap is not None,
            WINDOW=params.window is not None, SINKS=params.sinks is not None, WIDEN=query.device.type == "cpu",
            num_warps=8 if rows > 64 else 4, num_stages=2,
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
