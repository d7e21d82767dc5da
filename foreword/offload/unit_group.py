"""Groups of paged tensors whose blocks are divided into units of the portable layout (`blocks/portable_units.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.errors import ModelUnsupported
from foreword.offload.frame_copies import PlaneGroup, UnitCopyMaker, UnitPlane, copy_with_views

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UnitGroup(PlaneGroup):
    """A group of paged tensors for a staging arena whose frames have units instead of blocks.

    Args:
        tensors: K and V of each layer in payload order, as packed views `[rows, t1, t2, heads, d1, d2]`.
        unit_tokens: tokens of a unit.
        head_units: head units in these tensors.
        make_copy: makes the function that copies; by default numpy's or, for a device, torch's.

    Raises ModelUnsupported for a packing that units would cut.
    """

    def __init__(
        self, tensors: Sequence[Tensor], unit_tokens: int, head_units: int, make_copy: UnitCopyMaker | None = None
    ) -> None:
        self._per_row, self._head_units = 0, head_units
        planes: list[UnitPlane] = []
        offset = 0
        for tensor in tensors:
            plane = self._plane(tensor, unit_tokens, offset)
            planes.append(plane)
            offset += plane.unit_bytes
        super().__init__(tensors[0].device, planes, (self._per_row, head_units), make_copy or copy_with_views)

    def _plane(self, tensor: Tensor, unit_tokens: int, offset: int) -> UnitPlane:
        _, t1, t2, heads, d1, d2 = tensor.shape
        per_row, cut = divmod(t1 * t2, unit_tokens)
        if cut or unit_tokens % t2 or heads % self._head_units or (self._per_row or per_row) != per_row or not per_row:
            raise ModelUnsupported(
                f"rows of {t1 * t2} tokens (packed by {t2}) and {heads} KV heads cannot be divided into units of {unit_tokens} "
                f"tokens and {self._head_units} head units"
            )
        self._per_row = per_row
        word = tensor.element_size()
        sizes = (unit_tokens // t2, t2, heads // self._head_units, d1, d2)
        row, *strides = (int(stride) * word for stride in tensor.stride())
        unit_strides = (row, sizes[0] * strides[0], sizes[2] * strides[2])
        dim = d1 * d2 * word
        frame_strides = (t2 * sizes[2] * dim, sizes[2] * dim, dim, d2 * word, word)
        start, axes = int(tensor.storage_offset()) * word, 5
        # Elements that lie side by side on both sides are one word.
        if strides[-1] == word and d2 * word in _WORDS:
            word, axes = word * d2, 4
        memory = torch.empty(0, dtype=_WORDS[word], device=tensor.device).set_(tensor.untyped_storage())
        return UnitPlane(memory, start, offset, unit_strides, sizes[:axes], tuple(strides[:axes]), frame_strides[:axes])
