"""Why did it miss? A bounded memory of recent token sequences, compared with a prompt on request."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

MissReason = Literal[
    "all_cached", "never_seen", "diverged", "evicted", "shorter_than_block", "other_tenant", "disabled"
]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why reuse ended where it did; `diverged_at` is a token position in the prompt."""

    reason: MissReason
    diverged_at: int | None
    detail: str


class MissHistory:
    """The token sequences seen last, at most `capacity` tokens of them (4 bytes each).

    `add` keeps the array that it is given, so that tokens generated later are remembered without another call.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: deque[tuple[bytes, array[int]]] = deque()

    def add(self, salt: bytes, tokens: array[int]) -> None:
        if not self._capacity:
            return
        self._seen.append((salt, tokens))
        held = sum(len(known) for _, known in self._seen)
        while held > self._capacity and len(self._seen) > 1:
            held -= len(self._seen.popleft()[1])

    def recent(self, salt: bytes, count: int) -> list[array[int]]:
        """Copies of a tenant's `count` newest sequences, the newest first."""
        mine = (tokens for known, tokens in reversed(self._seen) if known == salt)
        return [tokens[:] for tokens in islice(mine, count)]

    def explain(
        self, salt: bytes, prompt: array[int], cached: int, block_size: int, *, tell_other_tenants: bool = False
    ) -> Explanation:
        """Why `cached` of the prompt's tokens were reused and no more. Costs O(tokens remembered)."""
        length = len(prompt)
        if cached >= length - 1:
            return Explanation("all_cached", None, "Everything but the last token, which gives the logits, was cached.")
        if length < block_size:
            detail = f"The prompt has {length} tokens; only full blocks of {block_size} are shared."
            return Explanation("shorter_than_block", None, detail)
        same = self._nearest(prompt, lambda other: other == salt)
        next_block = (cached // block_size + 1) * block_size
        # A sequence's newest token is not computed yet: one token beyond the reused ones was never there to be evicted.
        if same >= next_block and same > cached + 1:
            detail = f"Tokens up to {same} were computed before, but blocks after token {cached} have been evicted."
            return Explanation("evicted", None, detail)
        if tell_other_tenants and self._nearest(prompt, lambda other: other != salt) >= next_block:
            detail = "Another tenant has this prefix; tenants do not share."
            return Explanation("other_tenant", None, detail)
        if same == length:
            detail = f"The whole prompt was seen before; its last {length - cached} tokens do not fill a shared block."
            return Explanation("shorter_than_block", None, detail)
        if same < cached:  # what was reused is older than this memory
            return Explanation(
                "never_seen", None, f"No recent prompt agrees beyond the {cached} tokens that were cached."
            )
        if same == 0:
            return Explanation("never_seen", None, "No recent prompt begins with the same token.")
        detail = f"The nearest recent prompt agrees in {same} tokens and differs at position {same}."
        return Explanation("diverged", same, detail)

    def _nearest(self, prompt: array[int], counts: Callable[[bytes], bool]) -> int:
        best = 0
        for salt, tokens in self._seen:
            if tokens is not prompt and counts(salt):
                best = max(best, common_prefix_length(prompt, tokens))
        return best


def common_prefix_length(first: array[int], second: array[int]) -> int:
    """Number of leading items that agree: a binary search whose steps are memory comparisons."""
    a, b = memoryview(first), memoryview(second)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
