"""Checkpoints: the positions from which later requests can continue, and the blocks that are saved for them.

Groups with full attention save every block. The others (sliding window, chunks, recurrent state) need few blocks for a
position, see `blocks/resume.py`: a plan says which ones a request saves. A checkpoint is made

    at the end of the prompt      the next turn, or the same prompt again
    at the end of the turn        the next turn, if it repeats the answer as it was
    where prompts diverged        the second prompt with this prefix saves it for the third
    on request                    the end of a named prefix, cache control
    at a spacing                  shortened prompts, and the first prompt that diverges. The spacing is the smallest power of
                                  two times the alignment that keeps the budget
    in the first blocks           short prefixes, within the budget

The last two are limited by a budget: a share of the bytes of all blocks, and for models without recurrent state at least the
blocks of the first tokens. So such models save every block of a short prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from foreword.blocks.resume import GroupKind, KVGroup, alignment
from foreword.newest import Newest

# The share of the bytes of all blocks. More brings hits only to stores that never evict (dev/concepts/checkpoints.md).
SHARE: Final = 1 / 8
# The blocks of this many tokens may always be saved. Not for recurrent state: a state is as large as the KV of hundreds of
# tokens.
DENSE_TOKENS: Final = 1536
# The first blocks leave room in the budget for the end of a turn with an answer of this many tokens.
ANSWER_TOKENS: Final = 256
# When a session deletes replaced checkpoints, it leaves no gap larger than this share of the position behind it. States of an
# answer are as far from each other as this share of the answer.
GAP: Final = 1 / 4


class CheckpointPlan:
    """The checkpoints of one request. The plan does not know which blocks are in the store already.

    Args:
        groups: the KV groups of the model.
        block_bytes: bytes of one block of each group.
        prompt_tokens: length of the prompt.
        resumed: position from which this request continues. The budget counts blocks behind it.
        cached: leading tokens of the prompt that the groups with full attention have cached. If they are more than
            `resumed`, an earlier prompt diverged from this one there.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_bytes: Sequence[int],
        prompt_tokens: int,
        *,
        resumed: int = 0,
        cached: int = 0,
    ) -> None:
        self._groups = groups
        self._step = alignment(groups)
        self._bytes: Counter[KVGroup] = Counter()
        for group, size in zip(groups, block_bytes, strict=True):
            if not group.whole:
                self._bytes[group] += size
        self._has_states = any(group.kind is GroupKind.STATE for group in self._bytes)
        self._blocks: dict[KVGroup, set[int]] = {group: set() for group in self._bytes}
        self._positions: set[int] = set()
        self._resumed = resumed
        self._spent = 0  # bytes of the blocks of all checkpoints that this request computes
        self._prompt_end = self.add(prompt_tokens)
        # A request computes at least one token: if the prompt ends at a boundary, the same prompt continues before it.
        self._repeated = 0 < self.add(prompt_tokens - 1) <= resumed
        if cached > resumed:
            self.add(min(cached, prompt_tokens))
        self._spend(self._budget(prompt_tokens), prompt_tokens)

    @property
    def resumed(self) -> int:
        """The position from which the request continues."""
        return self._resumed

    @property
    def positions(self) -> list[int]:
        """The checkpoints in order."""
        return sorted(self._positions)

    def add(self, position: int) -> int:
        """Make a checkpoint at the last boundary up to `position`, whatever it costs. Returns it; 0 if there is none."""
        position -= position % self._step
        if position <= 0 or position in self._positions:
            return max(position, 0)
        self._spent += self._cost(position)
        self._positions.add(position)
        for group, blocks in self._blocks.items():
            blocks.update(group.needed(position))
        return position

    def end_turn(self, tokens: int) -> int:
        """Make a checkpoint at the end of the turn: `tokens` of prompt and answer. Returns it; 0 if it is not worth its bytes.

        If the whole prompt was cached, it is a repetition (a retry, another sample), and the next turn hardly ever follows it.
        A recurrent model saves the end of a session's first turn only if that saves two blocks or more.

        Where a state exists only while its boundary is computed, call `answered` instead.
        """
        if self._repeated:
            return 0
        if self._has_states and not self._resumed and tokens - self._prompt_end < 2 * self._step:
            return 0
        return self.add(tokens)

    def answered(self, position: int) -> bool:
        """The answer has reached a boundary, which may be the last one of the turn: make a checkpoint unless one is near."""
        if position - max(self._positions, default=0) < GAP * (position - self._prompt_end):
            return False
        return self.end_turn(position) == position

    def offer(self, position: int, following: int) -> bool:
        """Make a checkpoint at `position` if it is the last one possible before a planned one.

        For recurrent state that exists only at the ends of chunks: `position` and `following` are the start and the end of
        the chunk that is computed next.
        """
        if position % self._step or not any(position <= planned < following for planned in self._positions):
            return False
        return self.add(position) > 0

    def wanted(self, group: int, block: int) -> bool:
        """Whether the request should save this block of this group once it is computed.

        Checkpoints soon after `resumed` also need blocks before it. They are in the store already, unless the request
        continued from the cache of the device.
        """
        kind = self._groups[group]
        return kind.whole or block in self._blocks[kind]

    def _budget(self, prompt_tokens: int) -> float:
        share = SHARE * self._all_bytes(prompt_tokens)
        return share if self._has_states else max(share, self._all_bytes(min(prompt_tokens, DENSE_TOKENS)))

    def _spend(self, budget: float, prompt_tokens: int) -> None:
        spacing = self._spacing(budget, prompt_tokens)
        if spacing:
            first = self._resumed - self._resumed % spacing + spacing
            for position in range(first, prompt_tokens + 1, spacing):
                self.add(position)
        if self._has_states or spacing == self._step:
            return
        budget -= self._bytes_per_checkpoint(ANSWER_TOKENS)
        for position in range(self._resumed + self._step, min(prompt_tokens, DENSE_TOKENS) + 1, self._step):
            if self._spent + self._cost(position) > budget:
                break
            self.add(position)

    def _spacing(self, budget: float, prompt_tokens: int) -> int:
        """The smallest distance of checkpoints that keeps the budget; 0 if there is none."""
        complete = self._all_bytes(prompt_tokens)
        spacing = self._step
        while spacing <= prompt_tokens:
            count = prompt_tokens // spacing - self._resumed // spacing
            if min(self._spent + count * self._bytes_per_checkpoint(spacing), complete) <= budget:
                return spacing
            spacing *= 2
        return 0

    def _all_bytes(self, stop: int) -> int:
        """Bytes of all blocks before `stop` that this request computes, in the groups without full attention."""
        return sum(
            max(stop // group.block_size - self._resumed // group.block_size, 0) * size
            for group, size in self._bytes.items()
        )

    def _bytes_per_checkpoint(self, spacing: int) -> int:
        """Upper bound of the bytes that each checkpoint at this spacing adds."""
        return sum(_blocks_per_checkpoint(group, spacing) * size for group, size in self._bytes.items())

    def _cost(self, position: int) -> int:
        """Bytes of the blocks that a checkpoint at `position` adds."""
        total = 0
        for group, blocks in self._blocks.items():
            first = self._resumed // group.block_size
            total += self._bytes[group] * sum(i >= first and i not in blocks for i in group.needed(position))
        return total


@dataclass(slots=True)
class _Turn:
    """The last checkpoints of a request by position, and the last position before them at which the session keeps one."""

    ends: dict[int, bytes]
    kept: int


class ReplacedCheckpoints:
    """Finds checkpoints that a session no longer needs, so that they do not take the place of others in the store.

    A request that continues where an earlier one ended replaces its checkpoints. Some are kept for requests that go back in
    the session: the gaps between them grow with the position. Only for groups with recurrent state: the last blocks of a
    window belong to several checkpoints.

    Args:
        capacity: number of checkpoints to remember. The others stay in the store until they are evicted.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._turns: Newest[bytes, _Turn] = Newest(capacity)

    def ended(self, ends: Mapping[int, bytes], resumed: int = 0, key: bytes = b"") -> list[bytes]:
        """Note that a request ended. Returns the keys of checkpoints that can be deleted.

        Args:
            ends: position and key of its checkpoints at the ends of prompt and turn.
            resumed, key: the position from which it continued, if no other request had gone on from there before, and the
                key of the last block before it.
        """
        new = {position: ends[position] for position in sorted(ends) if position > resumed}
        if not new or any(one in self._turns for one in new.values()):  # a repetition has the ends of the first request
            return []
        turn = self._turns.get(key)
        replaced, kept = self._thin_out(turn, resumed, min(new)) if turn else ([], resumed)
        for one in turn.ends.values() if turn else ():
            self._turns.pop(one, None)
        self._turns |= dict.fromkeys(new.values(), _Turn(new, kept))
        return replaced

    def _thin_out(self, turn: _Turn, resumed: int, following: int) -> tuple[list[bytes], int]:
        """The checkpoints of a turn up to `resumed` that can be deleted, and the last position that is kept."""
        replaced: list[bytes] = []
        kept = turn.kept
        for position, after in pairwise([*(p for p in turn.ends if p <= resumed), following]):
            if after - kept <= GAP * after:
                replaced.append(turn.ends[position])
            else:
                kept = position
        return replaced, kept


def _blocks_per_checkpoint(group: KVGroup, spacing: int) -> int:
    if group.kind is GroupKind.STATE:
        return 1
    if group.kind is GroupKind.CHUNKED:
        return 0 if spacing % group.span == 0 else min(-(-group.span // group.block_size), spacing // group.block_size)
    return min(-(-(group.span - 1) // group.block_size), spacing // group.block_size)
