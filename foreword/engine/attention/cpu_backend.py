"""Attention from the compiled kernels: one call per layer, which reads K and V where they lie (kernels/attention.h).

Here a step's work is cut into tasks. A task is some tokens and the keys that they see; with each KV head it is an item of
work that a thread takes. Prompts are cut into tiles; a prefix that decoding sequences share is one task for all of them; long
runs of keys are cut where there would be too few items for the threads.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import group_decodes
from foreword.engine.kernels.native import TYPES, Decoder, Kernels, Layer, Plan, Step
from foreword.engine.sequence import Chunk

# Query rows of a tile, for each KV head: enough that laying out a block of keys costs little beside using it.
TILE_ROWS = 192
# Keys are not cut shorter than this.
MIN_KEYS = 256
# As in kernels/attention.h.
ROWS_TOGETHER = 256
# Items of work per thread, so that threads end at about the same time.
_ITEMS_PER_THREAD = 4


@dataclass(slots=True)
class _Task:
    """As `Task` in kernels/attention.h; `rows` and `table` are what its numbers point to."""

    rows: Sequence[int]
    table: int
    low: int
    high: int
    position: int
    whole: bool = True

    @property
    def cost(self) -> int:
        return len(self.rows) * (self.high - self.low)

    def items(self, heads: tuple[int, int]) -> int:
        """What the kernel makes of it; `heads` are KV heads, and query heads of each."""
        kv_heads, group = heads
        return 1 if len(self.rows) * kv_heads * group <= ROWS_TOGETHER else kv_heads


class StepPlan:
    """The tasks of all layers with the same window and heads, and the memory that the kernel reads and writes for them."""

    __slots__ = ("_arrays", "_parts", "struct")

    def __init__(
        self, tasks: list[_Task], tables: array[int], window: int | None, block_size: int, part_floats: int
    ) -> None:
        numbers: list[int] = []
        rows: list[int] = []
        parts: dict[int, list[int]] = {}
        num_parts = 0
        for task in tasks:
            numbers += (len(rows), len(task.rows), task.table, task.low, task.high, task.position)
            rows += task.rows
            if task.whole:
                numbers.append(-1)
                continue
            numbers.append(num_parts)
            for row in task.rows:
                parts.setdefault(row, []).append(num_parts)
                num_parts += 1
        merges: list[int] = []
        merged: list[int] = []
        for row, mine in parts.items():
            merges += (row, len(merged), len(mine))
            merged += mine
        self._arrays = [array("q", values) for values in (numbers, rows, merges, merged)] + [tables]
        self._parts = torch.empty(num_parts * part_floats) if num_parts else None
        task_at, rows_at, merges_at, merged_at, tables_at = (values.buffer_info()[0] for values in self._arrays)
        self.struct = Plan(
            tasks=task_at,
            num_tasks=len(tasks),
            rows=rows_at,
            tables=tables_at,
            merges=merges_at,
            num_merges=len(parts),
            merged=merged_at,
            parts=None if self._parts is None else self._parts.data_ptr(),
            window=window or 0,
            block_size=block_size,
        )


class NativeAttention:
    """The kernels and the paged tensors of one runner."""

    def __init__(self, kernels: Kernels, layers: Mapping[int, PagedLayer], block_size: int) -> None:
        self.kernels = kernels
        self.block_size = block_size
        self._layers = layers
        self._structs: dict[tuple[int, int], Layer] = {}
        self._decoders: dict[int, Decoder] = {}

    def takes(self, paged: PagedLayer, query: Tensor) -> bool:
        """Whether the kernels know its dtype and sizes: bfloat16 keys come in pairs."""
        dtype = paged.k.dtype
        if dtype not in TYPES or query.dtype != dtype:
            return False
        return dtype == torch.float32 or paged.k.shape[2] % 2 == 0

    def layer(self, number: int, heads: int, scale: float, softcap: float | None) -> Layer:
        """The layer as the kernels see it; sinks are added by the caller."""
        struct = self._structs.get((number, heads))
        if struct is None:
            paged = self._layers[number]
            kv_heads, key_dim = paged.k.shape[1:]
            struct = self._structs[number, heads] = Layer(
                k=paged.k.data_ptr(),
                v=paged.v.data_ptr(),
                kv_heads=kv_heads,
                group=heads // kv_heads,
                key_dim=key_dim,
                value_dim=paged.v.shape[2],
            )
        struct.scale = scale
        struct.softcap = softcap or 0.0
        return struct

    def decoder(self, number: int, heads: int, make: Callable[[Layer], Decoder]) -> Decoder:
        """The decoder layer over these paged tensors, made when it is first asked for."""
        struct = self._decoders.get(number)
        if struct is None:
            struct = self._decoders[number] = make(self.layer(number, heads, 1.0, None))
        return struct

    def forget(self, number: int) -> None:
        """Make the decoder layer anew when it is next asked for."""
        self._decoders.pop(number, None)


class NativeStep:
    """The attention of one step. `slots` are where its tokens' K and V go, -1 for those that lie there already."""

    def __init__(
        self,
        native: NativeAttention,
        prefills: Sequence[tuple[int, Chunk]],
        decodes: Sequence[tuple[int, Chunk]],
        slots: Sequence[int],
        *,
        share: bool,
    ) -> None:
        self.native = native
        self._steps: dict[tuple[int, ...], Step] = {}
        self._buffers: list[Tensor] = []
        self._prefills = prefills
        self._decodes = decodes
        self._share = share
        self._slots = array("q", slots)
        self._plans: dict[tuple[int | None, int, int, int], StepPlan] = {}
        self._starts: dict[int, int] = {}
        self._tables = array("q")
        for _, chunk in (*prefills, *decodes):
            self._starts[id(chunk)] = len(self._tables)
            self._tables.extend(chunk.sequence.table.blocks)

    @property
    def num_tokens(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> int:
        """Their address."""
        return self._slots.buffer_info()[0]

    def attend(
        self,
        number: int,
        query: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `StepAttention.attend`, after the step's K and V were written; the result is `[T, heads, value_dim]`."""
        native = self.native
        heads = query.shape[1]
        layer = native.layer(number, heads, scale, softcap)
        value_dim = int(layer.value_dim)
        held = None if sinks is None else sinks.float().contiguous()
        layer.sinks = None if held is None else held.data_ptr()
        if query.stride(3) != 1:
            query = query.contiguous()
        out = query.new_empty(query.shape[2], heads, value_dim)
        native.kernels.attend(self.plan(window, layer).struct, layer, query, out)
        return out

    def write(self, number: int, heads: int, key: Tensor, value: Tensor) -> None:
        """K and V of the step's tokens into their slots."""
        if key.stride(3) != 1:
            key = key.contiguous()
        if value.stride(3) != 1:
            value = value.contiguous()
        native = self.native
        native.kernels.write(native.layer(number, heads, 1.0, None), self.slots, key, value)

    def decode(self, decoder: Decoder, x: Tensor, cosines: Tensor, sines: Tensor, window: int | None) -> Tensor:
        """A whole decoder layer: `x` `[1, T, hidden]` to the same shape; K and V go into their slots."""
        widths = (decoder.hidden, decoder.qkv.outputs, decoder.output.inputs, decoder.gate_up.outputs)
        step = self._steps.get(widths)
        if step is None:
            step = self._steps[widths] = self._make_step(decoder, x)
        step.plan = ctypes.pointer(self.plan(window, decoder.layer).struct)
        out = torch.empty_like(x)
        step.cosines, step.sines = cosines.data_ptr(), sines.data_ptr()
        step.x, step.out = x.data_ptr(), out.data_ptr()
        self.native.kernels.decode(TYPES[x.dtype], decoder, step)
        return out

    def _make_step(self, decoder: Decoder, x: Tensor) -> Step:
        """Memory for what a layer computes on its way; the same for all layers of one size."""
        tokens, hidden = x.shape[1:]
        widths = {
            "normed": hidden,
            "qkv": decoder.qkv.outputs,
            "attended": decoder.output.inputs,
            "between": hidden,
            "gate_up": decoder.gate_up.outputs,
            "inner": decoder.inner,
        }
        buffers = [x.new_empty(tokens * width) for width in widths.values()]
        places = dict(zip(widths, (buffer.data_ptr() for buffer in buffers), strict=True))
        self._buffers += buffers
        return Step(slots=self.slots, tokens=tokens, **places)

    def plan(self, window: int | None, layer: Layer) -> StepPlan:
        """The tasks of layers with this window and these heads."""
        key = (window, layer.kv_heads, layer.group, layer.value_dim)
        found = self._plans.get(key)
        if found is None:
            tasks = [*self._prefill_tasks(window, layer.group), *self._decode_tasks(window)]
            tasks = _cut(tasks, (layer.kv_heads, layer.group), torch.get_num_threads())
            # The longest first: the last ones to be taken are short.
            tasks.sort(key=lambda task: -task.cost)
            floats = layer.kv_heads * layer.group * (layer.value_dim + 1)
            found = self._plans[key] = StepPlan(tasks, self._tables, window, self.native.block_size, floats)
        return found

    def _prefill_tasks(self, window: int | None, group: int) -> list[_Task]:
        size = max(1, TILE_ROWS // group)
        tasks = []
        for row, chunk in self._prefills:
            table = self._starts[id(chunk)]
            for first in range(0, chunk.count, size):
                count = min(size, chunk.count - first)
                position = chunk.start + first
                low = 0 if window is None else max(0, position - window + 1)
                rows = range(row + first, row + first + count)
                tasks.append(_Task(rows, table, low, position + count, position))
        return tasks

    def _decode_tasks(self, window: int | None) -> list[_Task]:
        tasks = []
        for group in group_decodes(self._decodes, window, self.native.block_size, share=self._share):
            if group.shared:
                tasks.append(_Task(group.rows, self._starts[id(group.chunks[0])], 0, group.shared, -1, whole=False))
            for row, chunk in zip(group.rows, group.chunks, strict=True):
                end = chunk.start + 1
                low = group.shared if window is None else max(group.shared, end - window)
                tasks.append(_Task((row,), self._starts[id(chunk)], low, end, chunk.start, whole=not group.shared))
        return tasks


def _cut(tasks: list[_Task], heads: tuple[int, int], threads: int) -> list[_Task]:
    """Cut the keys of long tasks until there are enough items for the threads (flash decoding, Dao et al. 2023). `heads` are KV
    heads, and query heads of each."""
    wanted = _ITEMS_PER_THREAD * threads
    if threads < 2 or sum(task.items(heads) for task in tasks) >= wanted:
        return tasks
    share = max(sum(task.cost for task in tasks) // wanted, 1)
    cut: list[_Task] = []
    for task in tasks:
        keys = task.high - task.low
        pieces = min(keys // MIN_KEYS, -(-task.cost // share))
        if pieces < 2:
            cut.append(task)
            continue
        edges = [task.low + keys * i // pieces for i in range(pieces + 1)]
        cut += [
            _Task(task.rows, task.table, low, high, task.position, whole=False)
            for low, high in itertools.pairwise(edges)
        ]
    return cut
