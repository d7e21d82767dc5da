"""Copies by calls of CUDA's driver, of which one for host memory is compiled here: what is given to them is what they read."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from direct_engine import Make, direct

import foreword.offload.direct_tier
from foreword.offload.copy_calls import CopyCall
from foreword.offload.ring import DriverCopies, TierMemory

assert direct  # a fixture
# The calls of CUDA's driver that `CopyCall` makes, with the types of cuda.h (13.0): what it gives them is what they read.
DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef struct { unsigned type; int id; } Location;
typedef struct { unsigned order; Location source, target; unsigned flags; } Attributes;
int calls, last_order;
static int batch(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count, Attributes *attributes, size_t *first,
                 size_t number, size_t *failed, void *stream) {
  calls++;
  last_order = attributes->order;
  if (stream != (void *)77 || number != 1 || *first || attributes->flags || attributes->source.type) return 1;
  for (size_t i = 0; i < count; i++) {
    if (sizes[i] > 1 << 20) { *failed = i; return 2; }
    memcpy((void *)targets[i], (void *)sources[i], sizes[i]);
  }
  return 0;
}
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *stream) {
  calls++;
  if (stream != (void *)77) return 1;
  memcpy((void *)target, (void *)source, size);
  return 0;
}
#ifdef BATCH
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
  *status = 0;
  if (strcmp(name, "cuMemcpyBatchAsync") || version != 12080 || flags) return 1;
  *found = (void *)batch;
  return 0;
}
#else
void *unused = (void *)batch;
#endif
"""


def made_driver(folder: Path, has_batch: bool) -> ctypes.CDLL:
    """A driver for host memory, which knows stream 77 only."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "driver.c", folder / "driver.so"
    source.write_text(DRIVER)
    defined = ["-DBATCH"] if has_batch else []
    subprocess.run([compiler, "-shared", "-fPIC", *defined, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("has_batch", [True, False])
def test_copies_by_calls_of_the_driver(tmp_path: Path, has_batch: bool) -> None:
    """Scattered rows arrive with the batch call, which an old driver does not have, and with a call for each block."""
    driver = made_driver(tmp_path, has_batch)
    call = CopyCall(torch.device("cpu"), driver)
    assert call.name == ("cuMemcpyBatchAsync" if has_batch else "cuMemcpyAsync for each block")
    stream = types.SimpleNamespace(cuda_stream=77)
    rows, copied = torch.randint(0, 255, (9, 64), dtype=torch.uint8), torch.zeros(9, 64, dtype=torch.uint8)
    order = torch.randperm(9)
    sources = (rows.data_ptr() + 64 * order).numpy()
    targets, sizes = (copied.data_ptr() + 64 * torch.arange(9)).numpy(), np.full(9, 64)
    for in_order in (True, False):
        copied.zero_()
        call(targets, sources, sizes, stream, in_order=in_order)
        assert torch.equal(copied, rows[order])
        if has_batch:
            assert ctypes.c_int.in_dll(driver, "last_order").value == (1 if in_order else 3)
    assert ctypes.c_int.in_dll(driver, "calls").value == (2 if has_batch else 18)
    call(targets[:0], sources[:0], targets[:0], stream, in_order=True)
    if has_batch:
        with pytest.raises(RuntimeError, match="error 2 at 3"):
            call(targets, sources, np.array([64] * 3 + [1 << 21] + [64] * 5), stream, in_order=True)
    wrong = types.SimpleNamespace(cuda_stream=78)
    with pytest.raises(RuntimeError, match="error 1"):
        call(targets, sources, sizes, wrong, in_order=True)


@pytest.mark.parametrize("has_batch", [True, False])
def test_a_ring_with_the_calls_of_a_driver(
    direct: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_batch: bool,
) -> None:
    """Blocks are saved and loaded by them as by PyTorch, with one batch for a piece of the ring, whichever slots it has."""
    driver, stream = made_driver(tmp_path, has_batch), types.SimpleNamespace(cuda_stream=77)
    copies = DriverCopies(CopyCall(torch.device("cpu"), driver), lambda: stream)
    monkeypatch.setattr(foreword.offload.direct_tier, "copies_of", lambda device: copies)
    # A load is lent four blocks at once: half of the half of the tier that loads may have.
    engine: Any = direct(tier_blocks=20)
    engine.store(4, 10)
    engine.store(5, 5)
    engine.store(6, 4)
    engine.store(7, 4)  # into slots of which some were free, and others of evicted blocks
    engine.blocks.zero_()
    before = ctypes.c_int.in_dll(driver, "calls").value
    assert engine.await_load(engine.load(7, range(4))) == 4 and engine.values(range(24)) == [7] * 4 + [0] * 20
    calls = ctypes.c_int.in_dll(driver, "calls").value - before
    assert calls == 1 if has_batch else calls > 1
    assert engine.await_load(engine.load(6, range(4))) == 4 and engine.values(range(4)) == [6] * 4


@pytest.mark.parametrize("cut", [1 << 60, 250])
def test_what_is_copied_together(cut: int) -> None:
    """Consecutive slots in one piece, and no copy crosses a piece, or a registration of memory; all bytes are there once."""
    memory = TierMemory(torch.zeros(1200, dtype=torch.uint8), 100, cut)
    slots, room = [3, 4, 5, 0, 1, 7, 8, 9, 11], 4
    spans = memory.spans(slots, room)
    found = []
    for number in range(3):
        part = (one[spans.of(number)].tolist() for one in (spans.at, spans.start, spans.size))
        for at, start, size in zip(*part, strict=True):
            assert at + size <= room * 100 and start // cut == (start + size - 1) // cut
            found += [(number * room * 100 + at + byte, start + byte) for byte in range(size)]
    wanted = [(100 * place + byte, 100 * slot + byte) for place, slot in enumerate(slots) for byte in range(100)]
    assert found == wanted
    if cut > 1200:
        assert spans.size.tolist() == [300, 100, 100, 300, 100] and list(spans.first) == [0, 2, 4, 5]
