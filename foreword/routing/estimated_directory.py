"""What a replica probably holds where it sends no KV events. Pure.

`EstimatedBlocks` models one replica's cache as an LRU of the prompts sent there. The `cached_tokens` of its responses
correct the model: a replica that finds more than expected has more room than its device (tiers below it, or a store).
Of a response only the length is known. That the next turn repeats the response is a guess and is accounted as one.

`InFlightPrefixes` tracks prompts that are being computed, which events do not report either: the next request with the same
prefix should follow instead of computing it on another replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from foreword.errors import ConfigError
from foreword.routing.directory import leading

_MIN_FACTOR: Final = 1 / 16
_SHRINK: Final = 0.95
_GROW: Final = 1.01
# Growth when more was found than expected.
_GROW_BEYOND: Final = 1.1
# Upper bound of tracked blocks, unless the capacity itself is larger.
_MAX_BLOCKS: Final = 1 << 19
_MAX_OUTPUTS: Final = 1 << 14


@dataclass(slots=True)
class EstimateAccuracy:
    """Expected and actual cached prompt tokens, summed over all responses that report them."""

    expected_tokens: int = 0
    actual_tokens: int = 0
    overestimated_tokens: int = 0
    underestimated_tokens: int = 0

    def record(self, expected: int, actual: int) -> None:
        self.expected_tokens += expected
        self.actual_tokens += actual
        self.overestimated_tokens += max(expected - actual, 0)
        self.underestimated_tokens += max(actual - expected, 0)


class EstimatedBlocks:
    """An LRU of block keys. The last blocks of a prompt count as older than its first ones, so they are evicted first.

    Args:
        capacity_blocks: capacity of the replica's device. An entry takes about 200 bytes. At most half a million are kept,
            or the capacity if that is more.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ConfigError(f"a replica's capacity must be at least one block, not {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self.factor = 1.0
        self._max_blocks = max(_MAX_BLOCKS, capacity_blocks)
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        # Last full block of finished prompts -> blocks that their output filled.
        self._outputs: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def limit(self) -> int:
        """Estimated capacity in blocks: the configured capacity times a learned factor of at least 1/16."""
        return max(min(int(self.capacity_blocks * self.factor), self._max_blocks), 1)

    def sent(self, keys: Sequence[bytes]) -> None:
        """Note that a prompt was sent to the replica."""
        known = self.known(keys)
        if 0 < known < len(keys):
            # The prompt shows what follows the earlier prompt: the guessed output is not needed any more.
            self._outputs.pop(keys[known - 1], None)
        held = self._keys
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        limit = self.limit
        while len(held) > limit:
            held.popitem(last=False)

    def output(self, keys: Sequence[bytes], blocks: int) -> None:
        """Note that a prompt's output filled `blocks` blocks after the prompt's full ones."""
        if keys and blocks > 0:
            self._outputs[keys[-1]] = blocks
            self._outputs.move_to_end(keys[-1])
            if len(self._outputs) > _MAX_OUTPUTS:
                self._outputs.popitem(last=False)

    def known(self, keys: Sequence[bytes], guess: int = 0) -> int:
        """Leading blocks that were sent to the replica and are probably still cached. Faster if they are `guess`."""
        return leading(keys, self._keys, guess)

    def leading(self, keys: Sequence[bytes], guess: int = 0) -> int:
        """Leading blocks that are probably cached: the known ones plus the output of a prompt that ended there."""
        known = leading(keys, self._keys, guess)
        guessed = self._outputs.get(keys[known - 1], 0) if known and self._outputs else 0
        return min(known + guessed, len(keys)) if guessed else known

    def correct(self, keys: Sequence[bytes], expected: int, actual: int, known: int | None = None) -> None:
        """Adjust the limit: `expected` blocks of a prompt should be cached, `known` (None: all) without guessing, and
        `actual` were.

        Fewer than known: the limit shrinks by 5 % and the oldest blocks are forgotten. More than expected: the limit grows
        by 10 %, also beyond the device's capacity. As expected: it grows by 1 % up to the capacity. The prompt's own blocks
        are cached now in any case.
        """
        if actual < min(expected, expected if known is None else known):
            self.factor = max(self.factor * _SHRINK, _MIN_FACTOR)
        elif actual > expected:
            self.factor = min(self.factor * _GROW_BEYOND, self._max_blocks / self.capacity_blocks)
        elif expected:
            self.factor = max(min(self.factor * _GROW, 1.0), self.factor)
        self.sent(keys)


class InFlightPrefixes:
    """Blocks of prompts that were sent to one replica and have no first token yet."""

    def __init__(self) -> None:
        self._users: dict[bytes, int] = {}

    def add(self, keys: Sequence[bytes]) -> None:
        users = self._users
        for key in keys:
            users[key] = users.get(key, 0) + 1

    def remove(self, keys: Sequence[bytes]) -> None:
        """Undo one `add`."""
        users = self._users
        for key in keys:
            users[key] -= 1
            if not users[key]:
                del users[key]

    def leading(self, keys: Sequence[bytes], above: int = 0) -> int:
        """Leading blocks that are being computed; 0 if they are not more than `above`."""
        is_more = above < len(keys) and keys[above] in self._users
        return leading(keys, self._users) if is_more else 0

    def __len__(self) -> int:
        return len(self._users)
