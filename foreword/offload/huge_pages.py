"""Tensors on huge pages: reading weights and KV from memory then misses the processor's page table cache less often."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

_PAGE = 2 << 20


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros in the CPU's memory, `[*shape]`. Their pages are allocated at the first write.

    A tensor smaller than a huge page, or of a system without them, has ordinary pages.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    try:
        # A whole number of huge pages: the kernel aligns such a mapping.
        memory = mmap.mmap(-1, -(-size // _PAGE) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # torch's error says what is missing
        return torch.zeros(*shape, dtype=dtype)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(*shape)
