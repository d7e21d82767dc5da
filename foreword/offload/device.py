"""Copies between a device and the staging arena: one kernel for all layers, and copies of whole frames by the copy engine.

The device has a mirror of the arena. To save blocks, a kernel gathers them into the mirror on the stream that computes, so
later steps may overwrite them at once; the frames then go to the host on a stream of their own. The caller waits for neither:
who reads a slot waits for its copy.

To load blocks, the frames go to the mirror, and a kernel scatters them. The engine's thread *marks* the work that it has queued
when it hands the blocks over: what they held before belongs to that work. The first copy of a load waits for its mark, on the
device; the others follow in the same stream. Nothing else orders a load and the model: however long the device is busy with
later steps, the load runs beside them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from foreword.blocks.runs import consecutive_runs

Units = np.ndarray[Any, Any]
_AXES = 6
_NUMBERS = 5 + 3 * _AXES
_WORDS_PER_PROGRAM = 1024


class Stream(Enum):
    """Queues of work on a device. What is queued in one runs in order. Each thread that loads has a `LOAD` of its own, so that
    no load waits for another one's mark."""

    COMPUTE = "compute"
    SAVE = "save"
    LOAD = "load"


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait until what was queued before the event is done."""
        ...


class Queues(Protocol):
    """The streams of a device."""

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        """Queue work, which `work` launches."""
        ...

    def record(self, stream: Stream) -> Event: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Let work that is queued from now on run after the event."""
        ...


# By thread and device, the stream that computes, in a list that the thread's queues share.
_threads = threading.local()


def follow_stream(device: torch.device) -> list[Any]:
    """The calling thread's current stream is the one that computes from now on, for all queues that this thread has made. An
    engine may change it after its KV cache was prepared. Returns it in a list, which later calls change; empty without CUDA."""
    computing: list[Any] = vars(_threads).setdefault(str(device), [])
    if device.type == "cuda":
        computing[:] = [torch.cuda.current_stream(device)]
    return computing


class CudaQueues:  # pragma: no cover - needs a GPU
    """Streams of a CUDA device. The stream that computes is the current one of the thread that makes this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing = follow_stream(device)
        self._saving: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._loading = threading.local()

    def _stream(self, stream: Stream) -> Any:
        if stream is Stream.COMPUTE:
            return self._computing[0]
        if stream is Stream.SAVE:
            return self._saving
        if not hasattr(self._loading, "stream"):
            self._loading.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._loading.stream

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream(stream)):
            work()

    def record(self, stream: Stream) -> Event:
        # A thread that waits sleeps: a copy may wait for a step of the model.
        event: Event = self._stream(stream).record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._stream(stream).wait_event(event)


@dataclass(frozen=True, slots=True)
class Plane:
    """Bytes of a unit in one tensor, and where they lie in a frame. Strides and offsets in bytes.

    Attributes:
        address: of the tensor's first element.
        offset: in a frame.
        unit_strides: what the unit's three coordinates multiply.
        word: bytes of the words that are copied. `sizes` are in words, with their strides in the tensor and in a frame.
    """

    address: int
    offset: int
    unit_strides: tuple[int, int, int]
    word: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    frame_strides: tuple[int, ...]

    def numbers(self, word: int) -> list[int]:
        """The plan as the kernel reads it, in smaller words."""
        axes = [*zip(self.sizes, self.strides, self.frame_strides, strict=True), (self.word // word, word, word)]
        padded = [(1, 0, 0)] * (_AXES - len(axes)) + axes
        return [self.address, self.offset, *self.unit_strides, *(number for axis in padded for number in axis)]

    def words(self, word: int) -> int:
        return math.prod(self.sizes) * self.word // word


@dataclass(frozen=True, slots=True)
class PlaneTable:
    """Planes on the device."""

    numbers: Tensor
    words: int
    word: int

    @classmethod
    def of(cls, planes: Sequence[Plane], device: torch.device) -> PlaneTable | None:
        if not planes:
            return None
        word = min(plane.word for plane in planes)
        numbers = torch.tensor([plane.numbers(word) for plane in planes], dtype=torch.long, device=device)
        return cls(numbers, max(plane.words(word) for plane in planes), word)

    def copy(self, frames: Tensor, places: Tensor, *, gather: bool, found: Tensor | None = None) -> None:
        """Copy units into frames, or out of them, on the current stream.

        Args:
            frames: bytes `[slots, stride]` on the device.
            places: int64 `[units, 4]` on the device: the coordinates of each unit, and its slot.
            found: int32 `[units]` on the device, 1 for units that are copied, else 0. None: all are.
        """
        # Triton is imported where kernels run.
        from foreword.offload.device_kernels import KINDS, copy_kernel

        words = min(_WORDS_PER_PROGRAM, 1 << max(self.words - 1, 0).bit_length())
        grid = (len(places), len(self.numbers), -(-self.words // words))
        copy_kernel[grid](
            self.numbers, places, frames.data_ptr(), frames.stride(0), places if found is None else found,
            NUMBERS=_NUMBERS, AXES=_AXES, WORDS=words, KIND=KINDS[self.word], GATHER=gather, CHOSEN=found is not None,
        )  # fmt: skip


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made on the current stream. The thread does not wait for it."""
    pinned = host.pin_memory() if device.type == "cuda" else host
    return pinned.to(device, non_blocking=True)


@dataclass(slots=True)
class _Copy:
    """A copy into some slots, and whether it is known to be done."""

    event: Event
    done: bool = False


class DeviceCopies:
    """Copies between the paged tensors of some groups and an arena in pinned memory.

    Args:
        arena: bytes `[slots, stride]`.
        groups: the planes of each group.
    """

    def __init__(
        self, arena: Tensor, groups: Sequence[Sequence[Plane]], device: torch.device, queues: Queues | None = None
    ) -> None:
        self._arena = arena
        self._device = device
        self._mirror: Tensor | None = None
        self._making = threading.Lock()
        self._tables = [PlaneTable.of(planes, device) for planes in groups]
        self.queues = self._queues = CudaQueues(device) if queues is None else queues
        self._saves: dict[int, _Copy] = {}

    def mirror(self) -> Tensor:
        """The mirror, which is made when it is needed."""
        with self._making:
            if self._mirror is None:
                with torch.inference_mode(False):  # threads write there that have no such mode
                    self._mirror = torch.empty(self._arena.shape, dtype=torch.uint8, device=self._device)
            return self._mirror

    def save(self, group: int, units: Units, slots: Sequence[int]) -> None:
        """Queue the copy of units, int64 `[units, 3]`, into slots. `wait` tells when it is done; the units
        may be overwritten by later work."""
        queues, mirror = self._queues, self.mirror()
        # If a slot was given back before its last copy was done, that copy may be of both: it is followed by this one.
        queues.submit(Stream.COMPUTE, lambda: self._launch(group, units, slots, gather=True))
        queues.wait(Stream.SAVE, queues.record(Stream.COMPUTE))
        queues.submit(Stream.SAVE, lambda: self._move(self._arena, mirror, slots))
        self._saves.update(dict.fromkeys(slots, _Copy(queues.record(Stream.SAVE))))

    def wait(self, slot: int) -> None:
        """Wait until what was saved into a slot is there."""
        copy = self._saves.get(slot)
        if copy is not None and not copy.done:
            copy.event.synchronize()
            copy.done = True

    def mark(self) -> Event:
        """The work that the engine has queued so far. On its thread, when it hands blocks over to a load."""
        return self._queues.record(Stream.COMPUTE)

    def load(self, group: int, slots: Sequence[int], units: Units, mark: Event | None, until: float = math.inf) -> None:
        """Queue the copy of slots into units, behind what this thread has queued, and `mark`. Slots must not change, nor units
        be used, before the end of `loaded`. Raises StoreTimeout if others have all memory for copies `until` then."""
        for slot in slots:
            self.wait(slot)
        queues, mirror = self._queues, self.mirror()
        queues.submit(Stream.LOAD, lambda: self._move(mirror, self._arena, slots))
        if mark is not None:
            queues.wait(Stream.LOAD, mark)
        queues.submit(Stream.LOAD, lambda: self._launch(group, units, slots, gather=False))

    def loaded(self) -> Event:
        """The end of the loads that this thread has queued so far."""
        return self._queues.record(Stream.LOAD)

    def _move(self, target: Tensor, source: Tensor, slots: Sequence[int]) -> None:
        for low, high in consecutive_runs(slots):
            frames = slice(slots[low], slots[low] + high - low)
            target[frames].copy_(source[frames], non_blocking=True)

    def _launch(self, group: int, units: Units, slots: Sequence[int], *, gather: bool) -> None:
        table = self._tables[group]
        if table is None:
            return
        host = torch.from_numpy(np.column_stack((units, slots)))
        table.copy(self.mirror(), to_device(host, self._device), gather=gather)
