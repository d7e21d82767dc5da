"""Copies between paged tensors and the memory of a tier, whose slots a device reads and writes: the host copies and hashes
nothing, and nothing lies between the two but a ring of a few pieces of the device's memory. Blocks that take the way through
the staging arena go through the same pieces, without checksums: these are the host's there.

A save gathers blocks into a piece on the stream that computes, so that later steps may overwrite them; headers, checksums and
the copy into the slots follow on the stream of saves. A load copies slots into a piece, compares checksums and names there, and
scatters the frames that have the right ones, and no others. Pieces are used again:

    save:  [gather] -> [headers, checksums] -> [copy into slots]            the next gather into the piece comes behind the copy
    load:  [copy from slots] -> [verdicts] -> [scatter], again -> [verdicts to the host]    the piece is its load's until then
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from foreword.offload.copy_calls import CopyCall, Numbers
from foreword.offload.device import Event, Plane, PlaneTable, Queues, Stream, to_device
from foreword.offload.device_checksum import HEAD_BYTES, DeviceChecksums, heads
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
    _frames: tuple[int, Tensor] | None = None

    def frames(self, stride: int) -> Tensor:
        """The piece as frames, bytes `[frames, stride]`."""
        if self._frames is None or self._frames[0] != stride:
            count = len(self.memory) // stride
            self._frames = stride, self.memory[: count * stride].view(count, stride)
        return self._frames[1]


@dataclass(frozen=True, slots=True)
class Spans:
    """Bytes that are copied together between slots and pieces of the ring, in order.

    Attributes:
        at, start, size: where in a piece, where in the memory, and the bytes of the copy: int64.
        first: which span is the first of each piece, and how many there are.
    """

    at: Numbers
    start: Numbers
    size: Numbers
    first: Sequence[int]

    def of(self, number: int) -> slice:
        """The spans of a piece."""
        return slice(self.first[number], self.first[number + 1])


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
        with torch.inference_mode(False):  # threads write there that have no such mode
            return cls(torch.frombuffer(memory, dtype=torch.uint8), stride, cut)

    def spans(self, slots: Sequence[int], room: int) -> Spans:
        """How slots are copied, `room` of them to or from a piece."""
        numbers, count = np.array(slots, np.int64), len(slots)
        begins = np.ones(count, np.bool_)
        np.not_equal(numbers[1:] - numbers[:-1], 1, out=begins[1:])
        begins[::room] = True
        low = begins.nonzero()[0]
        size = np.full(len(low), count)
        size[:-1] = low[1:]
        size -= low
        size *= self.stride
        at, start = low % room * self.stride, numbers[low] * self.stride
        if self.cut < sys.maxsize and (start // self.cut != (start + size - 1) // self.cut).any():
            low, at, start, size = self._cut(low, at, start, size)
        first = low.searchsorted(np.arange(0, count, room)).tolist()
        return Spans(at, start, size, [*first, len(low)])

    def _cut(self, *spans: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Spans that cross no multiple of `cut`."""
        found: list[tuple[int, int, int, int]] = []
        for low, at, start, size in zip(*(one.tolist() for one in spans), strict=True):
            end = start + size
            while start < end:
                part = min(end, (start // self.cut + 1) * self.cut) - start
                found.append((low, at, start, part))
                at, start = at + part, start + part
        low, at, start, size = (np.array(one, np.int64) for one in zip(*found, strict=True))
        return low, at, start, size


class Copies(Protocol):
    """Queues the copies between a piece of the ring and a tier's memory, on the current stream."""

    def __call__(self, piece: Tensor, memory: TierMemory, spans: Spans, number: int, *, out: bool) -> None:
        """Copy the spans of piece `number`: `out` of the piece into slots, or into it."""
        ...


def torch_copies(piece: Tensor, memory: TierMemory, spans: Spans, number: int, *, out: bool) -> None:
    """Copies by PyTorch, one call for each span."""
    part = spans.of(number)
    for at, start, size in zip(*(one[part].tolist() for one in (spans.at, spans.start, spans.size)), strict=True):
        here, there = piece[at : at + size], memory.data[start : start + size]
        if out:
            there.copy_(here, non_blocking=True)
        else:
            here.copy_(there, non_blocking=True)


class DriverCopies:
    """Copies by one call of CUDA's driver for a piece.

    Args:
        stream: the current stream.
    """

    def __init__(self, call: CopyCall, stream: Callable[[], Any]) -> None:
        self._call, self._stream = call, stream

    def __call__(self, piece: Tensor, memory: TierMemory, spans: Spans, number: int, *, out: bool) -> None:
        part = spans.of(number)
        here, there = spans.at[part] + piece.data_ptr(), spans.start[part] + memory.data.data_ptr()
        targets, sources = (there, here) if out else (here, there)
        self._call(targets, sources, spans.size[part], self._stream(), in_order=True)


def copies_of(device: torch.device) -> Copies:
    """How pieces are copied on a device: by one call of the driver for a piece where it has that, else a call for each span."""
    if device.type != "cuda":
        return torch_copies
    call = CopyCall(device)  # pragma: no cover - needs a GPU
    return DriverCopies(call, partial(torch.cuda.current_stream, device))  # pragma: no cover - needs a GPU


@dataclass(eq=False, slots=True)
class SaveBatch:
    """Blocks of one group that are copied into slots, a piece of the ring at a time.

    Attributes:
        headers: of the blocks; none for those that the host seals.
        room: frames in a piece.
        places, packed: on the device, by piece: the coordinates of each unit with its frame in the piece; the packed headers.
    """

    group: int
    units: Units
    headers: Sequence[Header]
    memory: TierMemory
    spans: Spans
    room: int
    places: Sequence[Tensor] = ()
    packed: Sequence[Tensor] = ()

    def frames(self, number: int) -> tuple[int, int]:
        """The first block of a piece, and that behind its last."""
        return number * self.room, min((number + 1) * self.room, len(self.units))


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Blocks of one group in one piece of the ring.

    Attributes:
        low, high: frames of the piece.
        index: of this part in its batch.
    """

    group: int
    low: int
    high: int
    index: int


@dataclass(eq=False, slots=True)
class LoadBatch:
    """Blocks that are copied from slots, a piece of the ring at a time.

    Attributes:
        parts: the blocks of each group in each piece.
        units: int64 `[blocks, 3]`, the coordinates of each.
        names: of the blocks; none for those that the host has checked.
        verdicts: int32 `[blocks]` on the host; known when the copies have ended.
        places, heads, found: on the device, by part: as those of a save; what the headers of the wanted blocks begin with; the
            verdicts, `whole` of all blocks.
    """

    parts: Sequence[Sequence[GroupPart]]
    units: Units
    names: Sequence[bytes]
    memory: TierMemory
    spans: Spans
    room: int
    verdicts: Tensor
    places: Sequence[Tensor] = ()
    heads: Sequence[Tensor] = ()
    found: Sequence[Tensor] = ()
    whole: Tensor | None = None

    @property
    def pieces(self) -> int:
        return len(self.parts)

    @property
    def lengths(self) -> list[int]:
        """The number of blocks of each part."""
        return [one.high - one.low for some in self.parts for one in some]

    def frames(self, number: int, count: int = 1) -> tuple[int, int]:
        """The first block of so many pieces, and that behind their last."""
        return number * self.room, min((number + count) * self.room, len(self.units))


@dataclass(eq=False, slots=True)
class RingLoad:
    """Frames on their way into blocks.

    Attributes:
        copied: the end of the copies.
        verdicts: int32 `[frames]` on the host, 0 where a frame was damaged or another one; when it is `copied`.
    """

    copied: Event
    verdicts: Tensor

    def sound(self) -> int:
        """How many of the first frames were right, and are in their blocks. After `copied`."""
        found = self.verdicts.tolist()
        return found.index(0) if 0 in found else len(found)


class DeviceRing:
    """Pieces of a device's memory between the paged tensors of some groups and slots of tiers.

    Args:
        groups: the planes of each group.
        block_bytes: bytes of a payload, by group.
        piece_bytes: of a piece for loads; those for saves have half of it.
        copies: how pieces are copied to and from slots.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Plane]],
        block_bytes: Sequence[int],
        device: torch.device,
        queues: Queues,
        piece_bytes: int,
        copies: Copies = torch_copies,
    ) -> None:
        self.device = device
        self.block_bytes = tuple(block_bytes)
        self.piece_bytes = piece_bytes
        self._tables = [PlaneTable.of(planes, device) for planes in groups]
        self._checksums = DeviceChecksums(device)
        self._queues = queues
        self._copies = copies
        self._saving = [
            self._piece(max(piece_bytes // 2, HEADER_BYTES + max(block_bytes))) for _ in range(_SAVE_PIECES)
        ]
        self._free = [self._piece(piece_bytes) for _ in range(_LOAD_PIECES)]
        self._numbers = torch.arange(piece_bytes // HEADER_BYTES, device=device)
        self._lent = 0
        self._next = 0
        self._changed = threading.Condition()

    def _piece(self, size: int) -> Piece:
        with torch.inference_mode(False):  # threads write there that have no such mode
            return Piece(torch.empty(size, dtype=torch.uint8, device=self.device))

    def room(self, stride: int) -> int:
        """Frames that are saved through one piece."""
        return max(self.piece_bytes // 2, HEADER_BYTES + max(self.block_bytes)) // stride

    # Saving: on one thread at a time.

    def save(
        self, group: int, units: Units, headers: Sequence[Header], memory: TierMemory, slots: Sequence[int]
    ) -> Event | None:
        """Queue the copies of some units, sealed, into slots of a tier. They may be overwritten by later work.

        Args:
            units: int64 `[units, 3]`, the coordinates of each.
            headers: of the blocks; none: they are not sealed.

        Returns the end of the copies; None if there are no units.
        """
        pieces = self._saving
        room = self.room(memory.stride)
        batch = SaveBatch(group, units, headers, memory, memory.spans(slots, room), room)
        event: Event | None = None
        for number in range(len(batch.spans.first) - 1):
            piece = pieces[self._next % len(pieces)]
            self._next += 1
            event = self._save_piece(batch, number, piece)
        return event

    def _save_piece(self, batch: SaveBatch, number: int, piece: Piece) -> Event:
        queues = self._queues
        if piece.copied is not None:
            queues.wait(Stream.COMPUTE, piece.copied)
        queues.submit(Stream.COMPUTE, partial(self._gather, batch, number, piece))
        queues.wait(Stream.SAVE, queues.record(Stream.COMPUTE))
        queues.submit(Stream.SAVE, partial(self._seal_and_copy, batch, number, piece))
        piece.copied = queues.record(Stream.SAVE)
        return piece.copied

    def saved(self) -> Event:
        """The end of the saves that were queued so far."""
        return self._queues.record(Stream.SAVE)

    def _gather(self, batch: SaveBatch, number: int, piece: Piece) -> None:
        table = self._tables[batch.group]
        if table is None:
            return
        if not batch.places:
            batch.places = torch.split(self._places(batch.units, batch.room), batch.room)
        table.copy(piece.frames(batch.memory.stride), batch.places[number], gather=True)

    def _seal_and_copy(self, batch: SaveBatch, number: int, piece: Piece) -> None:
        if batch.headers:
            self._seal(batch, number, piece)
        self._copy_out(batch, number, piece)

    def _seal(self, batch: SaveBatch, number: int, piece: Piece) -> None:
        if not batch.packed:
            joined = bytearray(b"".join([header.pack() for header in batch.headers]))
            packed = to_device(torch.frombuffer(joined, dtype=torch.uint8), self.device)
            batch.packed = torch.split(packed.view(len(batch.headers), _SUMMED), batch.room)
        packed, size = batch.packed[number], self.block_bytes[batch.group]
        frames = piece.frames(batch.memory.stride)
        frames[: len(packed), size : size + _SUMMED].copy_(packed)
        self._checksums.seal(frames, self._numbers[: len(packed)], size)

    def _copy_out(self, batch: SaveBatch, number: int, piece: Piece) -> None:
        self._copies(piece.memory, batch.memory, batch.spans, number, out=True)

    # Loading: a thread takes a piece, queues one load through it, and gives it back when the copies have ended.

    @property
    def free(self) -> bool:
        """Whether a piece is free now."""
        return bool(self._free)

    def wait_for(self, deadline: float) -> Piece | None:
        """A piece, or None if none is free until the deadline."""
        with self._changed:
            left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            if not self._free and not self._changed.wait_for(lambda: self._free, left):
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

    def plan_load(
        self, parts: Sequence[Part], memory: TierMemory, slots: Sequence[int], *, checked: bool = False
    ) -> LoadBatch:
        """Prepare what `load` queues, a piece at a time.

        Args:
            parts: the blocks of the slots, one group after the other.
            checked: the host has checked the frames; their names are not used.
        """
        room, cuts, low, index = self.piece_bytes // memory.stride, list[list[GroupPart]](), 0, 0
        for group, units, _ in parts:
            end = low + len(units)
            while low < end:
                first = low % room
                if not first:
                    cuts.append([])
                size = min(end - low, room - first)
                cuts[-1].append(GroupPart(group, first, first + size, index))
                low, index = low + size, index + 1
        units = parts[0][1] if len(parts) == 1 else np.concatenate([one for _, one, _ in parts])
        names = () if checked else parts[0][2] if len(parts) == 1 else [name for _, _, some in parts for name in some]
        with torch.inference_mode(False):
            verdicts = torch.empty(len(slots), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return LoadBatch(cuts, units, names, memory, memory.spans(slots, room), room, verdicts)

    def load(self, batch: LoadBatch, number: int, piece: Piece, mark: Event | None, count: int = 1) -> RingLoad:
        """Queue the copies of the slots of `count` pieces, from `number` on, into units, of those whose frames are right,
        behind what this thread has queued before, and behind `mark` if there is one. All go through `piece`, one after the
        other, as the stream orders them. Slots, piece and units are the load's until it is `copied`."""
        queues, end = self._queues, number + count
        low, high = batch.frames(number, count)
        if mark is not None:
            queues.submit(Stream.LOAD, partial(self._copy_and_check, batch, number, piece))
            queues.wait(Stream.LOAD, mark)
            queues.submit(Stream.LOAD, partial(self._scatter, batch, number, piece))
            number += 1
        queues.submit(Stream.LOAD, partial(self._load_pieces, batch, range(number, end), piece, low, high))
        return RingLoad(queues.record(Stream.LOAD), batch.verdicts[low:high])

    def _load_pieces(self, batch: LoadBatch, numbers: Sequence[int], piece: Piece, low: int, high: int) -> None:
        for number in numbers:
            self._copy_and_check(batch, number, piece)
            self._scatter(batch, number, piece)
        self._tell(batch, low, high)

    def _copy_and_check(self, batch: LoadBatch, number: int, piece: Piece) -> None:
        self._copy_in(batch, number, piece)
        if batch.names:
            self._check(batch, number, piece)

    def _copy_in(self, batch: LoadBatch, number: int, piece: Piece) -> None:
        self._copies(piece.memory, batch.memory, batch.spans, number, out=False)

    def _check(self, batch: LoadBatch, number: int, piece: Piece) -> None:
        """Find out which frames of a piece are right."""
        if not batch.found:
            found = torch.empty(len(batch.names), dtype=torch.int32, device=self.device)
            lengths = batch.lengths
            batch.whole, batch.found = found, torch.split(found, lengths)
            batch.heads = torch.split(to_device(heads(batch.names), self.device), [HEAD_BYTES * one for one in lengths])
        frames = piece.frames(batch.memory.stride)
        for part in batch.parts[number]:
            wanted, found, size = batch.heads[part.index], batch.found[part.index], self.block_bytes[part.group]
            self._checksums.check(frames, self._numbers[part.low : part.high], size, wanted, found)

    def _scatter(self, batch: LoadBatch, number: int, piece: Piece) -> None:
        """Copy what is right into its units."""
        if not batch.places:
            batch.places = torch.split(self._places(batch.units, batch.room), batch.lengths)
        frames = piece.frames(batch.memory.stride)
        for part in batch.parts[number]:
            table = self._tables[part.group]
            if table is not None:
                right = batch.found[part.index] if batch.found else None
                table.copy(frames, batch.places[part.index], gather=False, found=right)

    def _tell(self, batch: LoadBatch, low: int, high: int) -> None:
        """Copy the verdicts of blocks to the host."""
        if batch.whole is not None:
            batch.verdicts[low:high].copy_(batch.whole[low:high], non_blocking=True)

    def loaded(self) -> Event:
        """The end of the loads that this thread has queued so far."""
        return self._queues.record(Stream.LOAD)

    @property
    def loading(self) -> bool:
        """Whether a load has a piece."""
        with self._changed:
            return self._lent > 0

    def copy_by_torch(self) -> None:
        """Copy with no other calls than PyTorch's from now on."""
        self._copies = torch_copies

    # For a test at the start: all of it is done on return, also if it fails, since other copies take the piece next.

    def reseal(self, size: int, headers: Sequence[Header], memory: TierMemory, slots: Sequence[int]) -> None:
        """Seal payloads of `size` bytes where they lie, in slots of a tier, on the device."""
        room = len(slots)
        with self._borrowed() as piece:
            group, units = self.block_bytes.index(size), np.zeros((len(slots), 3), np.int64)
            there = self.plan_load([(group, units, ())], memory, slots, checked=True)
            back = SaveBatch(group, units, headers, memory, memory.spans(slots, room), room)
            self._queues.submit(Stream.LOAD, partial(self._copy_and_check, there, 0, piece))
            self._queues.submit(Stream.LOAD, partial(self._seal_and_copy, back, 0, piece))

    def verdicts(self, size: int, names: Sequence[bytes], memory: TierMemory, slots: Sequence[int]) -> list[int]:
        """Check frames in slots of a tier on the device: 1 for each that is right, else 0."""
        with self._borrowed() as piece:
            units = np.zeros((len(slots), 3), np.int64)
            batch = self.plan_load([(self.block_bytes.index(size), units, names)], memory, slots)
            self._queues.submit(Stream.LOAD, partial(self._copy_and_check, batch, 0, piece))
            self.loaded().synchronize()
            return [right for some in batch.found for right in some.tolist()]

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[Piece]:
        """A piece, until what is queued meanwhile is done."""
        piece = self.wait_for(math.inf)
        assert piece is not None
        try:
            yield piece
        finally:
            try:
                self.loaded().synchronize()
            finally:
                self.give(piece)

    def _places(self, units: Units, room: int) -> Tensor:
        """Units with their frames in pieces of so many."""
        places = np.empty((len(units), 4), np.int64)
        places[:, :3] = units
        places[:, 3] = np.arange(len(units)) % room
        return to_device(torch.from_numpy(places), self.device)
