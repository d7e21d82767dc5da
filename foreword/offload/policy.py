"""Decide between loading blocks from a store and recomputing them, from measured speeds."""

from __future__ import annotations

import itertools
import math
import time
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
_FIXED_WEIGHT: Final = 0.3
_FIXED_LIFETIME: Final = (
    60.0  # seconds until a measurement expires; then a load that the first value allows is tried again
)


def search_seconds(configured: float, compute_seconds: float | None) -> tuple[float, float]:
    """Seconds that a lookup may take in local tiers, and in remote ones.

    Args:
        configured: `store.lookup_timeout`, in seconds.
        compute_seconds: time to compute what is looked up; None while the prefill speed is not known.
    """
    if compute_seconds is None:
        return _LOCAL_FIRST * configured, _REMOTE_FIRST * configured
    return max(_LOCAL * configured, compute_seconds), max(configured, PATIENCE * compute_seconds)


def blocks_worth_loading(
    load_seconds: Iterable[float], compute_seconds: float, fixed_seconds: Iterable[float] = itertools.repeat(0.0)
) -> int:
    """How many leading blocks to load so that the most time is saved; 0 if loading saves none.

    `load_seconds` has the load time of each block, `compute_seconds` is the time to compute one block. `fixed_seconds` has what
    a load from each block's tier takes however small it is; a load takes the largest of those once.
    """
    best, most_saved, loading, fixed = 0, 0.0, 0.0, 0.0
    for count, (seconds, least) in enumerate(zip(load_seconds, fixed_seconds, strict=False), start=1):
        loading += seconds
        fixed = max(fixed, least)
        saved = count * compute_seconds - loading - fixed
        if saved > most_saved:
            best, most_saved = count, saved
    return best


class FixedCosts:
    """Seconds that a load takes however small it is, from the request for it until its blocks can be used, by tier: measured,
    as an exponential moving average.

    Args:
        first: the value of a tier without a recent measurement.

    Attributes:
        first_tokens: such a tier's value is at least the time to compute this many tokens. A machine that computes slowly, as
            a busy one does, loads slowly too.
    """

    def __init__(self, first: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.first = first
        self.first_tokens = 0
        self._clock = clock
        self._measured: dict[int, tuple[float, float]] = {}  # by tier: the value, and when it was last measured

    def value(self, tier: int, seconds_per_token: float = 0.0) -> float:
        value, at = self._measured.get(tier, (0.0, -math.inf))
        if self._clock() - at < _FIXED_LIFETIME:
            return value
        return max(self.first, self.first_tokens * seconds_per_token)

    @property
    def measured(self) -> dict[int, float]:
        """The last measurements, however old."""
        return {tier: value for tier, (value, _) in self._measured.items()}

    def note(self, tier: int, seconds: float, *, least: bool = False) -> None:
        """Add a measurement: what a load took longer than its bytes take. `least`: it would have taken longer still."""
        value = self.value(tier)
        if least and seconds <= value:
            return
        self._measured[tier] = (value + _FIXED_WEIGHT * (max(seconds, 0.0) - value), self._clock())


class LoadCosts:
    """What is worth loading: the bytes of blocks, and the measured speeds of the tiers and of the engine.

    Args:
        block_bytes, block_tokens: of a block of each KV group.
        read_rates: gives bytes per second of each tier; 0.0 for one whose speed is unknown, from which a load is tried.
        prefill_rate: gives tokens per second of the engine; 0.0 while it is unknown: then all that is found is loaded.

    Attributes:
        prefill_rate: as given.
        fixed: what a load takes however small it is.
        declined: decisions to load nothing of what was found.
        too_small: those of them that would have been loads without a fixed cost.
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
        self.fixed = FixedCosts()
        self.declined = 0
        self.too_small = 0

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
        rates, compute = self._read_rates(), per_token * self._block_tokens[0]
        seconds = [self._seconds(0, place, rates) for place in places]
        fixed = {place: self.fixed.value(place, per_token) for place in set(places)}
        best = blocks_worth_loading(seconds, compute, (fixed[place] for place in places))
        if not best:
            self.declined += 1
            self.too_small += blocks_worth_loading(seconds, compute) > 0
        return best

    def best_position(self, found: Found, held: int) -> Found | None:
        """What a search has found, up to the position whose load saves the most time if the first `held` tokens are there; None
        if computing is faster."""
        per_token = self.seconds_per_token
        if found.position <= held or per_token is None:
            return found if found.position > held else None
        rates = self._read_rates()
        best, most, most_without = None, 0.0, 0.0
        for one in (found, *found.shorter):
            if one.position <= held:
                continue
            wanted = [at for at in one.places.items() if (at[0][1] + 1) * self._block_tokens[at[0][0]] > held]
            loading = math.fsum(self._seconds(group, place, rates) for (group, _), place in wanted)
            fixed = max((self.fixed.value(place, per_token) for _, place in wanted), default=0.0)
            without = (one.position - held) * per_token - loading
            most_without = max(most_without, without)
            if without - fixed > most:
                best, most = one, without - fixed
        if best is None:
            self.declined += 1
            self.too_small += most_without > 0.0
        return best

    def note_load(self, blocks: Iterable[tuple[int, int]], seconds: float, *, whole: bool = True) -> None:
        """A load of blocks, each given by its group and tier, took this long from the request for it until they could be used.
        What its bytes take is not part of the fixed cost; nothing is noted where the speed of a tier is unknown. Not `whole`:
        it has brought fewer, perhaps since it was stopped."""
        wanted, rates = list(blocks), self._read_rates()
        if wanted and all(place < len(rates) and rates[place] for _, place in wanted):
            transfer = math.fsum(self._seconds(group, place, rates) for group, place in wanted)
            self.fixed.note(max(place for _, place in wanted), seconds - transfer, least=not whole)

    def _seconds(self, group: int, place: int, rates: Sequence[float]) -> float:
        """To load a block of a group from a tier. What is not in a tier of the store has no measured speed."""
        rate = rates[place] if place < len(rates) else 0.0
        return self._block_bytes[group] / rate if rate else 0.0
