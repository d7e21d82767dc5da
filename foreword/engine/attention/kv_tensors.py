"""The paged KV tensors of a layer: K and V in blocks, token-major."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foreword.blocks.layout import LayerLayout


def pinned(numbers: Sequence[Any] | array[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers in host memory from which a copy to the device can be queued without waiting for it. PyTorch does not use
    the memory again before the copy has ended."""
    host = torch.tensor(numbers, dtype=dtype)
    return host.pin_memory() if device.type == "cuda" else host


class PagedLayer:
    """K and V of one layer for all blocks, token-major: slot `block * block_size + offset` is row `slot`.

    `k` and `v` are `[slots, kv_heads, dim]`. `k_heads` and `v_heads` are the same memory as
    `[1, kv_heads, slots, dim]`, `k_blocks` and `v_blocks` as `[num_blocks, block_size, kv_heads, dim]`.
    """

    __slots__ = ("k", "k_blocks", "k_heads", "v", "v_blocks", "v_heads")

    def __init__(
        self, layout: LayerLayout, dtype: torch.dtype, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        heads = (num_blocks, block_size, layout.kv_heads)
        self.k_blocks = torch.empty(*heads, layout.key_dim, dtype=dtype, device=device)
        self.v_blocks = torch.empty(*heads, layout.value_dim, dtype=dtype, device=device)
        self.k = self.k_blocks.flatten(0, 1)
        self.v = self.v_blocks.flatten(0, 1)
        self.k_heads = self.k.transpose(0, 1).unsqueeze(0)
        self.v_heads = self.v.transpose(0, 1).unsqueeze(0)
