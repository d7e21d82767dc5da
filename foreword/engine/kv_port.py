"""The paged tensors as a transfer sees them: parts of blocks and layers as bytes, in the order of `transfer.parts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from foreword.blocks.layout import Layout
from foreword.paged import Paged, tensors_of
from foreword.transfer.messages import Buffer, Part


class KVPort:
    """Reads parts out of paged tensors and writes parts into them. Threads may call at once, for different blocks.

    Args:
        layers: of the engine, `[num_blocks, block_size, kv_heads, dim]` each.
        layout: what they look like to others; its order is `tokens`.
    """

    def __init__(self, layers: Mapping[int, Paged], layout: Layout) -> None:
        self.layout = layout
        self.position = {layer: number for number, layer in enumerate(sorted(layers))}
        self._size = layout.block_size
        # One row per token, as bytes.
        self._rows = [tensor.flatten(0, 1).flatten(1).view(torch.uint8) for tensor in tensors_of(layers)]
        self._device = self._rows[0].device
        self._host = [cast(Any, rows.numpy()) for rows in self._rows] if self._device.type == "cpu" else []
        self._views = [memoryview(rows.reshape(-1)).cast("B") for rows in self._host]
        self._widths = [rows.shape[1] for rows in self._rows]
        self._stream: Any = None

    @property
    def last_layer(self) -> int:
        return len(self.position) - 1

    def mark(self) -> Any:
        """Remembers what the device has been told so far; None where it does everything at once. For `settle`."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # pragma: no cover - needs a GPU
        event.record()  # pragma: no cover - needs a GPU
        return event  # pragma: no cover - needs a GPU

    def read(self, part: Part, blocks: Sequence[int], mark: Any = None) -> list[Buffer]:
        """A part's payload, of `blocks` from `part.first_block` on. On a CPU these are views: the blocks must not change until
        they were sent. What was written before `mark` is in it."""
        if self._device.type != "cpu":
            return self._read_device(part, blocks, mark)  # pragma: no cover - needs a GPU
        runs = list(_runs(blocks, part.tokens, self._size))
        buffers: list[Buffer] = []
        for number in self._tensors(part):
            view, width = self._views[number], self._widths[number]
            buffers += [view[slot * width : (slot + count) * width] for slot, count in runs]
        return buffers

    def write(self, part: Part, blocks: Sequence[int], payload: memoryview) -> None:
        """Copy a part's payload into `blocks`. When it returns, they hold it."""
        data = np.frombuffer(payload, np.uint8)
        runs = list(_runs(blocks, part.tokens, self._size))
        at = 0
        for number in self._tensors(part):
            width = self._widths[number]
            for slot, count in runs:
                piece = data[at : at + count * width].reshape(count, width)
                at += count * width
                if self._device.type == "cpu":
                    self._host[number][slot : slot + count] = piece
                else:  # pragma: no cover - needs a GPU
                    self._rows[number][slot : slot + count].copy_(torch.from_numpy(piece.copy()))
        if self._device.type != "cpu":  # pragma: no cover - needs a GPU
            torch.cuda.current_stream(self._device).synchronize()

    def _tensors(self, part: Part) -> range:
        return range(2 * part.first_layer, 2 * (part.first_layer + part.layers))

    def _read_device(self, part: Part, blocks: Sequence[int], mark: Any) -> list[Buffer]:  # pragma: no cover - GPU
        """A copy in host memory, made beside the engine's own work."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            slots = [
                slot for start, count in _runs(blocks, part.tokens, self._size) for slot in range(start, start + count)
            ]
            index = torch.tensor(slots, device=self._device)
            copies: list[Tensor] = [self._rows[number].index_select(0, index).cpu() for number in self._tensors(part)]
            self._stream.synchronize()
        return [memoryview(cast(Any, copy.reshape(-1).numpy())).cast("B") for copy in copies]


def _runs(blocks: Sequence[int], tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """`(first slot, slots)` of the stretches in which blocks lie in a row, `tokens` slots together."""
    start = 0
    for end in range(1, len(blocks) + 1):
        if end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
            continue
        yield blocks[start] * size, min(end * size, tokens) - start * size
        start = end
