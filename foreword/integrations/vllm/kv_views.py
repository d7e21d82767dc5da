"""The KV cache that vLLM registers, as tensors whose rows are blocks.

Both model runners of vLLM register one tensor per layer, `[blocks, heads, states, content]`, in one allocation that all layers
share. A recurrent layer's tensor is `[blocks, 1, 1, bytes]`. The KV cache layout (LBHNC, BLNHC and so on) orders the memory:
the bytes of a block may be in a row, interleaved with other layers' pages, or apart by head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from foreword.errors import ModelUnsupported


def block_views(kv_caches: Mapping[str, Any], layer_names: Sequence[str], num_blocks: int) -> list[Tensor]:
    """The KV of one group's layers as tensors `[num_blocks, ...]`, without copies.

    The bytes of block `i` are the rows `i` of all tensors. Each row is contiguous, but rows may lie apart. Layers that share
    their KV count once. Padding of a page is not included.

    Args:
        kv_caches: what vLLM registered, by layer name.
        num_blocks: blocks of vLLM's KV cache manager. Attention kernels may use smaller blocks; a block is then several rows of
            what vLLM registered.

    Raises ModelUnsupported for an arrangement that is not known.
    """
    found: dict[tuple[object, ...], Tensor] = {}
    for name in layer_names:
        if name not in kv_caches:
            raise ModelUnsupported(f"vLLM registered no KV cache for the layer {name}")
        view = _by_block(name, kv_caches[name], num_blocks)
        found.setdefault((view.data_ptr(), view.shape, view.stride()), view)
    return [part for view in found.values() for part in _with_contiguous_rows(view)]


def _by_block(name: str, cache: Any, num_blocks: int) -> Tensor:
    """A view `[num_blocks, ...]` of a layer's tensor. Raises ModelUnsupported for another shape than vLLM documents."""
    if not isinstance(cache, Tensor):
        raise ModelUnsupported(f"vLLM's KV cache of the layer {name} is a {type(cache).__name__}, not a tensor")
    if cache.dim() != 4 or not len(cache) or len(cache) % num_blocks:
        raise ModelUnsupported(
            f"vLLM's KV cache of the layer {name} has the shape {list(cache.shape)}, not [blocks, heads, states, content] "
            f"with {num_blocks} blocks"
        )
    return cache if len(cache) == num_blocks else cache.view(num_blocks, -1, *cache.shape[1:])


def _with_contiguous_rows(view: Tensor) -> Iterator[Tensor]:
    """Views `[num_blocks, ...]` that together have the same bytes, each with contiguous rows: in the order of the memory, and
    divided where the parts of a block lie apart (by head in layouts such as LHBNC)."""
    inner = sorted((dim for dim in range(1, view.dim()) if view.shape[dim] > 1), key=view.stride, reverse=True)
    singles = [dim for dim in range(1, view.dim()) if view.shape[dim] == 1]
    ordered = view.permute(0, *singles, *inner)
    if ordered[0].is_contiguous():
        yield ordered
    elif view.stride(inner[-1]) != 1:
        raise ModelUnsupported(
            f"vLLM's blocks lie in single elements: shape {list(view.shape)}, strides {view.stride()}"
        )
    else:
        for part in ordered.unbind(1 + len(singles)):
            yield from _with_contiguous_rows(part)
