"""The connector for tests of loads: it loads even if this machine is slow and computing would be faster.

Loads wait while the file exists that the variable HOLD_LOADS names; each says so with a file beside it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from foreword.integrations.vllm import connector as vllm
from foreword.integrations.vllm.step_messages import WorkerHandshake
from foreword.offload.manager import OffloadManager
from foreword.store.tier_counters import Rate


class _Unknown(Rate):
    """A rate that is never measured."""

    def note(self, amount: float, seconds: float) -> None:
        """Ignored."""


def _hold(offload: OffloadManager) -> None:
    if "HOLD_LOADS" not in os.environ or hasattr(offload, "held"):
        return
    inner, hold = offload._load, Path(os.environ["HOLD_LOADS"])

    def load(*given: Any) -> None:
        if hold.exists():
            hold.with_suffix(".reached").touch()
        while hold.exists():
            time.sleep(0.005)
        inner(*given)

    offload.held = offload._load = load  # type: ignore[attr-defined, method-assign]


class PatientConnector(vllm.ForewordConnector):
    """Without a measured prefill rate the connector loads everything that it finds, within `load_timeout`."""

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        found = super().get_handshake_metadata()
        if self._worker_side is not None and self._worker_side.offload is not None:
            self._worker_side.offload.prefill_rate = _Unknown()
            _hold(self._worker_side.offload)
        return found

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        super().set_xfer_handshake_metadata(metadata)
        if self._scheduler_side is not None and self._scheduler_side._lookup is not None:  # workers in other processes
            self._scheduler_side._lookup.prefill_rate = _Unknown()


# The name that the middleware for named prefixes looks for.
ForewordConnector = PatientConnector


def change_embeddings(model: Any) -> None:
    """Other weights in memory. A module's function, as vLLM pickles it for its workers."""
    draw = torch.Generator().manual_seed(9)
    for name, one in model.named_parameters():
        if "embed" in name:
            one.data.add_(torch.randn(one.shape, generator=draw).to(one.dtype) * one.data.std())
