"""Paged attention behind Transformers' attention interface: the contract of the backends, and their choice.

Model code is not touched. All tokens of a step are packed into one row. For every layer the backend first writes their
K and V into the layer's paged tensors, then each sequence attends to its own past.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from foreword.blocks.layout import LayerLayout
from foreword.engine.attention.cpu_backend import CpuAttention, CpuLayers
from foreword.engine.attention.kv_tensors import PagedLayer
from foreword.engine.attention.metadata import AttentionMetadata, AttentionParams
from foreword.engine.attention.torch_backend import TorchAttention

# The name under which a model's `attn_implementation` selects this module.
NAME = "foreword"


class AttentionBackend(Protocol):
    """Attention of one step over paged tensors."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """K and V of the step's tokens, `[1, kv_heads, T, dim]`, into the slots of the metadata's slot mapping."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """`query` `[1, heads, T, key_dim]` to `[1, T, heads, value_dim]`, after `write`."""
        ...


class StepAttention:
    """The attention of one step: made once, used by every layer.

    `metadata` is that of each layer's KV group. `on_written` is called with each layer whose K and V are in the paged tensors.
    `cpu` are the layers as the compiled kernels see them. Without it, and where the kernels do not support a layer or are not
    chosen for it, `make_backend` makes the backend of a KV group: by default that of PyTorch's operators.
    """

    def __init__(
        self,
        metadata: Mapping[int, AttentionMetadata],
        layers: Mapping[int, PagedLayer],
        *,
        on_written: Callable[[int], None] | None = None,
        cpu: CpuLayers | None = None,
        make_backend: Callable[[AttentionMetadata], AttentionBackend] | None = None,
    ) -> None:
        self._metadata = metadata
        self._layers = layers
        self._on_written = on_written
        self._cpu_layers = cpu
        # By KV group.
        self._cpu: dict[AttentionMetadata, CpuAttention] = {}
        self._others: dict[AttentionMetadata, AttentionBackend] = {}
        self._make_backend = make_backend or (lambda metadata: TorchAttention(metadata, layers))

    def cpu(self, layer: int) -> CpuAttention | None:
        """The layer's backend of compiled kernels, where they are used."""
        if self._cpu_layers is None:
            return None
        metadata = self._metadata[layer]
        backend = self._cpu.get(metadata)
        if backend is None:
            backend = self._cpu[metadata] = CpuAttention(metadata, self._cpu_layers)
        return backend

    def decoding(self, layers: Sequence[int]) -> CpuAttention | None:
        """The backend of compiled kernels, if these layers are of one KV group, in a step without prompts that it serves."""
        metadata, cpu = self._metadata[layers[0]], self._cpu_layers
        if cpu is None or metadata.prefills or any(self._metadata[layer] is not metadata for layer in layers):
            return None
        return self.cpu(layers[0]) if cpu.serves(layers[0], metadata) else None

    def backend(self, layer: int, query: Tensor) -> AttentionBackend:
        """The backend of this layer in this step; `query` has the model's dtype."""
        metadata, cpu = self._metadata[layer], self._cpu_layers
        if cpu is not None and cpu.supports(layer, query) and cpu.serves(layer, metadata):
            backend = self.cpu(layer)
            assert backend is not None
            return backend
        if metadata not in self._others:
            self._others[metadata] = self._make_backend(metadata)
        return self._others[metadata]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write K and V of the step's T packed tokens, `[1, kv_heads, T, dim]`, and attend with `query`
        `[1, heads, T, key_dim]`. Returns `[1, T, heads, value_dim]`."""
        held = self._metadata[layer].window
        if held is not None and (params.window is None or params.window > held):
            raise RuntimeError(f"layer {layer} attends to more than the last {held} tokens, which is all that is kept")
        backend = self.backend(layer, query)
        backend.write(layer, key, value)
        self.notify_written(layer)
        return backend.attend(layer, query, key, value, params)

    def notify_written(self, layer: int) -> None:
        """The step's K and V of this layer are in the paged tensors."""
        if self._on_written is not None:
            self._on_written(layer)


class LayerRecorder:
    """Takes the place of `StepAttention` in one trial pass: records layout, query heads and parameters of every layer
    that calls for attention. `dtype` is that of K and V, the same in all layers."""

    def __init__(self) -> None:
        self.layouts: dict[int, LayerLayout] = {}
        self.dtype = torch.float32
        self.heads: dict[int, int] = {}
        self.params: dict[int, AttentionParams] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self.layouts[layer] = LayerLayout(key.shape[1], key.shape[3], value.shape[3])
        self.dtype = key.dtype
        self.heads[layer] = query.shape[1]
        self.params[layer] = params
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _ForwardContext(threading.local):
    attention: StepAttention | LayerRecorder | None = None


_context = _ForwardContext()


def current_attention() -> StepAttention | LayerRecorder | None:
    """The attention of this thread's forward pass; None outside `forward_context`."""
    return _context.attention


@contextmanager
def forward_context(attention: StepAttention | LayerRecorder) -> Iterator[None]:
    """Within, a model's forward pass on this thread uses this attention."""
    _context.attention = attention
    try:
        yield
    finally:
        _context.attention = None


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
    attention = _context.attention
    assert attention is not None, "a forward pass outside the engine's step"
    if attention_mask is not None:
        raise RuntimeError("the model passes an attention mask, which paged attention does not apply")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    params = AttentionParams(scale, sliding_window, softcap, s_aux)
    return attention.attend(module.layer_idx, query, key, value, params), None


AttentionInterface.register(NAME, _interface)
