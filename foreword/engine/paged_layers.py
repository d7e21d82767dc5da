"""Paged tensors of the engine's layers, as offload and transfer copy them: their order in a payload, the layout of a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from foreword.blocks.layout import LayerLayout, Layout


class PagedTensors(Protocol):
    """A layer's paged tensors, `[num_blocks, block_size, kv_heads, dim]`, contiguous."""

    @property
    def k_blocks(self) -> Tensor: ...
    @property
    def v_blocks(self) -> Tensor: ...


def layout_of(layers: Mapping[int, PagedTensors], model: bytes, loss: str = "") -> Layout:
    """The stored layout of a block of these layers."""
    ordered = [layers[number] for number in sorted(layers)]
    kind = ordered[0].k_blocks.dtype
    shapes = tuple(
        LayerLayout(layer.k_blocks.shape[2], layer.k_blocks.shape[3], layer.v_blocks.shape[3]) for layer in ordered
    )
    block_size = ordered[0].k_blocks.shape[1]
    return Layout(model, block_size, shapes, str(kind).removeprefix("torch."), loss=loss)


def tensors_of(layers: Mapping[int, PagedTensors]) -> list[Tensor]:
    """The paged tensors in payload order: layer after layer, K before V."""
    ordered = [layers[number] for number in sorted(layers)]
    return [tensor for layer in ordered for tensor in (layer.k_blocks, layer.v_blocks)]
