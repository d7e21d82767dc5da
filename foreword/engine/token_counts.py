"""Which tokens a sequence has, and how often each was generated: what penalties depend on. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The distinct tokens of a growing sequence and how often each was generated, kept from step to step.

    It depends on nothing but the tokens: wherever a sequence continues, it is made again from them.
    """

    def __init__(self) -> None:
        self._length = -2  # no length is one more
        self._places: dict[int, int] = {}
        self._tokens: NDArray[np.int64] = np.empty(0, np.int64)
        self._generated: NDArray[np.float32] = np.empty(0, np.float32)

    def follow(self, tokens: Sequence[int], num_prompt: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Distinct tokens and how often each was generated, valid until the next call. Constant time where there is one token
        more than at the last call."""
        if len(tokens) - self._length == 1:
            self._append(tokens[-1])
        elif len(tokens) != self._length:
            self._count(tokens, num_prompt)
        self._length = len(tokens)
        distinct = len(self._places)
        return self._tokens[:distinct], self._generated[:distinct]

    def _count(self, tokens: Sequence[int], num_prompt: int) -> None:
        every = np.array(tokens, dtype=np.int64)
        distinct = np.unique(every)
        generated = np.zeros(len(distinct), dtype=np.float32)
        found, times = np.unique(every[num_prompt:], return_counts=True)
        generated[np.searchsorted(distinct, found)] = times
        self._places = dict(zip(distinct.tolist(), range(len(distinct)), strict=True))
        self._tokens, self._generated = distinct, generated

    def _append(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            more = max(256, place)
            self._tokens = _lengthened(self._tokens, more)
            self._generated = _lengthened(self._generated, more)
        self._tokens[place] = token
        self._generated[place] += 1


def _lengthened(array: NDArray[Any], more: int) -> NDArray[Any]:
    return np.concatenate((array, np.zeros(more, array.dtype)))
