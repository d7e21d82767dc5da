"""Decide between loading blocks from a store and recomputing them, from measured speeds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from foreword.offload.load import LoadPlan
from foreword.offload.search import Found

# The position at which a load ends, and the places of the blocks that it may need.
_End = tuple[int, Mapping[tuple[int, int], int]]

# Share of the compute time that a lookup in remote tiers may take, and the first bytes from a store of unknown speed.
PATIENCE: Final = 0.1
# Times `lookup_timeout`: what lookups in local tiers may take at least, and those of a process that has not computed yet.
_LOCAL: Final = 8
_LOCAL_FIRST: Final = 40
_REMOTE_FIRST: Final = 4
_FIXED_WEIGHT: Final = 0.3
_FIXED_LIFETIME: Final = 60.0  # seconds until a measurement expires: what the first value allows is tried again


def search_seconds(configured: float, compute_seconds: float | None) -> tuple[float, float]:
    """Seconds that a lookup may take in local tiers, and in remote ones.

    Args:
        configured: `store.lookup_timeout`, in seconds.
        compute_seconds: time to compute what is looked up; None while the prefill speed is not known.
    """
    if compute_seconds is None:
        return _LOCAL_FIRST * configured, _REMOTE_FIRST * configured
    return max(_LOCAL * configured, compute_seconds), max(configured, PATIENCE * compute_seconds)


class FixedCosts:
    """Seconds that a load takes however small it is, from the request for it until its blocks can be used, by tier: measured,
    as an exponential moving average.

    Args:
        first: the value of a tier without a recent measurement.

    Attributes:
        first_tokens: such a tier's value is at least the time to compute this many tokens. A machine that computes slowly, as
            a busy one does, loads slowly too.
        measures: values come from loads; not where they are known beforehand.
    """

    measures = True

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
    """Costs that decide what is worth loading: the bytes of blocks, and the measured speeds of the tiers and of the engine.

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

    def best(self, found: Found, held: int, *, patient: bool = False) -> LoadPlan | None:
        """The load that saves the most time, of what a search has found, if the first `held` tokens are there; None if it has
        found nothing more, or computing is faster. The smaller of two loads that save the same.

        `patient`: all that was found, however long it takes. None also where the model has a part of a block, and only whole
        blocks could be loaded: behind that part there would be a gap.
        """
        if found.step and held % found.step:
            return None
        per_token = self.seconds_per_token
        if found.position <= held or patient or per_token is None:
            return LoadPlan(held, found.position, found.places) if found.position > held else None
        best, most, most_without = None, 0.0, 0.0
        for one, loading, fixed in self._possible(found, held, per_token):
            saved = (one[0] - held) * per_token - loading
            if saved > most_without:
                most_without = saved
            if saved - fixed > most:
                best, most = one, saved - fixed
        if best is None:
            self.declined += 1
            self.too_small += most_without > 0.0
            return None
        return LoadPlan(held, *best)

    def _possible(self, found: Found, held: int, per_token: float) -> Iterator[tuple[_End, float, float]]:
        """Where loads can end, from the smallest on; each with the seconds that its bytes take, and its fixed cost."""
        rates, sizes = self._read_rates(), self._block_tokens
        tiers = set(found.places.values()).union(*(one.places.values() for one in found.shorter))
        fixed = {place: self.fixed.value(place, per_token) for place in tiers}
        seconds = {(group, place): self._seconds(group, place, rates) for group in range(len(sizes)) for place in fixed}
        if found.step:
            # Blocks in a row in the same tier are all worth loading, or none is.
            end, loading, least = held, 0.0, 0.0
            first = found.position // found.step - len(found.places)
            for place, run in itertools.groupby(list(found.places.values())[held // found.step - first :]):
                count = len(list(run))
                end += count * found.step
                loading += count * seconds[0, place]
                least = max(least, fixed[place])
                yield (end, found.places), loading, least
            return
        for one in (*reversed(found.shorter), found):
            if one.position > held:
                wanted = [at for at in one.places.items() if (at[0][1] + 1) * sizes[at[0][0]] > held]
                loading = math.fsum(seconds[group, place] for (group, _), place in wanted)
                least = max((fixed[place] for _, place in wanted), default=0.0)
                yield (one.position, one.places), loading, least

    def note_load(self, blocks: Iterable[tuple[int, int]], seconds: float, *, whole: bool = True) -> None:
        """A load of blocks, each given by its group and tier, took this long from the request for it until they could be used.
        What its bytes take is not part of the fixed cost; nothing is noted where the speed of a tier is unknown. Not `whole`:
        it has brought fewer, perhaps since it was stopped."""
        if not self.fixed.measures:
            return
        wanted, rates = list(blocks), self._read_rates()
        if wanted and all(place < len(rates) and rates[place] for _, place in wanted):
            transfer = math.fsum(self._seconds(group, place, rates) for group, place in wanted)
            self.fixed.note(max(place for _, place in wanted), seconds - transfer, least=not whole)

    def _seconds(self, group: int, place: int, rates: Sequence[float]) -> float:
        """To load a block of a group from a tier. What is not in a tier of the store has no measured speed."""
        rate = rates[place] if place < len(rates) else 0.0
        return self._block_bytes[group] / rate if rate else 0.0
