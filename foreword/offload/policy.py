"""Decide between loading blocks from a store and recomputing them, from measured speeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from foreword.offload.search import Found

# Share of the compute time that a lookup in remote tiers may take, and the first bytes from a store of unknown speed.
PATIENCE: Final = 0.1
# Times `lookup_timeout`: what lookups in local tiers may take at least, and those of a process that has not computed yet.
_LOCAL: Final = 8
_LOCAL_FIRST: Final = 40
_REMOTE_FIRST: Final = 4


def search_seconds(configured: float, compute_seconds: float | None) -> tuple[float, float]:
    """Seconds that a lookup may take in local tiers, and in remote ones.

    Args:
        configured: `store.lookup_timeout`, in seconds.
        compute_seconds: time to compute what is looked up; None while the prefill speed is not known.
    """
    if compute_seconds is None:
        return _LOCAL_FIRST * configured, _REMOTE_FIRST * configured
    return max(_LOCAL * configured, compute_seconds), max(configured, PATIENCE * compute_seconds)


def blocks_worth_loading(load_seconds: Iterable[float], compute_seconds: float) -> int:
    """How many leading blocks to load so that the most time is saved; 0 if loading saves none.

    `load_seconds` has the load time of each block, `compute_seconds` is the time to compute one block.
    """
    best, most_saved, loading = 0, 0.0, 0.0
    for count, seconds in enumerate(load_seconds, start=1):
        loading += seconds
        saved = count * compute_seconds - loading
        if saved > most_saved:
            best, most_saved = count, saved
    return best


class LoadCosts:
    """What is worth loading: the bytes of blocks, and the measured speeds of the tiers and of the engine.

    Args:
        block_bytes, block_tokens: of a block of each KV group.
        read_rates: gives bytes per second of each tier; 0.0 for one whose speed is unknown, from which a load is tried.
        prefill_rate: gives tokens per second of the engine; 0.0 while it is unknown: then all that is found is loaded.

    Attributes:
        prefill_rate: as given.
        declined: decisions to load nothing of what was found.
    """

    def __init__(
        self,
        block_bytes: Sequence[int],
        block_tokens: Sequence[int],
        read_rates: Callable[[], Sequence[float]],
        prefill_rate: Callable[[], float],
    ) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._read_rates = read_rates
        self.prefill_rate = prefill_rate
        self.declined = 0

    @property
    def seconds_per_token(self) -> float | None:
        """To compute it; None while that is unknown."""
        rate = self.prefill_rate()
        return 1 / rate if rate else None

    def blocks_worth_loading(self, places: Sequence[int]) -> int:
        """How many blocks of a model with one KV group, in chain order, to load from these tiers; 0 if computing is faster."""
        per_token = self.seconds_per_token
        if not places or per_token is None:
            return len(places)
        rates = self._read_rates()
        seconds = (self._seconds(0, place, rates) for place in places)
        best = blocks_worth_loading(seconds, per_token * self._block_tokens[0])
        self.declined += not best
        return best

    def best_position(self, found: Found, held: int) -> Found | None:
        """What a search has found, up to the position whose load saves the most time if the first `held` tokens are there; None
        if computing is faster."""
        per_token = self.seconds_per_token
        if found.position <= held or per_token is None:
            return found if found.position > held else None
        rates = self._read_rates()
        best, most = None, 0.0
        for one in (found, *found.shorter):
            wanted = (at for at in one.places.items() if (at[0][1] + 1) * self._block_tokens[at[0][0]] > held)
            loading = math.fsum(self._seconds(group, place, rates) for (group, _), place in wanted)
            saved = (one.position - held) * per_token - loading
            if one.position > held and saved > most:
                best, most = one, saved
        self.declined += best is None
        return best

    def _seconds(self, group: int, place: int, rates: Sequence[float]) -> float:
        """To load a block of a group from a tier. What is not in a tier of the store has no measured speed."""
        rate = rates[place] if place < len(rates) else 0.0
        return self._block_bytes[group] / rate if rate else 0.0
