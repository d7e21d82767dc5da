"""How common a prefix is among recent prompts. Bounded; older prompts count less. Pure."""

from __future__ import annotations

from typing import Final

from foreword.newest import Newest

# Each prompt reduces the weight of earlier ones by 1 %: about the last hundred prompts count.
_DECAY: Final = 0.99
_PRIOR_PROMPTS: Final = 5


class PrefixPopularity:
    """Decayed counts of the last cached block of each prompt: about 200 bytes per block, LRU-bounded to `size` blocks."""

    def __init__(self, size: int = 1024) -> None:
        self._counts: Newest[bytes, tuple[float, int]] = Newest(size)
        self._prompts = 0
        self._total = 0.0

    def __len__(self) -> int:
        return len(self._counts)

    def record(self, key: bytes | None) -> float:
        """Count a prompt whose cached prefix ends with the block `key` (None: nothing is cached).

        Returns the share of recent prompts with this prefix, from 0 to 1. It is biased low while there are few prompts.
        """
        self._prompts += 1
        self._total = self._total * _DECAY + 1.0
        if key is None:
            return 0.0
        count, at = self._counts.get(key, (0.0, self._prompts))
        count = count * _DECAY ** (self._prompts - at) + 1.0
        self._counts[key] = count, self._prompts
        return (count - 1) / (self._total + _PRIOR_PROMPTS)
