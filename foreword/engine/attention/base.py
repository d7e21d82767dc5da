"""Paged attention for every model that goes through Transformers' attention interface. Model code is not touched.

All tokens of a step are packed into one row. For every layer `attend` first writes their K and V into the layer's paged
tensors and then lets each sequence attend to its own past: with the compiled kernels (attention_native.py), or with PyTorch's
operators (attention_torch.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from foreword.blocks.layout import LayerLayout
from foreword.engine.attention.cpu_backend import NativeAttention, NativeStep
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.torch_backend import TorchAttention
from foreword.engine.sequence import Chunk, Step

__all__ = ["NAME", "PagedLayer", "Recorder", "StepAttention", "active", "current"]

NAME = "foreword"


class StepAttention:
    """The attention of one step: made once, used by every layer. `on_written` is told of each layer that was written.

    `native` are the compiled kernels; without them, and for layers that they do not know, PyTorch's operators attend.
    """

    def __init__(
        self,
        step: Step,
        layers: dict[int, PagedLayer],
        block_size: int,
        device: torch.device,
        *,
        share: bool = True,
        on_written: Callable[[int], None] | None = None,
        native: NativeAttention | None = None,
    ) -> None:
        self._layers = layers
        self._block_size = block_size
        self._device = device
        self._share = share
        self._on_written = on_written
        self._native = native
        self._prefills: list[tuple[int, Chunk]] = []
        self._decodes: list[tuple[int, Chunk]] = []
        row = 0
        for chunk in step.chunks:
            (self._decodes if chunk.count == 1 else self._prefills).append((row, chunk))
            row += chunk.count
        self._slots = self._find_slots(step.chunks)

    def _find_slots(self, chunks: Sequence[Chunk]) -> list[int]:
        """The slot of each of the step's tokens, -1 for one whose K and V are there already."""
        size = self._block_size
        slots: list[int] = []
        for chunk in chunks:
            blocks = chunk.sequence.table.blocks
            for position in range(chunk.start, chunk.start + chunk.count):
                written = position >= chunk.write_from
                slots.append(blocks[position // size] * size + position % size if written else -1)
        return slots

    @cached_property
    def native(self) -> NativeStep | None:
        """The same step for the kernels."""
        if self._native is None:
            return None
        return NativeStep(self._native, self._prefills, self._decodes, self._slots, share=self._share)

    @cached_property
    def _torch(self) -> TorchAttention:
        any_layer = next(iter(self._layers.values()))
        return TorchAttention(
            self._prefills,
            self._decodes,
            self._block_size,
            self._device,
            share=self._share,
            batches=all(layer.k.shape[2] == layer.v.shape[2] for layer in self._layers.values()),
            dtype=any_layer.k.dtype,
        )

    @cached_property
    def _written(self) -> tuple[Tensor, Tensor | None]:
        """The slots that are written, and which rows of the step go there (None: all, in order)."""
        rows = [row for row, slot in enumerate(self._slots) if slot >= 0]
        slots = torch.tensor([self._slots[row] for row in rows], dtype=torch.long, device=self._device)
        if len(rows) == len(self._slots):
            return slots, None
        return slots, torch.tensor(rows, dtype=torch.long, device=self._device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """`query` `[1, heads, T, key_dim]`, `key`/`value` `[1, kv_heads, T, dim]` of the step's T packed tokens.

        Returns `[1, T, heads, value_dim]`.
        """
        paged = self._layers[layer]
        native = self.native
        if native is None or self._native is None or not self._native.takes(paged, query):
            self._write(paged, key, value)
            self.written(layer)
            return self._torch.attend(paged, query, key, value, scale, window, softcap, sinks)
        native.write(layer, query.shape[1], key, value)
        self.written(layer)
        return native.attend(layer, query, scale, window, softcap, sinks).unsqueeze(0)

    def written(self, layer: int) -> None:
        """The step's K and V of this layer are in the paged tensors."""
        if self._on_written is not None:
            self._on_written(layer)

    def _write(self, paged: PagedLayer, key: Tensor, value: Tensor) -> None:
        new_k, new_v = key[0].transpose(0, 1), value[0].transpose(0, 1)
        slots, rows = self._written
        if rows is not None:
            new_k, new_v = new_k[rows], new_v[rows]
        paged.k.index_copy_(0, slots, new_k)
        paged.v.index_copy_(0, slots, new_v)


class Recorder:
    """Stands in for `StepAttention` in one trial pass: notes layout and window of every layer that asks for attention."""

    def __init__(self) -> None:
        self.layouts: dict[int, LayerLayout] = {}
        self.dtype = torch.float32  # of K and V, the same in all layers
        self.windows: dict[int, int | None] = {}
        self.heads: dict[int, int] = {}
        self.scales: dict[int, float] = {}
        # Layers that do more than scale, mask and weigh.
        self.special: set[int] = set()

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        self.layouts[layer] = LayerLayout(key.shape[1], key.shape[3], value.shape[3])
        self.dtype = key.dtype
        self.windows[layer] = window
        self.heads[layer] = query.shape[1]
        self.scales[layer] = scale
        if softcap is not None or sinks is not None:
            self.special.add(layer)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _Current(threading.local):
    """Which attention the forward pass of this thread uses."""

    attention: StepAttention | Recorder | None = None


_current = _Current()


def current() -> StepAttention | Recorder | None:
    """The attention of the forward pass that this thread is in."""
    return _current.attention


class active:
    """`with active(step_attention): model(...)`. One forward pass at a time per thread: an engine's thread does them."""

    def __init__(self, attention: StepAttention | Recorder) -> None:
        self._attention = attention

    def __enter__(self) -> None:
        _current.attention = self._attention

    def __exit__(self, *_: object) -> None:
        _current.attention = None


def _interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    attention = _current.attention
    assert attention is not None, "a forward pass outside the engine's step"
    if attention_mask is not None:
        raise RuntimeError("the model brings an attention mask of its own, which paged attention does not apply")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention.attend(module.layer_idx, query, key, value, scale, sliding_window, softcap, s_aux), None


AttentionInterface.register(NAME, _interface)
