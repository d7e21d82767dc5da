"""Which tokens a sequence has, and how often each was generated: what penalties depend on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class TokenCounts:
    """The distinct tokens of a growing sequence and how often each was generated, kept from step to step on one device.

    It depends on nothing but the tokens: wherever a sequence continues, it is made again from them.
    """

    def __init__(self) -> None:
        self._length = -2  # no length is one more
        self._places: dict[int, int] = {}
        self._tokens = self._generated = torch.empty(0)

    def follow(self, tokens: Sequence[int], num_prompt: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Distinct tokens (int64) and how often each was generated (float32), valid until the next call. Constant
        time where there is one token more than at the last call."""
        if len(tokens) - self._length == 1:
            self._append(tokens[-1])
        elif len(tokens) != self._length:
            self._count(tokens, num_prompt, device)
        self._length = len(tokens)
        distinct = len(self._places)
        return self._tokens[:distinct], self._generated[:distinct]

    def _count(self, tokens: Sequence[int], num_prompt: int, device: torch.device) -> None:
        every = np.array(tokens, dtype=np.int64)
        distinct = np.unique(every)
        generated = np.zeros(len(distinct), dtype=np.float32)
        found, times = np.unique(every[num_prompt:], return_counts=True)
        generated[np.searchsorted(distinct, found)] = times
        self._places = dict(zip(distinct.tolist(), range(len(distinct)), strict=True))
        self._tokens = torch.from_numpy(distinct).to(device)
        self._generated = torch.from_numpy(generated).to(device)

    def _append(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            more = max(256, place)
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros(more)))
            self._generated = torch.cat((self._generated, self._generated.new_zeros(more)))
        self._tokens[place] = token
        self._generated[place] += 1
