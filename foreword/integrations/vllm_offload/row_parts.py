"""The bytes of a row of host memory that vLLM writes for a block.

A row has room for the largest KV cache group. What vLLM leaves alone has KV of the block that was there before, perhaps of
another tenant: under the new block's name no erasure would find it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from foreword.errors import ModelUnsupported


def unwritten_parts(offloading: Any, kv_cache_config: Any, row_bytes: int) -> dict[int, tuple[slice, ...]]:
    """By number of the group, the parts of its rows that vLLM does not write. A group that is not in it fills them.

    Args:
        offloading: vLLM's `OffloadingConfig`.
        kv_cache_config: the scheduler's; None if there is none.

    Raises:
        ModelUnsupported: they cannot be told.
    """
    groups, parallel = offloading.groups, offloading.parallel
    specs = [] if kv_cache_config is None else [one.kv_cache_spec for one in kv_cache_config.kv_cache_groups]
    if offloading.cache.blocks_per_chunk != 1 and not (len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)):
        raise ModelUnsupported(
            "with sliding windows or several KV cache groups vLLM fills rows of several blocks in part: remove block_size and "
            "blocks_per_chunk from kv_connector_extra_config"
        )
    if len(groups) == 1:
        return {}
    ranks = 1 if offloading.replicated_layout else parallel.world_size
    room = int(offloading.worker_kv_bytes_per_block)
    hisparse = getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None
    if kv_cache_config is None or hisparse or offloading.canonical_layout or parallel.pp_size != 1:
        raise _unknown("canonical_layout, HiSparse or pipeline parallelism")
    found = {}
    for one in groups:
        written = _written(one, specs[one.group_id], kv_cache_config.kv_cache_tensors, str(offloading.kv_cache_layout))
        parts = [(rank * room + low, rank * room + high) for rank in range(ranks) for low, high in written]
        edges = [(0, 0), *parts, (row_bytes, row_bytes)]
        found[int(one.group_id)] = tuple(slice(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0])
    return {number: parts for number, parts in found.items() if parts}


def _written(group: Any, spec: Any, tensors: Any, layout: str) -> list[tuple[int, int]]:
    """Start and end of what a rank writes for a block: its layers in order, each a page, whose end may be padding."""
    pages = [
        min(one.layer_stride, one.block_stride)
        for one in tensors
        if {*one.layers} <= {*group.layer_names}
        for _ in one.layers
    ]
    alike = {*pages} == {spec.page_size_bytes}
    if len(pages) != len(group.layer_names) or not layout.startswith(("LB", "BL") if alike else "BL"):
        raise _unknown(f"a KV cache of the layout {layout} with pages of these sizes")
    if not alike:
        return [(0, sum(pages))]
    return [(number * page, number * page + int(spec.real_page_size_bytes)) for number, page in enumerate(pages)]


def _unknown(what: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"this model has several KV cache groups: with {what} nothing says which bytes of a row are a block's"
    )
