"""The usage ledger of a vLLM engine (`usage_ledger`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from foreword.blocks.salt import tenant_digest
from foreword.integrations.vllm.request_identity import salt_of
from foreword.ledger import UsageLedger
from foreword.usage import TokenUsage

# The HTTP status of each way to end that gives no whole answer.
_STATUS: Final = {"FINISHED_ABORTED": 499, "FINISHED_IGNORED": 400, "FINISHED_ERROR": 500}


class LedgerNotes:
    """Implements `UsageNotes` of the connector. Raises ConfigError if the file cannot be opened."""

    def __init__(self, path: str, config: Any) -> None:
        self._ledger = UsageLedger(Path(path))
        names = config.model_config.served_model_name
        self._model = names if isinstance(names, str) else names[0]
        self._prefills: dict[str, Any] = {}  # vLLM's counts of requests that will have a line

    def began(self, request: Any) -> None:
        if request.prefill_stats is not None:
            self._prefills[request.request_id] = request.prefill_stats

    def ended(self, request: Any, tiers: Mapping[str, int], weights: str) -> None:
        # The computed part of a prompt without an answer counts.
        prefill = self._prefills.pop(request.request_id, None)
        salt, output = salt_of(request), request.num_output_tokens
        prompt = request.num_prompt_tokens if output else min(request.num_computed_tokens, request.num_prompt_tokens)
        usage = TokenUsage(
            prompt=prompt,
            output=output,
            cached=0 if prefill is None else min(prefill.num_cached_tokens, prompt),
            read=dict(tiers),
            model=self._model,
            weights=weights,
        )
        tenant = tenant_digest(salt.tenant) if salt.tenant else salt.digest.hex() if salt else ""
        status, seconds = _STATUS.get(request.status.name, 200), time.time() - request.arrival_time
        self._ledger.note(request.request_id, tenant, "vllm", status, seconds, usage)

    def close(self) -> None:
        self._ledger.close()
