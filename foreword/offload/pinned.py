"""Memory that a CUDA device reads and writes at full speed: page-locked, piece by piece and in the background."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import torch

from foreword.offload import numa
from foreword.store.background import background_thread
from foreword.store.memory.memory_store import MemoryArena

Result = TypeVar("Result")
log = logging.getLogger("foreword.offload")
PIN_BYTES: Final = 256 << 20
_PINNING_NICE: Final = 10
_PORTABLE: Final = 1  # for all contexts of this process
_PATIENCE: Final = 60.0  # seconds that blocks in use may keep memory from being moved
_PAUSE: Final = 0.02


class Pinning(Protocol):
    """Page-locks memory, and releases it."""

    def place(self, address: int, size: int) -> None:
        """Let memory be near the device, where the system can."""
        ...

    def lock(self, address: int, size: int) -> str | None:
        """None, or why it was refused."""
        ...

    def unlock(self, address: int) -> None: ...

    def allocate(self, size: int) -> memoryview | None:
        """Other memory that is page-locked, until the last view of it is gone; None if that is refused, too."""
        ...


class CudaPinning:  # pragma: no cover - needs a GPU
    """`cudaHostRegister` for a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def place(self, address: int, size: int) -> None:
        facts = torch.cuda.get_device_properties(self._device)
        numbers = (getattr(facts, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
        domain, bus, device = numbers
        if bus is None or device is None:  # an older PyTorch
            return
        node = numa.node_of(f"{domain or 0:04x}:{bus:02x}:{device:02x}.0")
        if node is not None:
            numa.prefer(address, size, node)

    def lock(self, address: int, size: int) -> str | None:
        with torch.cuda.device(self._device):
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            try:
                code = cudart.cudaHostRegister(address, size, _PORTABLE)
            except RuntimeError as error:
                return str(error).splitlines()[0]
        return None if not int(code) else f"cudaHostRegister returned {code}"

    def unlock(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def allocate(self, size: int) -> memoryview | None:
        with torch.cuda.device(self._device):
            torch.cuda.mem_get_info(self._device)  # gives the thread the context that the driver's calls need
            return allocated(size, ctypes.CDLL("libcuda.so.1"))


class AllocatedArena(MemoryArena):
    """Memory of another owner, which a view of it keeps."""

    def __init__(self, memory: memoryview) -> None:
        self.size, self.view = memory.nbytes, memory
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


def allocated(size: int, driver: Any) -> memoryview | None:
    """Memory that CUDA's driver allocates, page-locked, and frees when the last view of it is gone; None if it refuses. In the
    context of the calling thread."""
    context, found = ctypes.c_void_p(), ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) or not context.value:
        return None
    if driver.cuMemHostAlloc(ctypes.byref(found), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE)) or not found.value:
        return None
    memory = (ctypes.c_char * size).from_address(found.value)

    def free() -> None:  # on any thread, which may have another context or none
        driver.cuCtxPushCurrent_v2(context)
        driver.cuMemFreeHost(found)
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    weakref.finalize(memory, free).atexit = False  # the driver may be gone
    return memoryview(memory).cast("B")


def _tried(call: Callable[[], Result]) -> tuple[Result | None, str]:
    """The result of a call of a driver; else None, and how it has failed."""
    try:
        return call(), ""
    except Exception as error:  # noqa: BLE001 - drivers and libraries raise what they like
        return None, f"{type(error).__name__}: {error}"


class PinnedMemory:
    """Memory that a thread page-locks from start to end.

    Args:
        memory: keeps the memory mapped until it is released.
        ready: called on the thread after each piece until it says True; False ends it, and releases the memory. It is called
            where memory is refused or a call fails, too.
        move: takes other memory in its place, and says what is in the way; "" if nothing is. With None it only says that. It is
            called if the first piece is refused.

    Attributes:
        size: of all.
        end: bytes from the start that are page-locked.
        refused: why the rest is not; "" if it is, or will be.
        moved: other memory, which was allocated page-locked, is in its place.
    """

    def __init__(
        self,
        memory: object,
        address: int,
        size: int,
        pinning: Pinning,
        ready: Callable[[], bool | None],
        move: Callable[[memoryview | None], str] = lambda memory: "it stays where it is",
        piece: int = PIN_BYTES,
    ) -> None:
        self.end = 0
        self.moved = False
        self._move = move
        self.refused = ""
        self._memory: object = memory
        self.size = size
        self._address, self._piece = address, piece
        self._pinning, self._ready = pinning, ready
        self._stopped = threading.Event()
        self._thread = background_thread(self._run, "pin", nice=_PINNING_NICE, start=False)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        ready: bool | None = None
        _, failed = _tried(partial(self._pinning.place, self._address, self.size))
        if failed:
            log.warning("the memory tier may be far from the device: %s", failed)
        while self.end < self.size and not self._stopped.is_set() and ready is not False:
            size = min(self._piece, self.size - self.end)
            refused, failed = _tried(partial(self._pinning.lock, self._address + self.end, size))
            refused = refused or failed
            if refused and not self.end:
                held = self._allocate(refused)
                if not held:
                    ready = self._ready()
                    break
                refused += f"; and no other memory can take its place: {held}"
            if refused:
                self.refused = refused
                if ready:
                    log.warning(
                        "only %d of %d bytes of the memory tier are page-locked: %s", self.end, self.size, refused
                    )
                else:
                    self._ready()
                    self._release()
                return
            self.end += size
            ready = ready or self._ready()
        if ready is False:
            self._release()

    def _allocate(self, refused: str) -> str:
        """Put memory in its place that is allocated page-locked, as where a system refuses to page-lock what there is. Returns
        why not; "" if it was done."""
        until = time.monotonic() + _PATIENCE
        if held := self._await_move(None, until):  # before there are two of its size
            return held
        memory, failed = _tried(partial(self._pinning.allocate, self.size))
        if memory is None:
            return failed or "none is given"
        if held := self._await_move(memory, until):
            return held
        log.info("the memory tier's memory was allocated page-locked, as it could not be afterwards: %s", refused)
        self._memory, self.end, self.moved = memory, self.size, True
        return ""

    def _await_move(self, memory: memoryview | None, until: float) -> str:
        """Wait until nothing is in the way of a move. Returns what is in the end."""
        while True:
            held, failed = _tried(partial(self._move, memory))
            if failed or not held or time.monotonic() > until or self._stopped.wait(_PAUSE):
                return held or failed

    def close(self, timeout: float) -> bool:
        """Release the memory. Nothing copies any more. False if the thread does not end in time: the memory stays locked."""
        self._stopped.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._release()
        return True

    def _release(self) -> None:
        for offset in range(0, 0 if self.moved else self.end, self._piece):
            _, failed = _tried(partial(self._pinning.unlock, self._address + offset))
            if failed:
                log.warning("memory stays page-locked: %s", failed)
        self.end, self._memory = 0, None
