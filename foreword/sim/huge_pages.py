"""The memory of a large simulation on huge pages: it is visited in no order, and misses the processor's page tables often."""

from __future__ import annotations

import ctypes
from typing import Final

_PAGE: Final = 2 << 20
# Linux 6.1 and later: replace the pages of a range by huge ones now, whatever the setting of transparent huge pages.
_MADV_COLLAPSE: Final = 25
_WRITABLE: Final = "rw-p"


def collapse() -> int:
    """Put this process's heap on huge pages where the system can. Returns the bytes that are on them.

    What has no huge page stays as it is, as does everything on systems without `MADV_COLLAPSE`.
    """
    try:
        libc = ctypes.CDLL(None)
        with open("/proc/self/maps", encoding="ascii") as file:
            ranges = [_whole_pages(line) for line in file if _is_heap(line)]
    except (OSError, TypeError):  # no such file, or no C library by that name
        return 0
    done = 0
    for start, end in ranges:
        if end > start and not libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE):
            done += end - start
    return done


def _is_heap(line: str) -> bool:
    """Whether a line of /proc/self/maps is private memory of no file: `start-end rw-p offset device inode [name]`."""
    fields = line.split()
    return fields[1] == _WRITABLE and fields[5:] in ([], ["[heap]"])


def _whole_pages(line: str) -> tuple[int, int]:
    """First and last address of the huge pages within a line's range."""
    start, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
    return -(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE
