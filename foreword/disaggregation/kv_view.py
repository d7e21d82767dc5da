"""The KV tensors as a transfer sees them: parts of blocks and layers as bytes, in the order of `transfer.parts`.

On a CPU a part is a view of the tensors. On another device it is copied through page-locked host memory, on streams of the
calling thread, beside the engine's work. A *mark* orders the two: an event on the engine's stream, recorded by the engine's
thread. A read sees what was written before its mark. A write goes into blocks that the engine last used before its mark.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from foreword.blocks.layout import Layout
from foreword.blocks.runs import consecutive_runs
from foreword.engine.paged_layers import PagedTensors, tensors_of
from foreword.offload.device import CudaQueues, Event, Queues, Stream, follow_stream
from foreword.transfer.wire_format import Buffer, KVPart


class KVView:
    """Reads parts of the KV tensors and writes parts into them. Thread-safe for different blocks.

    Args:
        layers: of the engine, `[num_blocks, block_size, kv_heads, dim]` each.
        layout: as other instances see them; its order is `tokens`.
        queues: makes the device's streams for the thread that calls it, if KV is to be copied; by default those of CUDA.
    """

    def __init__(
        self, layers: Mapping[int, PagedTensors], layout: Layout, queues: Callable[[], Queues] | None = None
    ) -> None:
        self.layout = layout
        self.position = {layer: number for number, layer in enumerate(sorted(layers))}
        self._size = layout.block_size
        # One row per token, as bytes.
        rows = [tensor.flatten(0, 1).flatten(1).view(torch.uint8) for tensor in tensors_of(layers)]
        self._widths = [tensor.shape[1] for tensor in rows]
        on_host = rows[0].device.type == "cpu" and queues is None
        self._copies = None if on_host else DeviceRows(rows, queues or partial(CudaQueues, rows[0].device))
        self._host = [cast(Any, tensor.numpy()) for tensor in rows] if on_host else []
        self._views = [memoryview(tensor.reshape(-1)).cast("B") for tensor in self._host]

    @property
    def last_layer(self) -> int:
        return len(self.position) - 1

    def mark(self) -> Any:
        """The work queued on the device so far, for `read` and `write`; None on a CPU. On the engine's thread."""
        return None if self._copies is None else self._copies.mark()

    def read(self, part: KVPart, blocks: Sequence[int], mark: Any = None) -> list[Buffer]:
        """A part's payload, of `blocks` from `part.first_block` on. On a CPU these are views: the blocks must not change until
        they were sent. Without a `mark`, all work queued by now counts."""
        runs = _slot_runs(blocks, part.tokens, self._size)
        if self._copies is not None:
            return [self._copies.read(self._tensors(part), _slots(runs), mark)]
        buffers: list[Buffer] = []
        for number in self._tensors(part):
            view, width = self._views[number], self._widths[number]
            buffers += [view[slot * width : (slot + count) * width] for slot, count in runs]
        return buffers

    def write(self, part: KVPart, blocks: Sequence[int], payload: memoryview, mark: Any = None) -> None:
        """Copy a part's payload into `blocks`, after the work before `mark`. It is done when the call returns."""
        data = np.frombuffer(payload, np.uint8)
        runs = _slot_runs(blocks, part.tokens, self._size)
        if self._copies is not None:
            self._copies.write(self._tensors(part), _slots(runs), data, mark)
            return
        at = 0
        for number in self._tensors(part):
            width = self._widths[number]
            for slot, count in runs:
                self._host[number][slot : slot + count] = data[at : at + count * width].reshape(count, width)
                at += count * width

    def _tensors(self, part: KVPart) -> range:
        return range(2 * part.first_layer, 2 * (part.first_layer + part.layers))


class DeviceRows:
    """Copies rows of device tensors to and from host memory, on streams per thread.

    Args:
        rows: `[slots, bytes]` uint8, on one device.
        queues: makes the device's streams, for the thread that calls it.
    """

    def __init__(self, rows: Sequence[Tensor], queues: Callable[[], Queues]) -> None:
        self._rows = rows
        self._widths = [tensor.shape[1] for tensor in rows]
        self._device = rows[0].device
        self._pin = self._device.type == "cuda"
        self._make_queues = queues
        self._local = threading.local()

    def mark(self) -> Event:
        """The work that the calling thread has queued, on the stream on which it computes."""
        follow_stream(self._device)
        return self._queues().record(Stream.COMPUTE)

    @torch.inference_mode()
    def read(self, tensors: Sequence[int], slots: Sequence[int], mark: Event | None) -> memoryview:
        """The rows `slots` of each of `tensors`, one tensor after the other, in new memory."""
        size = len(slots) * sum(self._widths[number] for number in tensors)
        # torch caches page-locked memory, and reuses it only when the copies out of it are done.
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

        def copy() -> None:
            at, index = 0, self._index(slots)
            for number in tensors:
                count = len(slots) * self._widths[number]
                found = self._rows[number].index_select(0, index).view(-1)
                host[at : at + count].copy_(found, non_blocking=True)
                at += count

        self._run(Stream.SAVE, copy, mark)
        return memoryview(cast(Any, host.numpy())).cast("B")

    @torch.inference_mode()
    def write(self, tensors: Sequence[int], slots: Sequence[int], data: Any, mark: Event | None) -> None:
        """Write rows; `data` is a uint8 array that may change when this returns."""
        # A copy from pageable memory would block this thread, and torch does not take the link's read-only memory.
        host = torch.empty(len(data), dtype=torch.uint8, pin_memory=self._pin)
        cast(Any, host.numpy())[:] = data

        def copy() -> None:
            at, index, staged = 0, self._index(slots), host.to(self._device, non_blocking=True)
            for number in tensors:
                width = self._widths[number]
                piece = staged[at : at + len(slots) * width].view(len(slots), width)
                self._rows[number].index_copy_(0, index, piece)
                at += len(slots) * width

        self._run(Stream.LOAD, copy, mark)

    def _index(self, slots: Sequence[int]) -> Tensor:
        index = torch.tensor(slots, dtype=torch.long, pin_memory=self._pin)
        return index.to(self._device, non_blocking=True)

    def _run(self, stream: Stream, copy: Callable[[], object], mark: Event | None) -> None:
        """Copy after `mark`. All that was queued is done at the end, also if `copy` raises. What it allocates belongs to this
        thread's stream, so no other stream gets it before."""
        queues = self._queues()
        queues.wait(stream, queues.record(Stream.COMPUTE) if mark is None else mark)
        try:
            queues.submit(stream, copy)
        finally:
            queues.record(stream).synchronize()

    def _queues(self) -> Queues:
        if not hasattr(self._local, "queues"):
            self._local.queues = self._make_queues()
        queues: Queues = self._local.queues
        return queues


def _slots(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [slot for start, count in runs for slot in range(start, start + count)]


def _slot_runs(blocks: Sequence[int], tokens: int, size: int) -> list[tuple[int, int]]:
    """`(first slot, slots)` of the runs of consecutive blocks, `tokens` slots together."""
    return [(blocks[low] * size, min(high * size, tokens) - low * size) for low, high in consecutive_runs(blocks)]
