"""Cache reports: where a prompt's KV came from, in numbers and in words."""

from __future__ import annotations

from foreword.blocks.miss_history import Explanation, MissHistory
from foreword.blocks.prefix_cache import PrefixCache
from foreword.engine.request import CacheReport
from foreword.engine.sequence import SequenceState
from foreword.offload.manager import OffloadManager


class CacheReports:
    """Writes the cache reports of sequences that have just been admitted."""

    def __init__(self, cache: PrefixCache, history: MissHistory, offload: OffloadManager | None) -> None:
        self._cache = cache
        self._history = history
        self._offload = offload

    def report(self, sequence: SequenceState) -> CacheReport:
        """Why reuse ended where it did, and where the reused KV came from."""
        cached, length = sequence.cached_tokens, sequence.num_prompt
        found = Explanation("disabled", None, "Prefix caching is switched off.")
        if self._cache.enabled:
            found = self._history.explain(
                sequence.request.salt,
                sequence.table.chain.tokens,
                cached,
                self._cache.block_size,
            )
        if found.reason == "evicted" and sequence.reach > cached:
            found = _without_window(sequence.reach)
        loaded = self.loaded_tokens(sequence)
        return CacheReport(
            prompt_tokens=length,
            cached_tokens=cached,
            device_tokens=sequence.shared_tokens - sum(loaded.values()),
            copied_tokens=cached - sequence.shared_tokens,
            computed_tokens=length - cached,
            reason=found.reason,
            diverged_at=found.diverged_at,
            detail=found.detail,
            loaded_tokens=loaded,
            transferred_tokens=self.transferred_tokens(sequence),
            public_tokens=min(cached, sequence.table.chain.public * self._cache.block_size),
        )

    def loaded_tokens(self, sequence: SequenceState) -> dict[str, int]:
        """Cached prompt tokens by the store tier, or the other instance, that had them. A prompt that is cached to its end
        recomputes its last token."""
        counts: dict[str, int] = {}
        loaded, transferred, cached = sequence.loaded, sequence.transferred, sequence.cached_tokens
        if loaded is not None and self._offload is not None:
            # Loaded KV may reach beyond the cached tokens of the prompt: into what a continued request had generated.
            end = cached if transferred is None else min(cached, transferred.start)
            counts = self._offload.tokens_by_tier(loaded.tiers, self._cache.block_size, end - loaded.start)
        if transferred is not None and cached > transferred.start:
            counts[transferred.origin] = cached - transferred.start
        return counts

    def transferred_tokens(self, sequence: SequenceState) -> dict[str, int]:
        """Prompt tokens whose KV another instance sent, whether it had them cached or computed them."""
        arrival = sequence.transferred
        if arrival is None or arrival.tokens == arrival.start:
            return {}
        return {arrival.origin: arrival.tokens - arrival.start}


def _without_window(reach: int) -> Explanation:
    detail = f"The KV of tokens up to {reach} is cached, but not that of a window from which the model can continue."
    return Explanation("checkpoint_missing", None, detail)
