"""Memory that a CUDA device reads and writes at full speed: page-locked, piece by piece and in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

import torch

from foreword.offload import numa
from foreword.store.background import background_thread

log = logging.getLogger("foreword.offload")
PIN_BYTES: Final = 256 << 20
_PINNING_NICE: Final = 10
_PORTABLE: Final = 1  # for all contexts of this process


class Pinning(Protocol):
    """Page-locks memory, and releases it."""

    def place(self, address: int, size: int) -> None:
        """Let memory be near the device, where the system can."""
        ...

    def lock(self, address: int, size: int) -> str | None:
        """None, or why it was refused."""
        ...

    def unlock(self, address: int) -> None: ...


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


class PinnedMemory:
    """Memory that a thread page-locks from start to end.

    Args:
        memory: keeps the memory mapped until it is released.
        ready: called on the thread after each piece until it says True; False ends it, and releases the memory.

    Attributes:
        size: of all.
        end: bytes from the start that are page-locked.
        refused: why the rest is not; "" if it is, or will be.
    """

    def __init__(
        self,
        memory: object,
        address: int,
        size: int,
        pinning: Pinning,
        ready: Callable[[], bool | None],
        piece: int = PIN_BYTES,
    ) -> None:
        self.end = 0
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
        self._pinning.place(self._address, self.size)
        while self.end < self.size and not self._stopped.is_set() and ready is not False:
            size = min(self._piece, self.size - self.end)
            refused = self._pinning.lock(self._address + self.end, size)
            if refused is not None:
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

    def close(self, timeout: float) -> bool:
        """Release the memory. Nothing copies any more. False if the thread does not end in time: the memory stays locked."""
        self._stopped.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._release()
        return True

    def _release(self) -> None:
        for offset in range(0, self.end, self._piece):
            self._pinning.unlock(self._address + offset)
        self.end, self._memory = 0, None
