"""The KV cache that vLLM registers, as tensors whose rows are blocks.

vLLM 0.32 registers one tensor per layer, `[blocks, heads, states, content]`, in one allocation that all layers share. Its
KV cache layout (LBHNC, BLNHC and so on) orders the memory, so that the bytes of a block may be in a row, interleaved with other
layers' or apart by head. Earlier versions register lists of state tensors for recurrent layers, and `[2, blocks, ...]` (keys,
then values) for some attention backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from foreword.errors import ModelUnsupported


def block_views(kv_caches: Mapping[str, Any], layer_names: Sequence[str], num_blocks: int) -> list[Tensor]:
    """The KV of one group's layers as tensors `[num_blocks, ...]`, without copies.

    The bytes of block `i` are the rows `i` of all tensors. Each row is contiguous, but rows may lie apart. Layers that share
    their KV count once.

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
        for tensor in _tensors(name, kv_caches[name]):
            view = _by_block(name, tensor, num_blocks)
            found.setdefault((view.data_ptr(), view.shape, view.stride(), view.dtype), view)
    return [part for view in found.values() for part in _with_contiguous_rows(view)]


def _tensors(name: str, cache: Any) -> Iterator[Tensor]:
    """The tensors of a layer: one, or a list of states."""
    for one in cache if isinstance(cache, list | tuple) else (cache,):
        if not isinstance(one, Tensor):
            raise ModelUnsupported(f"vLLM's KV cache of the layer {name} is a {type(one).__name__}, not a tensor")
        yield one


def _by_block(name: str, tensor: Tensor, num_blocks: int) -> Tensor:
    """A view `[num_blocks, ...]`. Raises ModelUnsupported where it is not certain which dimension counts blocks."""
    shape = tensor.shape
    # Four dimensions are vLLM 0.32's `[blocks, ...]`. Five may be `[2, blocks, ...]` of an earlier version.
    candidates = [dim for dim in (0, 1) if dim < len(shape) and shape[dim] and shape[dim] % num_blocks == 0]
    if len(shape) != 5 or shape[0] != 2:
        candidates = [dim for dim in candidates if dim == 0]
    if len(candidates) != 1 or len(shape) < 2:
        raise ModelUnsupported(
            f"vLLM's KV cache of the layer {name} has the shape {list(shape)}; it is unclear which dimension counts the "
            f"{num_blocks} blocks"
        )
    rows = tensor.movedim(candidates[0], 0)
    return rows if len(rows) == num_blocks else rows.view(num_blocks, -1, *rows.shape[1:])


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
