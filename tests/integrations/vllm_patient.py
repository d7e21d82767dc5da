"""The connector for tests of loads: it loads even if this machine is slow and computing would be faster."""

from __future__ import annotations

import torch

from foreword.integrations.vllm import connector as vllm
from foreword.store.tier_counters import Rate


class _Unknown(Rate):
    """A rate that is never measured."""

    def note(self, amount: float, seconds: float) -> None:
        """Ignored."""


class PatientConnector(vllm.ForewordConnector):
    """Without a measured prefill rate the connector loads everything that it finds, within `load_timeout`."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker.offload is not None
        self._worker.offload.prefill_rate = _Unknown()


# The name that the middleware for named prefixes looks for.
ForewordConnector = PatientConnector
