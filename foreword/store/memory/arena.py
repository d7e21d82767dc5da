"""The memory of a memory store: one anonymous mapping, and a thread that populates its pages ahead of use.

The first write to a page costs as much as the copy itself, so a low-priority thread populates pages shortly before they
are used.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

from foreword.errors import StoreUnavailable
from foreword.store.background import lower_priority

_UNLOCKED_BYTES = 64 << 10  # copies of at least this size release the GIL
_POPULATE_BYTES = 16 << 20
_AHEAD_BYTES = 256 << 20
_POPULATE_PAUSE = 0.03  # seconds after each piece: at most half a gigabyte per second
_POPULATE_NICE = 10
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the module mmap


class MemoryArena:
    """Anonymous private memory, released with the last reference to this object.

    Raises:
        StoreUnavailable: the system refuses that much memory.
    """

    def __init__(self, size: int) -> None:
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise StoreUnavailable(f"the system refuses {size} bytes of memory: {error}") from error
        self.size = size
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _advise(self, advice: int) -> None:
        try:
            self._map.madvise(advice)
        except OSError:  # the kernel does not support it: slower, but correct
            return

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` to `offset`."""
        size = data.nbytes
        if size >= _UNLOCKED_BYTES and not data.readonly:
            ctypes.memmove(self._base + offset, ctypes.addressof(ctypes.c_char.from_buffer(data)), size)
        else:
            self._view[offset : offset + size] = data if data.format == "B" else data.cast("B")

    def read(self, offset: int, size: int, buffer: memoryview) -> None:
        """Copy `size` bytes from `offset` to the start of `buffer`."""
        if size >= _UNLOCKED_BYTES:
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), self._base + offset, size)
        else:
            target = buffer if buffer.format == "B" else buffer.cast("B")
            target[:size] = self._view[offset : offset + size]

    def populate(self, offset: int, size: int) -> bool:
        """Allocate pages for a range without changing its content and without holding the GIL.

        Returns False if the kernel does not support it.
        """
        libc = ctypes.CDLL(None)
        return bool(
            libc.madvise(ctypes.c_void_p(self._base + offset), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0
        )


class PagePopulator:
    """A low-priority thread that populates an arena from start to end, in pieces, a little ahead of use."""

    def __init__(self, arena: MemoryArena, name: str) -> None:
        self._changed = threading.Condition()
        self._used = 0
        self._stopped = False
        threading.Thread(target=self._run, args=(arena,), name=name, daemon=True).start()

    def extend(self, end: int) -> None:
        """Note that bytes up to `end` are in use or will be soon."""
        if end > self._used:
            with self._changed:
                self._used = max(self._used, end)
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self, arena: MemoryArena) -> None:
        lower_priority(_POPULATE_NICE)
        for offset in range(0, arena.size, _POPULATE_BYTES):
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or offset < self._used + _AHEAD_BYTES)  # noqa: B023
                if self._stopped:
                    return
            if not arena.populate(offset, min(_POPULATE_BYTES, arena.size - offset)):
                return
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, _POPULATE_PAUSE)
