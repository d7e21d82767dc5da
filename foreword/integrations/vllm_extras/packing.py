"""vLLM's KV cache of one rank in the portable layout: how its attention kernels arrange K and V in a layer, as packed views.

vLLM 0.32 registers `[rows, heads, tokens, key_dim + value_dim]` per layer. Most backends keep K in the first elements of the
last dimension and V in the rest. The CPU backend registers the same shape, but each head of a row has a plane with K, then one
with V, and each plane is arranged for the instruction set (`_get_attn_isa`). With `e` elements per word of 32 bits:

    packing        K                              V
    vec, vec16     [dim][token]                   [token][dim]
    amx            [token/16][dim/e][16][e]       [dim/16][token/e][16][e]

`check_packing` compares a packing with what vLLM's own kernel writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foreword.blocks.layout import BlockUnits
from foreword.errors import ModelUnsupported
from foreword.offload.frame_copies import copy_compiled
from foreword.offload.unit_group import UnitGroup

if TYPE_CHECKING:
    from foreword.integrations.vllm.groups import ConnectorGroup

# Backends that keep K and V of a token side by side, unpacked.
_PLAIN = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASHINFER")


def unit_group(kv_caches: Mapping[str, Any], config: Any, group: ConnectorGroup, units: BlockUnits) -> UnitGroup:
    """A group's layers for a staging arena of portable units. Raises ModelUnsupported for a packing that is not known."""
    planes: list[Tensor] = []
    for name, spec in zip(group.layer_names, group.specs, strict=True):
        cache = kv_caches.get(name)
        if not isinstance(cache, Tensor):
            raise ModelUnsupported(f"vLLM's KV cache of the layer {name} is not a tensor")
        planes += _planes(name, cache, spec, config)
    return UnitGroup(planes, units.tokens, len(units.layouts), copy_compiled)


def _planes(name: str, cache: Tensor, spec: Any, config: Any) -> list[Tensor]:
    """K and V of a layer, or its latent KV."""
    if getattr(spec, "state_content_bytes", None) is not None or getattr(spec, "num_head_slots", None) is not None:
        raise ModelUnsupported(
            f"vLLM packs the KV cache of the layer {name} in a way that the portable layout cannot describe"
        )
    if not spec.head_size_v:
        return plain_planes(cache if cache.dim() == 4 else cache[:, None], spec.head_size, 0)
    backend = _backend(name, config)
    if backend == "CPU_ATTN":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        tokens = cache.shape[-2]
        packing = _get_attn_isa(spec.dtype, tokens, spec.head_size)
        check_packing(packing, spec.dtype, tokens, spec.head_size)
        return cpu_planes(cache, packing, spec.head_size)
    if backend not in _PLAIN:
        raise ModelUnsupported(
            f"the portable layout does not know how the attention backend {backend} arranges K and V"
        )
    return plain_planes(cache, spec.head_size, spec.head_size_v)


def _backend(name: str, config: Any) -> str:
    """The name of a layer's attention backend."""
    layer = config.compilation_config.static_forward_context.get(name)
    if layer is None:
        raise ModelUnsupported(f"vLLM does not say which attention backend the layer {name} has")
    return str(layer.get_attn_backend().get_name())


_TILE = 16
_WORD_BYTES = 4
# vLLM uses its AMX kernel for head sizes that are multiples of this.
_AMX_DIM = 32


def plain_planes(cache: Tensor, key_dim: int, value_dim: int) -> list[Tensor]:
    """K and V of a layer whose cache `[rows, heads, tokens, key_dim + value_dim]` is not packed, as views
    `[rows, tokens, 1, heads, dim, 1]`. Without values (MLA) K alone.

    Raises ModelUnsupported for another shape.
    """
    if cache.dim() != 4 or cache.shape[3] != key_dim + value_dim:
        raise ModelUnsupported(
            f"a KV cache of shape {list(cache.shape)} has no keys of {key_dim} and values of {value_dim}"
        )
    parts = [cache[..., :key_dim], cache[..., key_dim:]][: 2 if value_dim else 1]
    return [part.transpose(1, 2)[:, :, None, :, :, None] for part in parts]


def cpu_planes(cache: Tensor, packing: str, head_size: int) -> list[Tensor]:
    """K and V of a layer of vLLM's CPU backend, `[rows, heads, tokens, 2 * head_size]`, as packed views
    `[rows, t1, t2, heads, d1, d2]`.

    Raises ModelUnsupported for a packing that is not known, and another shape.
    """
    if cache.dim() != 4 or cache.shape[3] != 2 * head_size or not cache[0, 0].is_contiguous():
        raise ModelUnsupported(f"a KV cache of shape {list(cache.shape)} is not one of vLLM's CPU backend")
    rows, heads, tokens, _ = cache.shape
    keys, values = cache.view(rows, heads, 2, tokens * head_size).unbind(2)
    if packing in ("vec", "vec16"):
        return [
            keys.view(rows, heads, 1, head_size, 1, tokens).permute(0, 5, 4, 1, 3, 2),
            values.view(rows, heads, tokens, 1, head_size, 1).permute(0, 2, 3, 1, 4, 5),
        ]
    e = _WORD_BYTES // cache.element_size()
    if packing != "amx" or not e or tokens % _TILE or head_size % _AMX_DIM:
        raise ModelUnsupported(
            f"the portable layout does not support vLLM's CPU attention {packing!r} with {cache.dtype}, {tokens} tokens and "
            f"a head size of {head_size}"
        )
    return [
        keys.view(rows, heads, tokens // _TILE, head_size // e, _TILE, e).permute(0, 2, 4, 1, 3, 5),
        values.view(rows, heads, head_size // _TILE, tokens // e, _TILE, e).permute(0, 3, 5, 1, 2, 4),
    ]


def check_packing(packing: str, dtype: torch.dtype, tokens: int, head_size: int) -> None:
    """Let vLLM's kernel write a block, and compare it with the packing. Raises ModelUnsupported if they differ."""
    from vllm import _custom_ops as ops

    generator = torch.Generator().manual_seed(0)
    written: list[Any] = [torch.randn(tokens, 1, head_size, generator=generator).to(dtype) for _ in range(2)]
    cache = torch.zeros(1, 1, tokens, 2 * head_size, dtype=dtype)
    keys, values = cache.view(1, 1, 2 * tokens, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(*written, keys, values, torch.arange(tokens), packing)
    for plane, expected in zip(cpu_planes(cache, packing, head_size), written, strict=True):
        if not torch.equal(plane.reshape(tokens, 1, head_size), expected):
            raise ModelUnsupported(
                f"this version of vLLM packs K and V in another way ({packing}, {dtype}, head size {head_size}); the portable "
                "layout cannot be used"
            )
