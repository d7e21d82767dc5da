"""Gives memory that malloc holds and nothing uses back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final


def _found() -> Callable[[int], object]:
    """`malloc_trim` of glibc; elsewhere nothing is done, and allocators that do this themselves are common."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return lambda _: None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return trim


_trim: Final = _found()


def release_unused() -> None:
    """glibc keeps what is freed between pieces in use, in an arena per few threads. Takes some milliseconds, in which other
    threads may wait for memory; without the interpreter's lock."""
    _trim(0)
