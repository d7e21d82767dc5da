"""The connector as tests of what is loaded want it: no load is given up because this machine is slow just now."""

from __future__ import annotations

import torch

from foreword.integrations.vllm import connector as vllm
from foreword.store.tiered import Rate


class _Unknown(Rate):
    """A speed that is never measured."""

    def note(self, amount: float, seconds: float) -> None:
        """Forgotten."""


class PatientConnector(vllm.ForewordConnector):
    """While it is not known how fast vLLM computes, whatever the stores have is loaded, and gets `load_timeout`."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None and self._worker.offload is not None
        self._worker.offload.prefill_rate = _Unknown()


# The name that the middleware for named prefixes looks for.
ForewordConnector = PatientConnector
