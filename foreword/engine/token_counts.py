"""Which tokens a sequence has, and how often each was generated: what penalties depend on. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Bits of tokens are a multiple of this: a group of kernels/sampling.h.
_GROUP = 128


class TokenCounts:
    """The tokens of a growing sequence and how often each was generated, kept from step to step.

    It depends on nothing but the tokens: wherever a sequence continues, it is made again from them.

    Attributes:
        seen: a bit per token of the vocabulary, the lowest first.
        seen_address: where it is in memory.
    """

    def __init__(self) -> None:
        self._length = -2  # no length is one more
        self.seen: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.seen_address = 0
        self._places: dict[int, int] = {}
        self._generated: NDArray[np.int64] = np.empty(0, np.int64)
        self._times: NDArray[np.float32] = np.empty(0, np.float32)

    @property
    def generated(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Distinct generated tokens and how often each was generated."""
        distinct = len(self._places)
        return self._generated[:distinct], self._times[:distinct]

    def follow(self, tokens: Sequence[int], num_prompt: int, vocab: int) -> None:
        """Constant time where there is one token more than at the last call. Tokens outside of the vocabulary have no bit."""
        if len(tokens) - self._length == 1:
            self._append(tokens[-1])
        elif len(tokens) != self._length:
            self._count(tokens, num_prompt, vocab)
        self._length = len(tokens)

    def _count(self, tokens: Sequence[int], num_prompt: int, vocab: int) -> None:
        every = np.array(tokens, dtype=np.int64)
        seen = np.zeros(-(-vocab // _GROUP) * _GROUP, dtype=np.bool_)
        seen[every[every < len(seen)]] = True
        self.seen = np.packbits(seen, bitorder="little")
        self.seen_address = self.seen.ctypes.data
        self._generated, times = np.unique(every[num_prompt:], return_counts=True)
        self._times = times.astype(np.float32)
        self._places = {token: place for place, token in enumerate(self._generated.tolist())}

    def _append(self, token: int) -> None:
        if token < 8 * self.seen.size:
            self.seen[token >> 3] |= 1 << (token & 7)
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._generated):
            more = max(256, place)
            self._generated = _lengthened(self._generated, more)
            self._times = _lengthened(self._times, more)
        self._generated[place] = token
        self._times[place] += 1


def _lengthened(array: NDArray[Any], more: int) -> NDArray[Any]:
    return np.concatenate((array, np.zeros(more, array.dtype)))
