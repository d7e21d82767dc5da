"""The paged KV tensors of a layer: K and V in blocks, token-major."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from foreword.blocks.layout import LayerLayout
from foreword.offload import huge_pages


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
        self.k_blocks = _empty(*heads, layout.key_dim, dtype=dtype, device=device)
        self.v_blocks = _empty(*heads, layout.value_dim, dtype=dtype, device=device)
        self.k = self.k_blocks.flatten(0, 1)
        self.v = self.v_blocks.flatten(0, 1)
        self.k_heads = self.k.transpose(0, 1).unsqueeze(0)
        self.v_heads = self.v.transpose(0, 1).unsqueeze(0)


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return huge_pages.zeros(*shape, dtype=dtype)
    return torch.empty(*shape, dtype=dtype, device=device)


def block_distances(layers: Iterable[PagedLayer], found: Sequence[int], computed: Sequence[int]) -> Tensor:
    """How much blocks differ from others: float32 `[layers, 2, blocks]`, of keys and of values."""
    pairs = [(layer.k_blocks, layer.v_blocks) for layer in layers]
    return torch.stack([torch.stack([_distances(kv[found], kv[computed]) for kv in pair]) for pair in pairs])


def copy_block(layer: PagedLayer, block: int) -> tuple[Tensor, Tensor]:
    return layer.k_blocks[block].clone(), layer.v_blocks[block].clone()


def distances(layer: PagedLayer, blocks: Sequence[int], other: tuple[Tensor, Tensor]) -> Tensor:
    """How much K and V of one block, `[block_size, kv_heads, dim]` each, differ from blocks: float32 `[2, blocks]`."""
    if any(one.shape != kv.shape[1:] for one, kv in zip(other, (layer.k_blocks, layer.v_blocks), strict=True)):
        return torch.full((2, len(blocks)), torch.inf)
    return torch.stack(
        [_distances(one[None], kv[blocks]) for one, kv in zip(other, (layer.k_blocks, layer.v_blocks), strict=True)]
    )


def _distances(found: Tensor, computed: Tensor) -> Tensor:
    """`|found - computed| / |computed|` of each block; infinite if one has numbers that are not finite."""
    found, computed = found.flatten(1).float(), computed.flatten(1).float()
    difference = torch.linalg.vector_norm(found - computed, dim=1)
    size = torch.linalg.vector_norm(computed, dim=1).clamp(min=1e-20)
    return torch.nan_to_num(difference / size, nan=torch.inf)


def block_bytes(layers: Mapping[int, PagedLayer], block: int) -> bytes:
    """A block's KV in payload order: layer after layer, K before V."""
    parts = [kv[block] for _, layer in sorted(layers.items()) for kv in (layer.k_blocks, layer.v_blocks)]
    return b"".join(part.contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in parts)


def split_block(data: bytes, layers: Mapping[int, PagedLayer]) -> dict[int, tuple[Tensor, Tensor]]:
    """K and V of each layer from `block_bytes`. Raises ValueError if the length is another one."""
    tensors = {layer: (kv.k_blocks[0], kv.v_blocks[0]) for layer, kv in sorted(layers.items())}
    if len(data) != sum(one.nbytes for pair in tensors.values() for one in pair):
        raise ValueError(f"a block of {len(data)} bytes has another layout")
    rest = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    found: dict[int, list[Tensor]] = {}
    for layer, pair in tensors.items():
        for one in pair:
            found.setdefault(layer, []).append(rest[: one.nbytes].view(one.dtype).view(one.shape).to(one.device))
            rest = rest[one.nbytes :]
    return {layer: (pair[0], pair[1]) for layer, pair in found.items()}
