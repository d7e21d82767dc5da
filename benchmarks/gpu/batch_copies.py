"""Copies between paged tensors and host memory as vLLM's SimpleCPUOffloadConnector makes them, written here.

Of vLLM 0.32 (v1/simple_kv_offload): host tensors of the shape of the device's, page-locked in place with cudaHostRegister; one
thread that calls cuMemcpyBatchAsync with a descriptor for each block of each tensor; streams of the lowest priority; a save is
queued behind an event of the stream that computes; whether a copy is done is asked once in a step. Nothing is hashed, and
nothing is compared. Where vLLM is not installed, this is what Foreword is measured beside; it has no scheduler of its own.

On a CPU, which has no streams, memmove stands for the copies: that tries the script.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foreword.offload.copy_calls import CopyCall


def register(memory: Tensor, device: torch.device) -> bool:
    """Page-lock memory in place. False without CUDA. Raises RuntimeError if CUDA refuses."""
    if device.type != "cuda":
        return False
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if code:
        # CUDA would report the error again at the next launch of a kernel.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes: error {code}")
    return True


def unregister(memory: Tensor, device: torch.device) -> None:
    """Undo `register`."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def huge_memory(size: int) -> Tensor:
    """Anonymous memory in huge pages, where the system has them, with all pages present."""
    memory = mmap.mmap(-1, -(-size // (2 << 20)) * (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].zero_()


def _host_memory(size: int, device: torch.device) -> tuple[Tensor, bool]:
    """Memory that a device copies from and to, and whether it is registered; where that is refused, CUDA allocates it."""
    memory = huge_memory(size)
    try:
        return memory, register(memory, device)
    except RuntimeError:  # pragma: no cover - needs a GPU
        return torch.empty(size, dtype=torch.uint8, pin_memory=True), False


class Transfer:
    """A batch of copies that was handed to the thread."""

    def __init__(self) -> None:
        self._launched = threading.Event()
        self.event: Any = None
        self.error: BaseException | None = None

    def launched(self, event: Any, error: BaseException | None) -> None:
        """The thread has queued the copies in their stream, before this event."""
        self.event, self.error = event, error
        self._launched.set()

    def done(self) -> bool:
        """Whether the bytes are there; does not wait. Raises what went wrong."""
        if not self._launched.is_set():
            return False
        if self.error is not None:
            raise self.error
        return self.event is None or bool(self.event.query())

    def wait(self, seconds: float = 60.0) -> None:
        """Until the bytes are there. Raises what went wrong, and TimeoutError."""
        until = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() > until:
                raise TimeoutError(f"a batch of copies took more than {seconds:.0f} s")
            time.sleep(0.0001)


class BatchCopies:
    """The copies of one engine.

    Args:
        tensors: of the device, `[blocks, ...]` each, with contiguous rows.
        blocks: host blocks, each with room for a row of every tensor.

    Attributes:
        block_bytes, copies: of a block, in all tensors.
        registered: the host memory was registered in place.
    """

    def __init__(self, tensors: Sequence[Tensor], blocks: int) -> None:
        self.blocks = blocks
        self._device = device = tensors[0].device
        self._rows = torch.tensor([tensor.stride(0) * tensor.element_size() for tensor in tensors])
        self._there = torch.tensor([tensor.data_ptr() for tensor in tensors])
        self._kept, self.copies = tensors, len(tensors)
        self.block_bytes = int(self._rows.sum())
        # One registration for all tensors of the host: registering takes a fixed time too.
        self._memory, self.registered = _host_memory(self.block_bytes * blocks, device)
        starts = torch.cumsum(self._rows, 0) - self._rows
        self._here = self._memory.data_ptr() + starts * blocks
        self.call = CopyCall(device)
        self._streams: tuple[Any, Any] = (None, None)
        if device.type == "cuda":  # pragma: no cover - needs a GPU
            # Priority 0 is the lowest that CUDA has.
            self._streams = (torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=0))  # type: ignore[no-untyped-call]
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batch-copies", daemon=True)
        self._thread.start()

    def save(self, blocks: Sequence[int], places: Sequence[int]) -> Transfer:
        """Copy blocks of the device to places of the host, after what the current stream has queued."""
        after = None
        if self._device.type == "cuda":  # pragma: no cover - needs a GPU
            after = torch.cuda.current_stream().record_event()
        return self._hand_over(blocks, places, after, save=True)

    def load(self, blocks: Sequence[int], places: Sequence[int]) -> Transfer:
        """Copy places of the host to blocks of the device, which no queued work uses."""
        return self._hand_over(blocks, places, None, save=False)

    def _hand_over(self, blocks: Sequence[int], places: Sequence[int], after: Any, *, save: bool) -> Transfer:
        transfer = Transfer()
        self._queue.put(lambda: self._copy(transfer, blocks, places, after, save))
        return transfer

    def _run(self) -> None:
        if self._device.type == "cuda":  # pragma: no cover - needs a GPU
            torch.cuda.set_device(self._device)
        while (work := self._queue.get()) is not None:
            work()

    def _copy(self, transfer: Transfer, blocks: Sequence[int], places: Sequence[int], after: Any, save: bool) -> None:
        event, error = None, None
        stream = self._streams[not save]
        try:
            if after is not None:  # pragma: no cover - needs a GPU
                stream.wait_event(after)
            there = (self._there[:, None] + self._rows[:, None] * torch.tensor(blocks)).flatten()
            here = (self._here[:, None] + self._rows[:, None] * torch.tensor(places)).flatten()
            sizes = self._rows.repeat_interleave(len(blocks))
            targets, sources = (here, there) if save else (there, here)
            self.call(targets.numpy(), sources.numpy(), sizes.numpy(), stream, in_order=save)
            if stream is not None:  # pragma: no cover - needs a GPU
                event = stream.record_event()
        except Exception as failure:  # noqa: BLE001 - handed to the thread that waits for the transfer
            error = failure
        transfer.launched(event, error)

    def close(self) -> None:
        """End the thread and give the memory back."""
        self._queue.put(None)
        self._thread.join(10.0)
        if self.registered:  # pragma: no cover - needs a GPU
            torch.cuda.synchronize()
            unregister(self._memory, self._device)
