"""How common a prompt's beginning is among the prompts of late: bounded, and what is long ago counts less. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_SHORT_KEY: Final = 8
# Each prompt makes those before it count 1 % less: about the last hundred count.
_FADING: Final = 0.99
_FEW: Final = 5


class Beginnings:
    """Counts of the blocks in which prompts cease to be known: about 200 bytes each, the least recently counted forgotten
    first."""

    def __init__(self, size: int = 1024) -> None:
        self._size = size
        self._counts: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._prompts = 0
        self._total = 0.0

    def __len__(self) -> int:
        return len(self._counts)

    def share(self, key: bytes | None) -> float:
        """One more prompt, of which the replicas know all up to the block with this key (None: nothing). Returns how many of
        the prompts of late were so, from 0 to 1, on the low side as long as there were few."""
        self._prompts += 1
        self._total = self._total * _FADING + 1.0
        if key is None:
            return 0.0
        count, at = self._counts.pop(key[:_SHORT_KEY], (0.0, self._prompts))
        count = count * _FADING ** (self._prompts - at) + 1.0
        self._counts[key[:_SHORT_KEY]] = count, self._prompts
        if len(self._counts) > self._size:
            self._counts.popitem(last=False)
        return (count - 1) / (self._total + _FEW)
