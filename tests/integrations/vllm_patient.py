"""The connector for tests of loads: it loads even if this machine is slow and computing would be faster."""

from __future__ import annotations

from typing import Any

from foreword.integrations.vllm import connector as vllm
from foreword.integrations.vllm.step_messages import WorkerHandshake
from foreword.store.tier_counters import Rate


class _Unknown(Rate):
    """A rate that is never measured."""

    def note(self, amount: float, seconds: float) -> None:
        """Ignored."""


class PatientConnector(vllm.ForewordConnector):
    """Without a measured prefill rate the connector loads everything that it finds, within `load_timeout`."""

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        found = super().get_handshake_metadata()
        if self._worker_side is not None and self._worker_side.offload is not None:
            self._worker_side.offload.prefill_rate = _Unknown()
        return found

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        super().set_xfer_handshake_metadata(metadata)
        if self._scheduler_side is not None and self._scheduler_side._lookup is not None:  # workers in other processes
            self._scheduler_side._lookup.prefill_rate = _Unknown()


# The name that the middleware for named prefixes looks for.
ForewordConnector = PatientConnector
