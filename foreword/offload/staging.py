"""The staging arena: copies between paged tensors on the device and frames in host memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from foreword.blocks.runs import consecutive_runs
from foreword.offload import huge_pages
from foreword.offload.device import DeviceCopies, Event, Plane, Queues
from foreword.offload.frame_copies import PlaneGroup, UnitPlane, copy_compiled
from foreword.store.background import PagePopulator
from foreword.store.base import Loan
from foreword.store.frame import HEADER_BYTES

_ALIGNMENT = 64
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class RowGroup(PlaneGroup):
    """Tensors `[num_blocks, ...]` whose rows are contiguous. A payload is the bytes of one block in all of them, in order."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device if tensors else torch.device("cpu")
        super().__init__(device, [_plane(*one) for one in _word_rows(tensors)], (1, 1), copy_compiled)


class StagingArena:
    """Preallocated host memory with slots for frames: the payload of one block, then a header.

    On a CPU, consecutive blocks that go to consecutive slots are copied together. Otherwise the memory is pinned (page-locked),
    and kernels copy (device.py). Several threads may copy at once, for different blocks and slots.

    Args:
        groups: the tensors of each group, `[num_blocks, ...]` each. Every row is contiguous, but rows may lie apart. A payload
            is the bytes of one block in the tensors of its group, in this order. Or a `PlaneGroup`, whose blocks may be units.
        slots: number of slots. Each holds a block of any group.
        queues: the device's streams, if kernels are to copy; by default those of a CUDA device.

    Attributes:
        block_bytes: bytes of a payload, by group.
        frame_bytes: bytes of the longest frame, header included.
    """

    def __init__(
        self, groups: Sequence[Sequence[Tensor] | PlaneGroup], slots: int, queues: Queues | None = None
    ) -> None:
        self._groups = [RowGroup(group) if isinstance(group, Sequence) else group for group in groups]
        self.device = next(group.device for group in self._groups if group.block_bytes)
        self.slots = slots
        self.block_bytes = tuple(group.block_bytes for group in self._groups)
        self.frame_bytes = HEADER_BYTES + max(self.block_bytes)
        stride = -(-self.frame_bytes // _ALIGNMENT) * _ALIGNMENT
        if self.device.type == "cpu":
            arena = huge_pages.zeros(slots, stride, dtype=torch.uint8)
            populator = PagePopulator(arena, arena.data_ptr(), arena.nbytes, "staging-pages")
            populator.extend(arena.nbytes)
            weakref.finalize(self, populator.stop)
        else:
            arena = torch.empty(slots, stride, dtype=torch.uint8, pin_memory=True)
        self._arena = arena
        self._bytes = memoryview(cast(Any, arena.numpy())).cast("B")
        self._stride = stride
        self._on_device: DeviceCopies | None = None
        if self.device.type == "cuda" or queues is not None:
            self._on_device = DeviceCopies(arena, self.planes(), self.device, queues)
        else:
            for group in self._groups:
                group.prepare()

    @property
    def queues(self) -> Queues | None:
        """The device's streams; None on a CPU."""
        return None if self._on_device is None else self._on_device.queues

    def planes(self) -> list[Sequence[Plane]]:
        """The planes of each group, for other copies."""
        return [group.planes() for group in self._groups]

    def use(self, make: Callable[[Tensor], DeviceCopies]) -> None:
        """Copy otherwise from now on: as what is made for the arena, bytes `[slots, stride]`, does."""
        self._on_device = make(self._arena)

    def allocate(self) -> int:
        """Take the device's memory for copies now, and not with the first. Returns its bytes."""
        return 0 if self._on_device is None else self._on_device.mirror().nbytes

    def places(self, group: int, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        """The coordinates of blocks of a group: int64 `[blocks, 3]`."""
        return self._groups[group].places(blocks)

    @property
    def copies_lent(self) -> bool:
        """Whether `scatter` reads the memory of stores: a device reads pinned memory only."""
        return self._on_device is None

    def buffer(self, slot: int) -> memoryview:
        """The memory of a slot, `frame_bytes` long, when what was gathered into it before is there."""
        if self._on_device is not None:
            self._on_device.wait(slot)
        start = slot * self._stride
        return self._bytes[start : start + self.frame_bytes]

    @torch.inference_mode()
    def gather(self, blocks: Sequence[int], slots: Sequence[int], group: int = 0) -> None:
        """Copy device blocks of a group into the payloads of slots. On return the blocks may be overwritten by work that is
        queued after; `buffer` returns a slot when the copy is complete."""
        if self._on_device is not None:
            self._on_device.save(group, self.places(group, blocks), slots)
        else:
            for block, slot, count in _runs(blocks, slots):
                self._groups[group].copy(self._arena, block, slot, count, into_frames=True)

    def mark(self) -> Event | None:
        """The work that the engine has queued on the device, for `start_scatter`; None on a CPU. On the engine's thread."""
        return None if self._on_device is None else self._on_device.mark()

    @torch.inference_mode()
    def start_scatter(
        self,
        slots: Sequence[int],
        blocks: Sequence[int],
        group: int = 0,
        *,
        mark: Event | None = None,
        lent: Loan | None = None,
        until: float = math.inf,
    ) -> None:
        """Copy the payloads of slots into device blocks of a group. On a device the copy is queued, behind the work before
        `mark` and what this thread has queued: until `scattered` was waited for, the slots must not change.

        Args:
            mark: the engine's work up to when it handed the blocks over, for the first copy into some of them.
            lent: a store's memory, whose slots are meant; on a CPU (`copies_lent`). By default those of this arena.
            until: StoreTimeout is raised if others have all memory for copies until then.
        """
        if self._on_device is not None:
            self._on_device.load(group, slots, self.places(group, blocks), mark, until)
            return
        arena = self._arena if lent is None else torch.frombuffer(lent.memory, dtype=torch.uint8).view(-1, lent.stride)
        for block, slot, count in _runs(blocks, slots):
            self._groups[group].copy(arena, block, slot, count, into_frames=False)

    def scattered(self) -> Event | None:
        """The end of what this thread has begun to scatter; None on a CPU, where it is complete."""
        return None if self._on_device is None else self._on_device.loaded()

    def scatter(self, slots: Sequence[int], blocks: Sequence[int], group: int = 0, lent: Loan | None = None) -> None:
        """Scatter behind all work that is queued on the device. The copy is complete on return."""
        self.start_scatter(slots, blocks, group, mark=self.mark(), lent=lent)
        copied = self.scattered()
        if copied is not None:
            copied.synchronize()


def _word_rows(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """The tensors as `[num_blocks, words]`, in the widest words that sizes and strides allow, and where their bytes begin in a
    payload. The views share the tensors' memory."""
    offset = 0
    for rows in _joined([_byte_rows(tensor) for tensor in tensors]):
        size = rows.shape[1]
        aligned = math.gcd(size, offset, rows.stride(0), rows.storage_offset(), rows.data_ptr())
        kind = next(kind for width, kind in _WORDS if aligned % width == 0)
        yield rows.view(kind), offset
        offset += size


def _plane(rows: Tensor, offset: int) -> UnitPlane:
    word = rows.element_size()
    memory = torch.empty(0, dtype=rows.dtype, device=rows.device).set_(rows.untyped_storage())
    start, strides = int(rows.storage_offset()) * word, (int(rows.stride(0)) * word, 0, 0)
    return UnitPlane(memory, start, offset, strides, (rows.shape[1],), (word,), (word,))


def _byte_rows(tensor: Tensor) -> Tensor:
    """A view `[num_blocks, bytes]`. Raises ValueError for a tensor whose rows are not contiguous."""
    if not tensor[0].is_contiguous():
        raise ValueError(f"the rows of a paged tensor are not contiguous: {tensor.shape}, strides {tensor.stride()}")
    return tensor.view(len(tensor), -1).view(torch.uint8)


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Rows of bytes with those that follow each other in memory as one: interleaved layers are one copy, not one each."""
    joined: list[Tensor] = []
    for rows in tensors:
        last = joined[-1] if joined else rows
        length = last.shape[1] + rows.shape[1]
        follows = joined and rows.data_ptr() == last.data_ptr() + last.shape[1] and len(rows) == len(last)
        one_storage = rows.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        if follows and one_storage and rows.stride(0) == last.stride(0) >= length:
            joined[-1] = last.as_strided((len(last), length), last.stride())
        else:
            joined.append(rows)
    return joined


def _runs(blocks: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """`(block, slot, count)` of the runs in which blocks and slots are both consecutive."""
    for start, stop in consecutive_runs(blocks):
        for low, high in consecutive_runs(slots, start, stop):
            yield blocks[low], slots[low], high - low
