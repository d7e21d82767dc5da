"""Copies between paged tensors and the memory of a tier, whose slots a device reads and writes: the host copies and hashes
nothing, and nothing lies between the two but a ring of a few pieces of the device's memory.

A save gathers blocks into a piece on the stream that computes, so that later steps may overwrite them; headers, checksums and
the copy into the slots follow on the stream of saves. A load copies slots into a piece, compares checksums and names there, and
scatters the frames that have the right ones, and no others. Pieces are used again:

    save:  [gather] -> [headers, checksums] -> [copy into slots]            the next gather into the piece comes behind the copy
    load:  [copy from slots] -> [verdicts] -> [scatter] -> [verdicts to the host]    the piece is its load's until it ended
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from foreword.blocks.runs import consecutive_runs
from foreword.offload.device import Event, Plane, PlaneTable, Queues, Stream, to_device
from foreword.offload.device_checksum import DeviceChecksums, heads
from foreword.store.frame import HEADER_BYTES, Header

PIECE_BYTES: Final = 32 << 20
_SAVE_PIECES: Final = 2  # of half the size: a save's pieces follow each other faster than a load's
_LOAD_PIECES: Final = 3
PIECES_OF_A_LOAD: Final = _LOAD_PIECES - 1  # that one load has at once: another one need not wait for it
RING_BYTES: Final = PIECE_BYTES * _LOAD_PIECES + PIECE_BYTES // 2 * _SAVE_PIECES
# Blocks of one group: the group, the coordinates of each unit as int64 `[units, 3]`, and the names.
Units = np.ndarray[Any, Any]
Part = tuple[int, Units, Sequence[bytes]]
_SUMMED: Final = HEADER_BYTES - 32  # bytes of a packed header


@dataclass(eq=False, slots=True)
class Piece:
    """A part of the ring.

    Attributes:
        memory: bytes on the device.
        copied: the end of the last copy out of it, into a tier; None before the first.
    """

    memory: Tensor
    copied: Event | None = None

    def frames(self, stride: int) -> Tensor:
        """The piece as frames, bytes `[frames, stride]`."""
        count = len(self.memory) // stride
        return self.memory[: count * stride].view(count, stride)


@dataclass(eq=False, slots=True)
class RingLoad:
    """Frames on their way into blocks.

    Attributes:
        copied: the end of the copies.
        verdicts: int32 `[frames]` on the host, 0 where a frame was damaged or another one; when it is `copied`.
    """

    copied: Event
    verdicts: list[Tensor] = field(default_factory=list)

    def sound(self) -> int:
        """How many of the first frames were right, and are in their blocks. After `copied`."""
        found = [right for some in self.verdicts for right in some.tolist()]
        return found.index(0) if 0 in found else len(found)


class DeviceRing:
    """Pieces of a device's memory between the paged tensors of some groups and slots of tiers.

    Args:
        groups: the planes of each group.
        block_bytes: bytes of a payload, by group.
        piece_bytes: of a piece for loads; those for saves have half of it.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Plane]],
        block_bytes: Sequence[int],
        device: torch.device,
        queues: Queues,
        piece_bytes: int,
    ) -> None:
        self.device = device
        self.block_bytes = tuple(block_bytes)
        self.piece_bytes = piece_bytes
        self._tables = [PlaneTable.of(planes, device) for planes in groups]
        self._checksums = DeviceChecksums(device)
        self._queues = queues
        self._saving = [
            self._piece(max(piece_bytes // 2, HEADER_BYTES + max(block_bytes))) for _ in range(_SAVE_PIECES)
        ]
        self._free = [self._piece(piece_bytes) for _ in range(_LOAD_PIECES)]
        self._numbers = torch.arange(piece_bytes // HEADER_BYTES, device=device)
        self._lent = 0
        self._next = 0
        self._changed = threading.Condition()

    def _piece(self, size: int) -> Piece:
        return Piece(torch.empty(size, dtype=torch.uint8, device=self.device))

    def room(self, stride: int) -> int:
        """Frames that are saved through one piece."""
        return max(len(piece.memory) for piece in self._saving) // stride

    # Saving: on one thread at a time.

    def save(
        self, group: int, units: Units, headers: Sequence[Header], memory: TierMemory, slots: Sequence[int]
    ) -> Event:
        """Queue the copy of at most `room` units, sealed, into slots of a tier. They may be overwritten by later work.

        Args:
            units: int64 `[units, 3]`, the coordinates of each.

        Returns the end of the copy.
        """
        queues, piece = self._queues, self._saving[self._next % len(self._saving)]
        self._next += 1
        frames, size = piece.frames(memory.stride), self.block_bytes[group]
        if piece.copied is not None:
            queues.wait(Stream.COMPUTE, piece.copied)
        queues.submit(Stream.COMPUTE, lambda: self._gather(group, units, frames))
        queues.wait(Stream.SAVE, queues.record(Stream.COMPUTE))
        queues.submit(Stream.SAVE, lambda: self._seal(headers, frames, size))
        queues.submit(Stream.SAVE, lambda: _copy_out(piece.memory, memory, slots))
        piece.copied = queues.record(Stream.SAVE)
        return piece.copied

    def saved(self) -> Event:
        """The end of the saves that were queued so far."""
        return self._queues.record(Stream.SAVE)

    @torch.inference_mode()
    def _gather(self, group: int, units: Units, frames: Tensor) -> None:
        table = self._tables[group]
        if table is not None:
            table.copy(frames, self._places(units, 0), gather=True)

    @torch.inference_mode()
    def _seal(self, headers: Sequence[Header], frames: Tensor, size: int) -> None:
        packed = torch.frombuffer(bytearray(b"".join([header.pack() for header in headers])), dtype=torch.uint8)
        packed = to_device(packed, self.device).view(len(headers), _SUMMED)
        frames[: len(headers), size : size + _SUMMED].copy_(packed)
        self._checksums.seal(frames, self._numbers[: len(headers)], size)

    # Loading: a thread takes a piece, queues one load through it, and gives it back when the copies have ended.

    @property
    def free(self) -> bool:
        """Whether a piece is free now."""
        return bool(self._free)

    def wait_for(self, deadline: float) -> Piece | None:
        """A piece, or None if none is free until the deadline."""
        with self._changed:
            left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            if not self._changed.wait_for(lambda: self._free, left):
                return None
            self._lent += 1
            return self._free.pop()

    def give(self, piece: Piece) -> None:
        """Return a piece. No copy uses it any more."""
        with self._changed:
            self._free.append(piece)
            self._lent -= 1
            self._changed.notify_all()

    def mark(self) -> Event:
        """The work that the engine has queued so far. On its thread, when it hands blocks over to a load."""
        return self._queues.record(Stream.COMPUTE)

    def load(
        self,
        piece: Piece,
        parts: Sequence[Part],
        memory: TierMemory,
        slots: Sequence[int],
        mark: Event | None,
    ) -> RingLoad:
        """Queue the copy of slots into units, of those whose frames are right, behind what this thread has queued before, and
        behind `mark` if there is one. Slots, piece and units are the load's until it is `copied`.

        Args:
            parts: the blocks of the slots, one group after the other.
        """
        queues, frames = self._queues, piece.frames(memory.stride)
        queues.submit(Stream.LOAD, lambda: _copy_in(memory, slots, piece.memory))
        found: list[Tensor] = []
        queues.submit(Stream.LOAD, lambda: self._check(parts, frames, found))
        if mark is not None:
            queues.wait(Stream.LOAD, mark)
        verdicts: list[Tensor] = []
        queues.submit(Stream.LOAD, lambda: self._scatter(parts, frames, found, verdicts))
        return RingLoad(queues.record(Stream.LOAD), verdicts)

    @torch.inference_mode()
    def _check(self, parts: Sequence[Part], frames: Tensor, found: list[Tensor]) -> None:
        """Append the verdicts of each part."""
        low = 0
        for group, _, names in parts:
            found.append(self._verdicts(frames, low, self.block_bytes[group], names))
            low += len(names)

    @torch.inference_mode()
    def _scatter(self, parts: Sequence[Part], frames: Tensor, found: Sequence[Tensor], verdicts: list[Tensor]) -> None:
        """Copy what is right into its units, and append the verdicts, on the host."""
        low = 0
        for (group, units, names), right in zip(parts, found, strict=True):
            table = self._tables[group]
            if table is not None:
                table.copy(frames, self._places(units, low), gather=False, found=right)
            host = torch.empty(len(names), dtype=torch.int32, pin_memory=self.device.type == "cuda")
            verdicts.append(host.copy_(right, non_blocking=True))
            low += len(names)

    def loaded(self) -> Event:
        """The end of the loads that this thread has queued so far."""
        return self._queues.record(Stream.LOAD)

    @property
    def loading(self) -> bool:
        """Whether a load has a piece."""
        with self._changed:
            return self._lent > 0

    def close(self) -> None:
        """Give the device's memory back. No copy uses it, and none comes."""
        with self._changed:
            self._saving, self._free = [], []

    # For a test at the start: all of it is done on return.

    def reseal(self, size: int, headers: Sequence[Header], memory: TierMemory, slots: Sequence[int]) -> None:
        """Seal payloads of `size` bytes where they lie, in slots of a tier, on the device."""
        piece = self._borrowed()
        try:
            frames, queues = piece.frames(memory.stride), self._queues
            queues.submit(Stream.LOAD, lambda: _copy_in(memory, slots, piece.memory))
            queues.submit(Stream.LOAD, lambda: self._seal(headers, frames, size))
            queues.submit(Stream.LOAD, lambda: _copy_out(piece.memory, memory, slots))
            self.loaded().synchronize()
        finally:
            self.give(piece)

    def verdicts(self, size: int, names: Sequence[bytes], memory: TierMemory, slots: Sequence[int]) -> list[int]:
        """Check frames in slots of a tier on the device: 1 for each that is right, else 0."""
        piece = self._borrowed()
        try:
            frames, queues, found = piece.frames(memory.stride), self._queues, list[Tensor]()
            queues.submit(Stream.LOAD, lambda: _copy_in(memory, slots, piece.memory))
            queues.submit(Stream.LOAD, lambda: found.append(self._verdicts(frames, 0, size, names).cpu()))
            self.loaded().synchronize()
            return [int(one) for one in found[0]]
        finally:
            self.give(piece)

    def _borrowed(self) -> Piece:
        piece = self.wait_for(math.inf)
        assert piece is not None
        return piece

    @torch.inference_mode()
    def _verdicts(self, frames: Tensor, low: int, size: int, names: Sequence[bytes]) -> Tensor:
        places = self._numbers[low : low + len(names)]
        return self._checksums.check(frames, places, size, to_device(heads(names), self.device))

    def _places(self, units: Units, low: int) -> Tensor:
        """Units and their frames in a piece, from number `low` on."""
        places = np.empty((len(units), 4), np.int64)
        places[:, :3] = units
        places[:, 3] = np.arange(low, low + len(units))
        return to_device(torch.from_numpy(places), self.device)


@dataclass(frozen=True, slots=True)
class TierMemory:
    """A tier's memory, which the device reads and writes.

    Attributes:
        data: its bytes.
        stride: bytes of a slot.
        cut: no copy crosses a multiple of this many bytes: memory that was page-locked in pieces is copied in pieces.
    """

    data: Tensor
    stride: int
    cut: int = sys.maxsize

    @classmethod
    def of(cls, memory: Any, stride: int, cut: int = sys.maxsize) -> TierMemory:
        """A store's memory as the device uses it; nothing is copied."""
        return cls(torch.frombuffer(memory, dtype=torch.uint8), stride, cut)

    def spans(self, slots: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """Bytes of the first frames of a piece, and of these slots, as they are copied together."""
        for low, high in consecutive_runs(slots):
            at, start, end = low * self.stride, slots[low] * self.stride, (slots[low] + high - low) * self.stride
            while start < end:
                size = min(end, (start // self.cut + 1) * self.cut) - start
                yield slice(at, at + size), slice(start, start + size)
                at, start = at + size, start + size


def _copy_out(piece: Tensor, memory: TierMemory, slots: Sequence[int]) -> None:
    """Copy the first frames of a piece into slots."""
    for framed, there in memory.spans(slots):
        memory.data[there].copy_(piece[framed], non_blocking=True)


def _copy_in(memory: TierMemory, slots: Sequence[int], piece: Tensor) -> None:
    """Copy slots into the first frames of a piece."""
    for framed, there in memory.spans(slots):
        piece[framed].copy_(memory.data[there], non_blocking=True)
