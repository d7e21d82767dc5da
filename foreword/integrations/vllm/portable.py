"""vLLM's KV cache of one rank in the portable layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from foreword.blocks.portable import BlockUnits
from foreword.engine.kernels.units import copy_compiled
from foreword.errors import ModelUnsupported
from foreword.integrations.vllm.groups import ConnectorGroup
from foreword.integrations.vllm.packing import check_packing, cpu_planes, plain_planes
from foreword.offload.portable import UnitGroup

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
