"""Attention backend of compiled kernels: one call per layer, which reads K and V in place (kernels/attention.h).

A step's work is cut into tasks. A task is some tokens and the keys that they see; a task and one KV head are an item of
work for a thread. Prompts are cut into tiles; decoding sequences that share a prefix are one task; long runs of keys are cut,
between parts that the kernels add up in order anyway, where there would be too few items for the threads. No cut changes a bit.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, AttentionParams, QueryChunk
from foreword.engine.kernels import native
from foreword.engine.kernels.kernel_choice import AttentionChoice, attention_bucket
from foreword.engine.kernels.native import (
    TYPES,
    AttentionLayer,
    AttentionTasks,
    DecoderLayer,
    DecoderLayers,
    DecoderStep,
    Kernels,
    OutputLayer,
    layer_pointers,
)

# Query rows of a tile, for each KV head: enough that laying out a block of keys costs little beside using it.
TILE_ROWS = 192
# As in kernels/attention.h.
MAX_ROWS_OF_ALL_HEADS = 256
ALONE_AFTERWARDS, SHARED_KEYS = -2, 64
# Intermediate results of this many tokens have memory for all steps.
KEPT_TOKENS = 64
# Items of work per thread: with several, the threads finish at about the same time.
_ITEMS_PER_THREAD = 4


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """Rows of the step over keys `[low, high)` of the block table that begins at `table` (attention.h).

    `position` is that of the first row, -1 if every row sees all keys. If `cut`, other tasks have other keys of the rows, and
    their parts are added up afterwards. With `own` each row sees keys of its own from `high` on: where its block table begins,
    and the end of its keys.
    """

    rows: Sequence[int]
    table: int
    low: int
    high: int
    position: int
    cut: bool = False
    own: Sequence[tuple[int, int]] = ()

    @property
    def cost(self) -> int:
        return len(self.rows) * (self.high - self.low) + sum(end - self.high for _, end in self.own)


def _pack_tasks(
    tasks: Sequence[AttentionTask],
    tables: array[int],
    window: int | None,
    block_size: int,
    part_keys: int,
    part_floats: int,
) -> AttentionTasks:
    """The tasks in memory as the kernel reads them. Each part of a row's result, of `part_keys`, takes `part_floats`."""
    numbers: list[int] = []
    rows: list[int] = []
    # Each row's tasks: the first key of each, and the parts that it makes.
    parts_of_row: dict[int, list[tuple[int, range]]] = {}
    num_parts = 0
    for task in tasks:
        end = max([task.high, *(end for _, end in task.own)])
        first_part, parts = (num_parts, (end - 1) // part_keys - task.low // part_keys + 1) if task.cut else (-1, 0)
        numbers += (len(rows), len(task.rows), task.table, task.low, task.high, task.position, first_part, parts)
        rows += task.rows
        rows += itertools.chain.from_iterable(task.own)
        if task.cut:
            for row in task.rows:
                parts_of_row.setdefault(row, []).append((task.low, range(num_parts, num_parts + parts)))
                num_parts += parts
    merges: list[int] = []
    merged: list[int] = []
    for row, found in parts_of_row.items():
        begin = len(merged)
        for _, part_numbers in sorted(found, key=itemgetter(0)):
            merged += part_numbers
        merges += (row, begin, len(merged) - begin)
    arrays = [array("q", values) for values in (numbers, rows, merges, merged)] + [tables]
    results = torch.empty(num_parts * part_floats) if num_parts else None
    tasks_at, rows_at, merges_at, merged_at, tables_at = (values.buffer_info()[0] for values in arrays)
    packed = AttentionTasks(
        tasks=tasks_at,
        rows=rows_at,
        tables=tables_at,
        merges=merges_at,
        merged=merged_at,
        parts=None if results is None else results.data_ptr(),
        num_tasks=len(tasks),
        num_merges=len(parts_of_row),
        window=window or 0,
        block_size=block_size,
    )
    packed.memory = [*arrays, results]
    return packed


class DecoderMemory:
    """Memory for the intermediate results of a decoder layer, and where each begins."""

    NAMES = ("normed", "qkv", "attended", "between", "gate_up", "inner")

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.buffers = buffers
        self.addresses = {name: buffer.data_ptr() for name, buffer in zip(self.NAMES, buffers, strict=True)}


class CpuLayers:
    """A runner's paged tensors as the kernels see them. Without a `choice` they serve every layer that they support."""

    def __init__(
        self, kernels: Kernels, layers: Mapping[int, PagedLayer], choice: AttentionChoice | None = None
    ) -> None:
        self.kernels = kernels
        self._choice = choice or AttentionChoice({})
        self._layers = layers
        self._structs: dict[tuple[int, int], AttentionLayer] = {}
        self._decoders: dict[int, DecoderLayer] = {}
        self._pointers: dict[tuple[int, ...], DecoderLayers] = {}
        # By the widths of layers, for `KEPT_TOKENS`.
        self._kept: dict[tuple[int, ...], DecoderMemory] = {}

    def supports(self, layer: int, query: Tensor) -> bool:
        """Whether the kernels compute this dtype and head size: bfloat16 keys come in pairs."""
        keys = self._layers[layer].k
        if keys.dtype not in TYPES or query.dtype != keys.dtype:
            return False
        return keys.dtype != torch.bfloat16 or keys.shape[2] % 2 == 0

    def serves(self, layer: int, metadata: AttentionMetadata) -> bool:
        """Whether the kernels are chosen for this layer in this step."""
        return self._choice.compiled(layer, attention_bucket(*metadata.work))

    def layer(self, number: int, heads: int) -> AttentionLayer:
        """A layer with that many query heads; the caller sets its parameters."""
        struct = self._structs.get((number, heads))
        if struct is None:
            paged = self._layers[number]
            kv_heads, key_dim = paged.k.shape[1:]
            struct = self._structs[number, heads] = AttentionLayer(
                k=paged.k.data_ptr(),
                v=paged.v.data_ptr(),
                kv_heads=kv_heads,
                group=heads // kv_heads,
                key_dim=key_dim,
                value_dim=paged.v.shape[2],
            )
        return struct

    def decoder(self, number: int, heads: int, make: Callable[[AttentionLayer], DecoderLayer]) -> DecoderLayer:
        """The decoder layer over these paged tensors, made by the first call."""
        struct = self._decoders.get(number)
        if struct is None:
            struct = self._decoders[number] = make(self.layer(number, heads))
        return struct

    def decoders(self, numbers: tuple[int, ...], make: Callable[[], list[DecoderLayer]]) -> DecoderLayers:
        """Several decoder layers, made by the first call."""
        pointers = self._pointers.get(numbers)
        if pointers is None:
            pointers = self._pointers[numbers] = layer_pointers(make())
        return pointers

    def memory(self, decoder: DecoderLayer, x: Tensor) -> DecoderMemory:
        """Memory for the intermediate results of a layer over `x` `[1, T, hidden]`; the same for all layers of one size, and of
        few tokens for all steps."""
        tokens, hidden = x.shape[1:]
        widths = (
            hidden, decoder.qkv.outputs, decoder.output.inputs, hidden, decoder.gate_up.outputs, decoder.inner,
        )  # fmt: skip
        memory = self._kept.get(widths)
        if memory is None or tokens > KEPT_TOKENS:
            memory = DecoderMemory([x.new_empty(max(tokens, KEPT_TOKENS) * width) for width in widths])
            if tokens <= KEPT_TOKENS:
                self._kept[widths] = memory
        return memory

    def forget_decoder(self, number: int) -> None:
        """The next call of `decoder` makes the layer anew."""
        self._decoders.pop(number, None)
        self._pointers.clear()


class CpuAttention:
    """Attention of one step, and whole decoder layers, by the compiled kernels."""

    def __init__(self, metadata: AttentionMetadata, layers: CpuLayers) -> None:
        self.layers = layers
        self._metadata = metadata
        self._steps: dict[tuple[int, ...], DecoderStep] = {}
        self._tasks: dict[tuple[int | None, int, int, int], AttentionTasks] = {}
        self._slot_mapping = array("q", metadata.slot_mapping)
        # Where each chunk's block table begins in `_tables`.
        self._table_at: dict[QueryChunk, int] = {}
        self._tables = array("q")
        for chunk in (*metadata.prefills, *metadata.decodes):
            self._table_at[chunk] = len(self._tables)
            self._tables.extend(chunk.block_table)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The step's K and V into their slots."""
        key, value = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (key, value))
        struct = self.layers.layer(layer, key.shape[1])
        self.layers.kernels.write(struct, self._slot_mapping.buffer_info()[0], key, value)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attend as `StepAttention.attend`, after `write`."""
        struct = self.layers.layer(layer, query.shape[1])
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        struct.scale, struct.softcap = params.scale, params.softcap or 0.0
        struct.sinks = None if sinks is None else sinks.data_ptr()
        if query.stride(3) != 1:
            query = query.contiguous()
        out = query.new_empty(query.shape[2], query.shape[1], int(struct.value_dim))
        self.layers.kernels.attend(self.tasks(params.window, struct), struct, query, out)
        return out.unsqueeze(0)

    def prepare(self, decoder: DecoderLayer, qkv: Tensor, cosines: Tensor, sines: Tensor) -> None:
        """Norms and rotary embedding of the step's queries and keys, in place in `qkv` `[1, T, outputs]`; K and V go into
        their slots."""
        step = DecoderStep(
            slot_mapping=self._slot_mapping.buffer_info()[0],
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            qkv=qkv.data_ptr(),
            tokens=qkv.shape[1],
        )
        self.layers.kernels.prepare(qkv.dtype, decoder, step)

    def decode(
        self,
        decoders: DecoderLayers,
        x: Tensor,
        cosines: Tensor,
        sines: Tensor,
        window: int | None,
        last: OutputLayer | None = None,
    ) -> Tensor:
        """Whole decoder layers of the same sizes and window: `x` `[1, T, hidden]` to the same shape, with the output layer to
        logits `[1, T, vocab]`; K and V go into their slots."""
        decoder = decoders[0].contents
        widths = (decoder.hidden, decoder.qkv.outputs, decoder.output.inputs, decoder.gate_up.outputs)
        step = self._steps.get(widths)
        if step is None:
            memory = self.layers.memory(decoder, x)
            slots = self._slot_mapping.buffer_info()[0]
            step = self._steps[widths] = DecoderStep(slot_mapping=slots, tokens=x.shape[1], **memory.addresses)
            step.memory = memory
        out = torch.empty_like(x)
        step.tasks = ctypes.pointer(self.tasks(window, decoder.layer))
        step.cosines, step.sines = cosines.data_ptr(), sines.data_ptr()
        step.x, step.out, step.head, found = x.data_ptr(), out.data_ptr(), None, out
        if last is not None:
            step.last_norm, step.last_epsilon = last.norm.data_ptr(), last.epsilon
            step.head, found = ctypes.addressof(last.weight), x.new_empty(*x.shape[:2], last.weight.outputs)
            step.logits = found.data_ptr()
        self.layers.kernels.decode(x.dtype, decoders, step)
        return found

    def tasks(self, window: int | None, layer: AttentionLayer) -> AttentionTasks:
        """The tasks of all layers with this window and these heads."""
        key = (window, layer.kv_heads, layer.group, layer.value_dim)
        packed = self._tasks.get(key)
        if packed is None:
            kernels, threads = self.layers.kernels, native.threads()
            tasks = self._prefill_tasks(window, layer.group)
            tasks += self._decode_tasks(window, -(-threads // layer.kv_heads))
            tasks = _cut_keys(tasks, layer, threads, kernels.part_keys)
            # The longest first: the last items to be taken are short.
            tasks.sort(key=lambda task: -task.cost)
            part_floats = layer.kv_heads * layer.group * kernels.part_floats(layer.value_dim)
            size = self._metadata.block_size
            packed = _pack_tasks(tasks, self._tables, window, size, kernels.part_keys, part_floats)
            self._tasks[key] = packed
        return packed

    def _prefill_tasks(self, window: int | None, group: int) -> list[AttentionTask]:
        size = max(1, TILE_ROWS // group)
        tasks = []
        for chunk in self._metadata.prefills:
            for first in range(0, chunk.count, size):
                count = min(size, chunk.count - first)
                position = chunk.start + first
                low = 0 if window is None else max(0, position - window + 1)
                rows = range(chunk.row + first, chunk.row + first + count)
                tasks.append(AttentionTask(rows, self._table_at[chunk], low, position + count, position))
        return tasks

    def _decode_tasks(self, window: int | None, shares: int) -> list[AttentionTask]:
        """Each group of sequences with a common prefix is divided into `shares`, each of which reads the prefix once."""
        tasks = []
        for group in self._metadata.decode_groups(window):
            shared = group.shared // SHARED_KEYS * SHARED_KEYS
            size = -(-len(group.chunks) // shares) if shared else 1
            for chunks in (group.chunks[low : low + size] for low in range(0, len(group.chunks), size)):
                first = chunks[0]
                table = self._table_at[first]
                if len(chunks) > 1:
                    own = [(self._table_at[chunk], chunk.end) for chunk in chunks]
                    rows = [chunk.row for chunk in chunks]
                    tasks.append(AttentionTask(rows, table, 0, shared, ALONE_AFTERWARDS, own=own))
                else:
                    low = 0 if window is None else max(0, first.end - window)
                    tasks.append(AttentionTask((first.row,), table, low, first.end, first.start))
        return tasks


def _cut_keys(tasks: list[AttentionTask], layer: AttentionLayer, threads: int, part_keys: int) -> list[AttentionTask]:
    """Cut the keys of long tasks, between parts of `part_keys`, until there are enough items for the threads."""

    def items(task: AttentionTask) -> int:
        all_heads = len(task.rows) * layer.kv_heads * layer.group <= MAX_ROWS_OF_ALL_HEADS
        return 1 if all_heads else int(layer.kv_heads)

    wanted = _ITEMS_PER_THREAD * threads
    if threads < 2 or sum(map(items, tasks)) >= wanted:
        return tasks
    share = max(sum(task.cost for task in tasks) // wanted, 1)
    made: list[AttentionTask] = []
    for task in tasks:
        first, parts = task.low // part_keys, (task.high - 1) // part_keys - task.low // part_keys + 1
        pieces = min(parts, -(-task.cost // share))
        if pieces < 2:
            made.append(task)
            continue
        inner = [(first + parts * i // pieces) * part_keys for i in range(1, pieces)]
        position = -1 if task.own else task.position
        for low, high in itertools.pairwise([task.low, *inner]):
            made.append(AttentionTask(task.rows, task.table, low, high, position, cut=True))
        made.append(replace(task, low=inner[-1], cut=True))
    return made
