"""What a replica probably holds, where it sends no events. Pure.

`Estimate` remembers what was sent to one replica: the last blocks that fit into its memory, as it would keep them itself, and
is corrected by what its answers say they found (`cached_tokens`): a replica that finds more has more room than its device,
tiers below it or a store. Of an answer only the length is known; that the next turn has it behind the prompt is a guess, and
counts as one. `InFlight` knows what is being computed at this moment, which
events do not tell either: the next request with the same prefix should follow, not compute it elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from foreword.errors import ConfigError
from foreword.routing.directory import leading

_SHORT_KEY: Final = 8
_LEAST_FACTOR: Final = 1 / 16
_SHRINK: Final = 0.95
_GROW: Final = 1.01
# If more was found than was believed to be there.
_GROW_BEYOND: Final = 1.1
# Blocks that are believed to stay at most, where the capacity itself is not more.
_MOST_BLOCKS: Final = 1 << 19
_MOST_ANSWERS: Final = 1 << 14


@dataclass(slots=True)
class Accuracy:
    """Prompt tokens expected to be found, and found, over all answers that told."""

    answers: int = 0
    expected_tokens: int = 0
    actual_tokens: int = 0
    overestimated_tokens: int = 0
    underestimated_tokens: int = 0

    def note(self, expected: int, actual: int) -> None:
        self.answers += 1
        self.expected_tokens += expected
        self.actual_tokens += actual
        self.overestimated_tokens += max(expected - actual, 0)
        self.underestimated_tokens += max(actual - expected, 0)


class Estimate:
    """An LRU of block keys. A prompt's last blocks count as used before its first ones, so tails go before heads.

    Args:
        capacity_blocks: what the replica's device holds. An entry takes about 200 bytes; there are at most half a million, or
            as many as the capacity if that is more.

    Raises ConfigError if that is less than one block.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ConfigError(f"a replica's capacity must be at least one block, not {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self.factor = 1.0
        self._most = max(_MOST_BLOCKS, capacity_blocks)
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        # The last full block of prompts that were answered, and how many blocks their answers filled.
        self._answers: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def limit(self) -> int:
        """Blocks that are believed to stay: the capacity times a factor of at least 1/16, which answers correct."""
        return max(min(int(self.capacity_blocks * self.factor), self._most), 1)

    def sent(self, keys: Sequence[bytes]) -> None:
        """A prompt was sent there."""
        known = self.known(keys)
        if 0 < known < len(keys):
            # It goes on behind an answer: from now on it is known what stands there.
            self._answers.pop(keys[known - 1][:_SHORT_KEY], None)
        held = self._keys
        for key in reversed(keys):
            short = key[:_SHORT_KEY]
            held[short] = None
            held.move_to_end(short)
        self._shrink()

    def ended(self, keys: Sequence[bytes], blocks: int) -> None:
        """A prompt's answer filled so many blocks behind the prompt's full ones."""
        if keys and blocks > 0:
            self._answers[keys[-1][:_SHORT_KEY]] = blocks
            self._answers.move_to_end(keys[-1][:_SHORT_KEY])
            if len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)

    def known(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that were sent there and are believed to be there still."""
        held = self._keys
        return leading(len(keys), lambda i: keys[i][:_SHORT_KEY] in held)

    def leading(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that are probably there: those that are known, and behind them the answer, if a prompt ended there."""
        known = self.known(keys)
        guessed = self._answers.get(keys[known - 1][:_SHORT_KEY], 0) if known else 0
        return min(known + guessed, len(keys))

    def answered(self, keys: Sequence[bytes], expected: int, actual: int, known: int | None = None) -> None:
        """A prompt was expected to find `expected` blocks, of which `known` (None: all) were no guess, and found `actual`.

        If it found less than was known, the replica keeps less than was believed: the limit becomes 5 % smaller, and what is
        oldest is forgotten. The prompt's own blocks are there now in any case. If it found more than was expected, the limit
        grows by 10 %, beyond the device's capacity too; if it found what was expected, by 1 % up to that.
        """
        if actual < min(expected, expected if known is None else known):
            self.factor = max(self.factor * _SHRINK, _LEAST_FACTOR)
        elif actual > expected:
            self.factor = min(self.factor * _GROW_BEYOND, self._most / self.capacity_blocks)
        elif expected:
            self.factor = max(min(self.factor * _GROW, 1.0), self.factor)
        self.sent(keys)

    def cleared(self) -> None:
        self._keys.clear()
        self._answers.clear()

    def _shrink(self) -> None:
        limit = self.limit
        while len(self._keys) > limit:
            self._keys.popitem(last=False)


class InFlight:
    """Blocks of prompts that were sent to one replica and have no first token yet. Bounded by what is in flight."""

    def __init__(self) -> None:
        self._users: dict[bytes, int] = {}

    def add(self, keys: Sequence[bytes]) -> None:
        users = self._users
        for key in keys:
            short = key[:_SHORT_KEY]
            users[short] = users.get(short, 0) + 1

    def remove(self, keys: Sequence[bytes]) -> None:
        """Undo one `add`."""
        users = self._users
        for key in keys:
            short = key[:_SHORT_KEY]
            left = users[short] - 1
            if left:
                users[short] = left
            else:
                del users[short]

    def leading(self, keys: Sequence[bytes]) -> int:
        users = self._users
        return leading(len(keys), lambda i: keys[i][:_SHORT_KEY] in users)

    def __len__(self) -> int:
        return len(self._users)
