"""Copies between addresses, queued in a stream of a device: a batch of them by one call of CUDA's driver, where it has that."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Numbers = np.ndarray[Any, np.dtype[np.int64]]
# The driver's interface of CUDA 12.8, in which the call has an argument for the copy that failed.
_VERSION = 12_080
_IN_STREAM_ORDER, _ANY_ORDER = 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class CopyCall:
    """Queues copies from address to address in a stream. Which call does so is found out once.

    Args:
        driver: CUDA's driver; by default that of a CUDA device.

    Attributes:
        name: the call of the driver.
    """

    def __init__(self, device: torch.device, driver: ctypes.CDLL | None = None) -> None:
        self.name = "memmove, no CUDA"
        self._batch: Callable[..., int] | None = None
        self._single: Callable[..., int] | None = None
        if device.type == "cuda" and driver is None:  # pragma: no cover - needs a GPU
            driver = ctypes.CDLL("libcuda.so.1")
        if driver is not None:
            self._batch = _batch_call(driver)
            self.name = "cuMemcpyBatchAsync"
            if self._batch is None:
                self._single = driver.cuMemcpyAsync
                self._single.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
                self.name = "cuMemcpyAsync for each block"

    def __call__(self, targets: Numbers, sources: Numbers, sizes: Numbers, stream: Any, *, in_order: bool) -> None:
        """Copy. All three are int64, contiguous, one number for each copy. `in_order`: the sources are read when the stream is
        there, not before. Raises RuntimeError, and ValueError for lists of different lengths."""
        count = len(sizes)
        if not len(targets) == len(sources) == count:
            raise ValueError(f"{len(targets)} targets, {len(sources)} sources, {count} sizes")
        if not count:
            return
        if stream is None:
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(target, source, size)
            return
        handle = ctypes.c_void_p(stream.cuda_stream)
        if self._batch is not None:
            attributes = _Attributes(source_order=_IN_STREAM_ORDER if in_order else _ANY_ORDER)
            first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
            arrays = [one.__array_interface__["data"][0] for one in (targets, sources, sizes)]
            more = ctypes.addressof(attributes), ctypes.addressof(first), 1, ctypes.addressof(failed)
            code = self._batch(*arrays, count, *more, handle)
            if code:
                raise RuntimeError(f"cuMemcpyBatchAsync of {count} copies: error {code} at {failed.value}")
            return
        assert self._single is not None
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            code = self._single(target, source, size, handle)
            if code:
                raise RuntimeError(f"cuMemcpyAsync: error {code}")


def _batch_call(driver: ctypes.CDLL) -> Callable[..., int] | None:
    """cuMemcpyBatchAsync of the driver; None if it has none."""
    found, status = ctypes.c_void_p(), ctypes.c_int()
    try:
        find = driver.cuGetProcAddress_v2
    except AttributeError:
        return None
    find.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
    code = find(b"cuMemcpyBatchAsync", ctypes.addressof(found), _VERSION, 0, ctypes.addressof(status))
    return None if code or not found.value else _BATCH(found.value)
