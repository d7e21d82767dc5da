"""Where a prompt's KV came from, in numbers and in words."""

from __future__ import annotations

from foreword.blocks import PrefixCache
from foreword.blocks.miss_history import Explanation, MissHistory
from foreword.engine.request import CacheReport
from foreword.engine.sequence import SequenceState
from foreword.offload.manager import OffloadManager


class Reports:
    """Explains sequences that have just been admitted."""

    def __init__(
        self, cache: PrefixCache, history: MissHistory, offload: OffloadManager | None, *, tell_other_tenants: bool
    ) -> None:
        self._cache = cache
        self._history = history
        self._off_device = offload
        self._tell_other_tenants = tell_other_tenants

    def report(self, sequence: SequenceState) -> CacheReport:
        """Why did it hit, and why did the rest miss?"""
        cached, length = sequence.cached_tokens, sequence.num_prompt
        found = Explanation("disabled", None, "Prefix caching is switched off.")
        if self._cache.enabled:
            found = self._history.explain(
                sequence.request.salt,
                sequence.table.chain.tokens,
                cached,
                self._cache.block_size,
                tell_other_tenants=self._tell_other_tenants,
            )
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
        )

    def loaded_tokens(self, sequence: SequenceState) -> dict[str, int]:
        """Prompt tokens that came from each tier, or had been cached by another instance. A prompt that is cached to its end
        computes its last token again."""
        counts: dict[str, int] = {}
        if sequence.loaded and self._off_device is not None:
            tiers, size = self._off_device.store.tiers, self._cache.block_size
            for number in sequence.loaded:
                counts[tiers[number].label] = counts.get(tiers[number].label, 0) + size
            counts[tiers[sequence.loaded[-1]].label] -= sequence.recomputed
        if sequence.arrival is not None and sequence.cached_tokens > sequence.arrived_from:
            counts[sequence.arrival.origin] = sequence.cached_tokens - sequence.arrived_from
        return counts

    def transferred_tokens(self, sequence: SequenceState) -> dict[str, int]:
        """Prompt tokens whose KV another instance has sent, cached there or not."""
        arrival = sequence.arrival
        if arrival is None:
            return {}
        here = sequence.num_prompt if arrival.token is not None else arrival.blocks * self._cache.block_size
        came = here - sequence.arrived_from
        return {arrival.origin: came} if came else {}
