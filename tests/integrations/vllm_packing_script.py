"""Runs in an environment with vLLM: lets its CPU kernels write K and V, and moves them through frames of the portable layout.

    python vllm_packing_script.py '{"packings": [...], "dtypes": [...], "block_sizes": [...], "head_sizes": [...]}'

Prints how many moves there were, and those that differ from what the kernels write in the place themselves.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from foreword.integrations.vllm_extras.packing import check_packing, cpu_planes
from foreword.offload.frame_copies import copy_compiled, copy_with_views
from foreword.offload.staging import StagingArena
from foreword.offload.unit_group import UnitGroup
from foreword.store.frame import HEADER_BYTES

TOKENS, HEADS, UNIT, HEAD_UNITS = 256, 4, 16, 2


def written(keys: torch.Tensor, values: torch.Tensor, packing: str, block_size: int) -> torch.Tensor:
    """A layer's KV cache `[blocks, heads, tokens, 2 * dim]` into which vLLM's kernel has written all tokens."""
    from vllm import _custom_ops as ops

    head_size = keys.shape[2]
    cache = torch.zeros(TOKENS // block_size, HEADS, block_size, 2 * head_size, dtype=keys.dtype)
    planes = cache.view(TOKENS // block_size, HEADS, 2 * block_size, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *planes, torch.arange(TOKENS), packing)
    return cache


def usable(packing: str, dtype: torch.dtype, block_size: int, head_size: int) -> bool:
    """Whether vLLM uses the packing for that, and its kernel for this processor does."""
    if packing == "amx" and (dtype is torch.float32 or block_size % 32 or head_size % 32):
        return False
    try:
        written(*torch.zeros(2, TOKENS, HEADS, head_size, dtype=dtype), packing, block_size)
    except RuntimeError:
        return False
    return True


def payloads(keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
    """Payloads that the frames of all units must have."""
    found = []
    for first, head in itertools.product(range(0, TOKENS, UNIT), range(0, HEADS, HEADS // HEAD_UNITS)):
        part = [one[first : first + UNIT, head : head + HEADS // HEAD_UNITS].contiguous() for one in (keys, values)]
        found.append(b"".join(one.view(torch.uint8).numpy().tobytes() for one in part))
    return found


def check(job: dict[str, Any], dtype: torch.dtype, head_size: int) -> tuple[int, list[str]]:
    """Move from every packing and block size to every other."""
    draw = torch.Generator().manual_seed(head_size)
    keys, values = (torch.randn(TOKENS, HEADS, head_size, generator=draw).to(dtype) for _ in range(2))
    expected = payloads(keys, values)
    sizes = [
        one
        for one in itertools.product(job["packings"], job["block_sizes"])
        if usable(one[0], dtype, one[1], head_size)
    ]
    caches = {size: written(keys, values, *size) for size in sizes}
    units = list(range(len(expected)))
    moves, different = 0, []
    for (packing, size), make_copy in itertools.product(sizes, (copy_with_views, copy_compiled)):
        check_packing(packing, dtype, size, head_size)
        group = UnitGroup(cpu_planes(caches[packing, size], packing, head_size), UNIT, HEAD_UNITS, make_copy)
        arena = StagingArena([group], len(units))
        arena.gather(units, units)
        if [bytes(arena.buffer(unit)[:-HEADER_BYTES]) for unit in units] != expected:
            different.append(f"frames of {packing} {dtype} {size} {head_size}")
        for other, other_size in sizes:
            target = torch.zeros_like(caches[other, other_size])
            group = UnitGroup(cpu_planes(target, other, head_size), UNIT, HEAD_UNITS, make_copy)
            reader = StagingArena([group], len(units))
            for unit in units:
                reader.buffer(unit)[:] = arena.buffer(unit)
            reader.scatter(units, units)
            moves += 1
            if not torch.equal(target.view(torch.uint8), caches[other, other_size].view(torch.uint8)):
                different.append(f"{packing} {size} to {other} {other_size}, {dtype}, {head_size}")
    return moves, different


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    moves, different = 0, []
    for name, head_size in itertools.product(job["dtypes"], job["head_sizes"]):
        count, wrong = check(job, getattr(torch, name), head_size)
        moves += count
        different += wrong
    print("\n" + json.dumps({"moves": moves, "different": different}), flush=True)


if __name__ == "__main__":
    main()
