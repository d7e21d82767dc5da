"""Cache reports: where a prompt's KV came from, in numbers and in words, and why reuse ended where it did: recent token
sequences are kept within a bound and compared with the prompt."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import islice

from foreword.blocks.common_prefixes import common_prefix_length
from foreword.blocks.prefix_cache import PrefixCache
from foreword.blocks.salt import Salt
from foreword.engine.request import CacheReport, MissReason
from foreword.engine.sequence import SequenceState
from foreword.offload.manager import OffloadManager

# Texts that `add` measures again.
_MEASURED_AGAIN = 4
# A short text takes far more memory than its tokens, and a comparison at each miss.
_MOST_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the cached prefix ended where it did. `diverged_at` is a token position in the prompt."""

    reason: MissReason
    diverged_at: int | None
    detail: str


@dataclass(slots=True)
class _RecentText:
    """The tokens of a salt; `counted` of them are in the history's total."""

    salt: Salt
    tokens: array[int]
    counted: int


class MissHistory:
    """The most recent token sequences: about `capacity` tokens (4 bytes each), and at most 4,096 sequences.

    `add` keeps the array itself, not a copy: tokens that the engine appends later are part of the history. They are counted
    a little later, when a following `add` measures their text again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._texts: dict[int, _RecentText] = {}  # by number, oldest first
        self._oldest = 0
        self._next = 0
        self._measure_next = 0
        self._total = 0

    def add(self, salt: Salt, tokens: array[int]) -> None:
        """Remember a sequence, and forget the oldest ones beyond the capacity."""
        if not self._capacity:
            return
        self._texts[self._next] = _RecentText(salt, tokens, len(tokens))
        self._next += 1
        self._total += len(tokens)
        self._count_growth()
        while len(self._texts) > (_MOST_TEXTS if self._total <= self._capacity else 1):
            self._total -= self._texts.pop(self._oldest).counted
            self._oldest += 1

    def _count_growth(self) -> None:
        """Count tokens that were appended since the last count, for a few texts at a time, in turn."""
        for _ in range(_MEASURED_AGAIN):
            if self._measure_next not in self._texts:
                self._measure_next = self._oldest
            text = self._texts[self._measure_next]
            self._total += len(text.tokens) - text.counted
            text.counted = len(text.tokens)
            self._measure_next += 1

    def forget(self, salt: Salt) -> None:
        """Forget what requests with a salt had, without a client's salt those of the whole tenant."""
        gone = {one for one in {text.salt for text in self._texts.values()} if one.digest.startswith(salt.prefix)}
        for text in self._texts.values():
            if text.salt in gone:
                self._total -= text.counted
                text.tokens, text.counted = array("I"), 0

    def recent(self, salt: Salt, count: int) -> list[array[int]]:
        """Copies of a salt's `count` newest sequences, newest first."""
        newest_first = reversed(self._texts.values())
        return [text.tokens[:] for text in islice((t for t in newest_first if t.salt == salt and t.tokens), count)]

    def explain(self, salt: Salt, prompt: array[int], cached: int, block_size: int) -> Explanation:
        """Explain why only `cached` of the prompt's tokens were cached, by what the salt had. Costs O(tokens remembered)."""
        length = len(prompt)
        if cached >= length - 1:
            return Explanation("all_cached", None, "Everything but the last token, which gives the logits, was cached.")
        if length < block_size:
            detail = f"The prompt has {length} tokens, fewer than a block of {block_size}."
            return Explanation("shorter_than_block", None, detail)
        same = self._longest_match(prompt, salt)
        next_block = (cached // block_size + 1) * block_size
        # The KV of a sequence's newest token is not computed yet: a match that is one token longer is no eviction.
        if same >= next_block and same > cached + 1:
            detail = f"Tokens up to {same} were computed before, but blocks after token {cached} have been evicted."
            return Explanation("evicted", None, detail)
        if same == length:
            detail = f"The whole prompt was seen before; its last {length - cached} tokens do not fill a block."
            return Explanation("shorter_than_block", None, detail)
        if same < cached:  # the cached prefix is older than this history
            detail = f"No recent prompt matches beyond the {cached} tokens that were cached."
            if length - cached < block_size and cached % block_size == 0:
                detail = f"All full blocks were cached; the last {length - cached} tokens do not fill a block."
            return Explanation("never_seen", None, detail)
        if same == 0:
            return Explanation("never_seen", None, "No recent prompt begins with the same token.")
        detail = f"The closest recent prompt matches {same} tokens and differs at position {same}."
        return Explanation("diverged", same, detail)

    def _longest_match(self, prompt: array[int], salt: Salt) -> int:
        """Length of the longest prefix that the prompt shares with another text of the salt."""
        others = (text for text in self._texts.values() if text.tokens is not prompt and text.salt == salt)
        return max((common_prefix_length(prompt, text.tokens) for text in others), default=0)


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
            counts = self._offload.store.tokens_by_tier(loaded.tiers, self._cache.block_size, end - loaded.start)
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
