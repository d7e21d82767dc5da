"""The memory of a memory store: one anonymous mapping, copies in and out of it, and a thread that touches its pages.

The first write to a page costs as much as the copy, so pages are touched shortly ahead of use, by a thread of low priority.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

from foreword.errors import StoreUnavailable
from foreword.store.background import lower_priority

_UNLOCKED_BYTES = 64 << 10  # copies from here on let other threads run meanwhile
_POPULATE_BYTES = 16 << 20
_AHEAD_BYTES = 256 << 20
_POPULATE_PAUSE = 0.03  # seconds after each piece: half a gigabyte per second at most
_POPULATE_NICE = 10
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the module mmap does not name it


class Arena:
    """Anonymous private memory, freed with the last reference to this object."""

    def __init__(self, size: int) -> None:
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise StoreUnavailable(f"the system does not give {size} bytes of memory: {error}") from error
        self.size = size
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _advise(self, advice: int) -> None:
        try:
            self._map.madvise(advice)
        except OSError:  # a kernel without it: slower, nothing else
            return

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` to `offset`."""
        size = data.nbytes
        if size >= _UNLOCKED_BYTES and not data.readonly:
            ctypes.memmove(self._base + offset, ctypes.addressof(ctypes.c_char.from_buffer(data)), size)
        else:
            self.view[offset : offset + size] = data if data.format == "B" else data.cast("B")

    def read(self, offset: int, size: int, buffer: memoryview) -> None:
        """Copy `size` bytes from `offset` to the beginning of `buffer`."""
        if size >= _UNLOCKED_BYTES:
            ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), self._base + offset, size)
        else:
            target = buffer if buffer.format == "B" else buffer.cast("B")
            target[:size] = self.view[offset : offset + size]

    def populate(self, offset: int, size: int) -> bool:
        """Give pages to a range, whatever lies there staying as it is; False where the kernel cannot. Other threads run."""
        libc = ctypes.CDLL(None)
        return bool(
            libc.madvise(ctypes.c_void_p(self._base + offset), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0
        )


class Pages:
    """How far an arena is in use, for the thread that touches its pages."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._used = 0
        self._stopped = False

    def used(self, end: int) -> None:
        """Bytes up to `end` are in use, or about to be."""
        if end > self._used:
            with self._changed:
                self._used = max(self._used, end)
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def wait_for(self, offset: int) -> bool:
        """Sleep until the page at `offset` will soon be used; False if the store is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or offset < self._used + _AHEAD_BYTES)
            return not self._stopped

    def pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, _POPULATE_PAUSE)


def populate(arena: Arena, pages: Pages) -> None:
    """Touch the arena's pages from its beginning on, in pieces, a little ahead of those that are used."""
    lower_priority(_POPULATE_NICE)
    for offset in range(0, arena.size, _POPULATE_BYTES):
        if not pages.wait_for(offset) or not arena.populate(offset, min(_POPULATE_BYTES, arena.size - offset)):
            return
        pages.pause()
