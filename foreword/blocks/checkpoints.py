"""Checkpoints: the positions from which later requests can continue, and the blocks that are saved for them.

Groups with full attention save every block. The others (sliding window, chunks, recurrent state) need few blocks for a
position, see `blocks/resume.py`: a plan says which ones a request saves. A checkpoint is made

    at the end of the prompt      the next turn, or the same prompt again
    at the end of the turn        the next turn, if it repeats the answer as it was
    where prompts diverged        the second prompt with this prefix saves it for the third
    on request                    the end of a named prefix, cache control
    at a spacing                  shortened prompts, and the first prompt that diverges. The spacing is the smallest power of
                                  two times the alignment that keeps the budget

The first four are always made. The budget is a share of the bytes that saving every block would take. Short prompts of models
without recurrent state may save every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from foreword.blocks.resume import GroupKind, KVGroup, alignment

# With five window layers to one of full attention, this stores 31 % of the bytes of all blocks.
SHARE: Final = 1 / 6
# The blocks of this many leading tokens may always be saved. Not for recurrent state: a state is as large as the KV of
# hundreds of tokens.
DENSE_TOKENS: Final = 1536


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
        self._sparse = [(number, group) for number, group in enumerate(groups) if not group.whole]
        self._bytes = block_bytes
        self._blocks: list[set[int]] = [set() for _ in groups]
        self._positions: set[int] = set()
        self.add(prompt_tokens)
        # A request computes at least one token: if the prompt ends at a boundary, the same prompt continues before it.
        self.add(prompt_tokens - 1)
        if cached > resumed:
            self.add(min(cached, prompt_tokens))
        self._add_spaced(resumed, prompt_tokens)

    @property
    def positions(self) -> list[int]:
        """The checkpoints in order."""
        return sorted(self._positions)

    def add(self, position: int) -> int:
        """Make a checkpoint at the last boundary up to `position`. Returns it; 0 if there is none.

        Call it with the length of prompt and answer at the end of the turn.
        """
        position -= position % self._step
        if position <= 0 or position in self._positions:
            return max(position, 0)
        self._positions.add(position)
        for number, group in self._sparse:
            self._blocks[number].update(group.needed(position))
        return position

    def offer(self, position: int, following: int) -> bool:
        """Make a checkpoint at `position` if it is the last one possible before a planned one.

        For recurrent state that exists only at the ends of chunks: `position` and `following` are the start and the end of
        the chunk that is computed next.
        """
        if position % self._step or not any(position <= planned < following for planned in self._positions):
            return False
        return self.add(position) > 0

    def wanted(self, group: int, block: int) -> bool:
        """Whether the request should save this block of this group once it is computed."""
        return self._groups[group].whole or block in self._blocks[group]

    def _add_spaced(self, resumed: int, prompt_tokens: int) -> None:
        spacing = self._spacing(resumed, prompt_tokens)
        if spacing:
            for position in range(resumed - resumed % spacing + spacing, prompt_tokens + 1, spacing):
                self.add(position)

    def _spacing(self, resumed: int, prompt_tokens: int) -> int:
        """The smallest distance of checkpoints that keeps the budget; 0 if there is none."""
        budget = self._budget(resumed, prompt_tokens)
        needed = self._needed_bytes(resumed)
        complete = self._all_bytes(resumed, prompt_tokens)
        spacing = self._step
        while spacing <= prompt_tokens:
            count = prompt_tokens // spacing - resumed // spacing
            if min(needed + count * self._bytes_per_checkpoint(spacing), complete) <= budget:
                return spacing
            spacing *= 2
        return 0

    def _budget(self, resumed: int, prompt_tokens: int) -> float:
        share = SHARE * self._all_bytes(resumed, prompt_tokens)
        if any(group.kind is GroupKind.STATE for _, group in self._sparse):
            return share
        return max(share, self._all_bytes(resumed, min(prompt_tokens, DENSE_TOKENS)))

    def _all_bytes(self, start: int, stop: int) -> int:
        """Bytes of all full blocks between two positions in the groups without full attention."""
        return sum(
            max(stop // group.block_size - start // group.block_size, 0) * self._bytes[number]
            for number, group in self._sparse
        )

    def _needed_bytes(self, start: int) -> int:
        """Bytes of the blocks behind `start` that the checkpoints so far need."""
        return sum(
            self._bytes[number] * sum(block >= start // group.block_size for block in self._blocks[number])
            for number, group in self._sparse
        )

    def _bytes_per_checkpoint(self, spacing: int) -> int:
        """Upper bound of the bytes that each checkpoint at this spacing adds."""
        return sum(_blocks_per_checkpoint(group, spacing) * self._bytes[number] for number, group in self._sparse)


def _blocks_per_checkpoint(group: KVGroup, spacing: int) -> int:
    if group.kind is GroupKind.STATE:
        return 1
    if group.kind is GroupKind.CHUNKED:
        return 0 if spacing % group.span == 0 else min(-(-group.span // group.block_size), spacing // group.block_size)
    return min(-(-(group.span - 1) // group.block_size), spacing // group.block_size)
