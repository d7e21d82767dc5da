"""What a replica probably holds, where it sends no events. Pure.

`Estimate` remembers what was sent to one replica: the last blocks that fit into its memory, as it would keep them itself, and
is corrected by what its answers say they found (`cached_tokens`). `InFlight` knows what is being computed at this moment, which
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
        capacity_blocks: what the replica's memory holds, all its own tiers together. An entry takes about 200 bytes.

    Raises ConfigError if that is less than one block.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ConfigError(f"a replica's capacity must be at least one block, not {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self.factor = 1.0
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def limit(self) -> int:
        """Blocks that are believed to stay: the capacity times a factor between 1/16 and 1, which answers correct."""
        return max(int(self.capacity_blocks * self.factor), 1)

    def sent(self, keys: Sequence[bytes]) -> None:
        """A prompt was sent there, or an answer's blocks were added."""
        held = self._keys
        for key in reversed(keys):
            short = key[:_SHORT_KEY]
            held[short] = None
            held.move_to_end(short)
        self._shrink()

    def leading(self, keys: Sequence[bytes]) -> int:
        """Leading blocks that are probably there."""
        held = self._keys
        return leading(len(keys), lambda i: keys[i][:_SHORT_KEY] in held)

    def answered(self, keys: Sequence[bytes], expected: int, actual: int) -> None:
        """A prompt was expected to find `expected` blocks and found `actual`.

        If it found less, the replica keeps less than was believed: the limit becomes 5 % smaller, and what is oldest is
        forgotten. The prompt's own blocks are there now in any case. If it found what was expected, the limit grows by 1 %.
        """
        if actual < expected:
            self.factor = max(self.factor * _SHRINK, _LEAST_FACTOR)
        elif expected:
            self.factor = min(self.factor * _GROW, 1.0)
        self.sent(keys)

    def cleared(self) -> None:
        self._keys.clear()

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
