"""Explain cache misses: recent token sequences, kept within a bound and compared with a prompt."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from foreword.blocks.common_prefixes import common_prefix_length
from foreword.blocks.salt import Salt

MissReason = Literal[
    "all_cached",
    "never_seen",
    "diverged",
    "evicted",
    "checkpoint_missing",
    "shorter_than_block",
    "disabled",
]
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
