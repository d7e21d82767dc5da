"""Decode steps as CUDA graphs: one launch instead of some thousand small ones.

A graph repeats recorded kernels over the same memory. So a step's inputs are copied into fixed buffers, padded to the next
larger batch size for which there is a graph. Padded rows attend to nothing and write nothing. Larger batches have a second
graph, for steps whose sequences share a prefix: it has two more launches for each layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foreword.engine.attention.backend import StepAttention
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, pinned
from foreword.engine.attention.triton_backend import StepTensors, TritonAttention, pack_step, sharing_pays
from foreword.engine.kv_groups import GroupedLayers

log = logging.getLogger(__name__)

# Block numbers of a step's tables; steps with more run without a graph.
_MAX_TABLE_BLOCKS = 1 << 22
_LARGEST_BATCH = 512
# Smaller batches have no graph for steps with shared prefixes.
_MIN_SHARING = 4

# Logits of the rows `rows` of a step: `(input_ids [1, T], position_ids [1, T], rows, attention)` to `[len(rows), vocab]`.
Forward = Callable[[Tensor, Tensor, Tensor, StepAttention], Tensor]
# Records what a function does: returns a function that repeats it, and the function's result, which each call renews.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]


def batch_sizes(largest: int) -> list[int]:
    """The padded batch sizes up to the first that holds `largest` sequences."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, _LARGEST_BATCH + 1, 32)]
    return sizes[: next((i for i, size in enumerate(sizes) if size >= largest), len(sizes) - 1) + 1]


def capture_cuda_graph(
    run: Callable[[], Tensor], pool: Any
) -> tuple[Callable[[], object], Tensor]:  # pragma: no cover - needs a GPU
    """Record the function in a CUDA graph. It runs twice before: kernels are compiled and libraries take their memory."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads copy to and from the device meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        out = run()
    return graph.replay, out


def capture_in_one_pool() -> Capture:
    """Records CUDA graphs of one runner in one pool of memory: they never run at the same time, and their results are read
    before the next runs. A pool ends with its last graph, so a second runner of the process has another one."""
    pools: list[Any] = []

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:  # pragma: no cover - needs a GPU
        if not pools:
            pools.append(torch.cuda.graph_pool_handle())
        return capture_cuda_graph(run, pools[0])

    return capture


@dataclass(frozen=True, slots=True)
class _Graph:
    replay: Callable[[], object]
    logits: Tensor


class DecodeGraphs:
    """The graphs of one runner.

    Args:
        forward: the model's forward pass.
        num_blocks: of the pool.
        largest: the largest batch to be served.
        capture: records CUDA graphs, or something that repeats a function in another way.

    Attributes:
        sizes: batch sizes that have a graph, ascending.
    """

    def __init__(
        self,
        forward: Forward,
        layers: Mapping[int, PagedLayer],
        grouped: GroupedLayers,
        num_blocks: int,
        block_size: int,
        largest: int,
        *,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._layers = layers
        self._grouped = grouped
        self._block_size = block_size
        self._capture = capture
        self._device = next(iter(layers.values())).k.device
        self._wanted = batch_sizes(largest)
        most = self._wanted[-1]
        # Token ids, then positions.
        self._inputs = torch.zeros(2 * most, dtype=torch.long, device=self._device)
        tables = min(most * num_blocks, _MAX_TABLE_BLOCKS)
        numbers = StepTensors.numbers(most, tables)
        self._steps = [torch.zeros(numbers, dtype=torch.int32, device=self._device) for _ in grouped.groups]
        self._saving = sharing_pays(layers)
        # By batch size and whether a shared prefix is read once.
        self._graphs: dict[tuple[int, bool], _Graph] = {}

    @property
    def sizes(self) -> list[int]:
        return sorted(size for size, shares in self._graphs if not shares)

    @torch.inference_mode()
    def record(self) -> None:
        """Record the graphs, the largest first: smaller ones reuse its memory. A model that cannot be recorded, such as one
        whose forward pass depends on values, has none: the log says why."""
        empty = AttentionMetadata([], self._block_size)
        try:
            for size in reversed(self._wanted):
                self._fill([0] * (2 * size), [empty] * len(self._steps), size)
                for shares in (False, True)[: 1 + (size >= _MIN_SHARING)]:
                    run = partial(self._run, size, shares)
                    self._graphs[size, shares] = _Graph(*self._capture(run))
        except RuntimeError as error:
            self._graphs.clear()
            log.warning("decode steps run without CUDA graphs, slower: %s", str(error).strip().partition("\n")[0])

    def logits(
        self, tokens: Sequence[int], positions: Sequence[int], step: Sequence[AttentionMetadata]
    ) -> Tensor | None:
        """Logits `[sequences, vocab]` of a step in which each sequence has one token, valid until the next call. `step` has
        the metadata of each KV group. None if no graph is large enough."""
        size = next((size for size in self.sizes if size >= len(tokens)), None)
        if size is None:
            return None
        padding = [0] * (size - len(tokens))
        shares = self._fill([*tokens, *padding, *positions, *padding], step, size)
        if shares is None:
            return None
        graph = self._graphs.get((size, shares), self._graphs[size, False])
        graph.replay()
        return graph.logits[: len(tokens)]

    def _fill(self, inputs: Sequence[int], step: Sequence[AttentionMetadata], size: int) -> bool | None:
        """Copy a step into the buffers. Whether its sequences share a prefix; None if its tables are too long for them."""
        packed = [pack_step(metadata, self._saving, size) for metadata in step]
        arrays = [one.numbers for one in packed]
        if any(len(numbers) > len(buffer) for numbers, buffer in zip(arrays, self._steps, strict=True)):
            return None
        for numbers, buffer in ((inputs, self._inputs), *zip(arrays, self._steps, strict=True)):
            buffer[: len(numbers)].copy_(pinned(numbers, buffer.dtype, buffer.device), non_blocking=True)
        return any(one.shares for one in packed)

    def _run(self, size: int, shares: bool) -> Tensor:
        """The forward pass over the buffers."""
        metadata = {}
        backends = {}
        for layers, window, buffer in zip(self._grouped.groups, self._grouped.windows, self._steps, strict=True):
            of_group = AttentionMetadata([], self._block_size, window=window)
            tensors = StepTensors.view(buffer, size, size, self._block_size, shares)
            backends[of_group] = TritonAttention(tensors, self._layers)
            metadata.update(dict.fromkeys(layers, of_group))
        attention = StepAttention(metadata, self._layers, make_backend=backends.__getitem__)
        rows = torch.arange(size, device=self._device)
        return self._forward(self._inputs[None, :size], self._inputs[None, size : 2 * size], rows, attention)
