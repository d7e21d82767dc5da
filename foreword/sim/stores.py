"""Simulated tiers off the device: the real eviction policy over keys without data, the real decision what is worth loading, and
loads that take virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreword.blocks.resume import GroupKind, KVGroup
from foreword.offload.load import LoadPlan
from foreword.offload.policy import FixedCosts, LoadCosts
from foreword.offload.search import Found, StoredGroup
from foreword.routing.directory import CacheTier
from foreword.sim.costs import EngineCosts
from foreword.store.chain_lru import ChainLru
from foreword.store.tier_counters import LookupOutcome

Stored = Callable[[CacheTier, bytes, Sequence[bytes]], None]
Removed = Callable[[CacheTier, Sequence[bytes]], None]


class SimulatedTier:
    """A store of a given number of blocks with the eviction policy of real stores (`store/chain_lru.py`)."""

    def __init__(self, tier: CacheTier, blocks: int) -> None:
        self.tier = tier
        self.chains = ChainLru(blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self.chains.index

    def touch(self, keys: Sequence[bytes]) -> None:
        now, index = self.chains.tick(), self.chains.index
        for key in keys:
            self.chains.touch(index[key], now)

    def put(self, parent: bytes, depth: int, keys: Sequence[bytes], on_stored: Stored, on_removed: Removed) -> None:
        """Store blocks that follow `parent` at position `depth` of their chain."""
        now = self.chains.tick()
        gone: list[bytes] = []
        for i, key in enumerate(keys):
            slot = self.chains.index.get(key)
            if slot is not None:
                self.chains.touch(slot, now)
            elif not self._add(key, keys[i - 1] if i else parent, depth + i, now, gone):
                keys = keys[:i]
                break
        if gone:
            on_removed(self.tier, gone)
        if keys:
            on_stored(self.tier, parent, keys)

    def _add(self, key: bytes, parent: bytes, depth: int, now: int, gone: list[bytes]) -> bool:
        slot = self.chains.allocate(now)
        if slot is None:
            return False
        if self.chains.evicted is not None:
            gone.append(self.chains.evicted)
        self.chains.add(slot, key, parent, depth, now)
        return True


@dataclass(frozen=True, slots=True)
class SimulatedSearch:
    """The counterpart of `offload.lookups.StoreSearch`. A search takes no time."""

    found: Found
    answered: bool = True


@dataclass(slots=True, eq=False)
class SimulatedLoad:
    """The counterpart of `offload.load.StoreLoad`."""

    places: list[int]
    done: bool = False

    def close(self) -> list[int]:
        """The tier of each loaded block."""
        return self.places if self.done else []


class KnownCosts(FixedCosts):
    """Fixed costs of a load from each tier, besides its bytes, as they are known beforehand."""

    measures = False

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__()
        self._seconds = seconds

    def value(self, tier: int, seconds_per_token: float = 0.0) -> float:
        return self._seconds[tier]


class SimulatedStores:
    """The counterpart of `external_kv.EngineStores` for the scheduler, in virtual time.

    Args:
        tiers: fastest first.
        wait: called with the duration of a load in seconds and a function to call at its end.
        on_stored, on_removed: called with the tier and the keys that it has stored or evicted.
    """

    def __init__(
        self,
        tiers: Sequence[SimulatedTier],
        costs: EngineCosts,
        block_size: int,
        wait: Callable[[float, Callable[[], None]], None],
        on_stored: Stored,
        on_removed: Removed,
    ) -> None:
        self.tiers = tiers
        self.now = 0.0
        self.groups = [StoredGroup(KVGroup(GroupKind.FULL, block_size), ())]
        self._loads = [costs.load(one.tier) for one in tiers]
        # A token counts as one byte.
        rates = [1 / one.per_token if one.per_token else math.inf for one in self._loads]
        self.costs = LoadCosts([block_size], [block_size], lambda: rates, lambda: 1 / costs.prefill)
        self.costs.fixed = KnownCosts([one.latency for one in self._loads])
        self._block_size = block_size
        self._wait = wait
        self._on_stored = on_stored
        self._on_removed = on_removed
        self._free_at = [0.0] * len(tiers)

    def refuse_lookup(self, outcome: LookupOutcome, tokens: int) -> None:
        """Nothing is counted."""

    def hurry(self, load: SimulatedLoad) -> None:
        """Simulated loads are never patient."""

    def search(
        self, root: bytes, keys: Sequence[bytes], held: int, limit: int, *, patient: bool = False
    ) -> SimulatedSearch:
        """Search the fastest tier of each block of a chain, up to the first block that no tier has."""
        size = self._block_size
        first = held // size
        places: dict[tuple[int, int], int] = {}
        for block, key in enumerate(keys[first : limit // size], first):
            place = next((i for i, tier in enumerate(self.tiers) if key in tier), -1)
            if place < 0:
                break
            places[0, block] = place
        end = (first + len(places)) * size
        return SimulatedSearch(Found(end, end, places, step=size))

    def load(
        self, plan: LoadPlan, root: bytes, keys: Sequence[bytes], blocks: Sequence[int], *, patient: bool = False
    ) -> SimulatedLoad:
        """Load what is planned. Loads from one tier are serialized."""
        first, size = plan.held // self._block_size, self._block_size
        load = SimulatedLoad([plan.places[0, block] for block in range(first, plan.position // size)])
        ends = self.now
        for place in sorted(set(load.places)):
            cost = self._loads[place]
            begins = max(ends, self._free_at[place])
            ends = begins + cost.latency + load.places.count(place) * size * cost.per_token
            self._free_at[place] = ends

        def finish() -> None:
            load.done = True
            self._promote(root, keys, first, load.places)

        self._wait(ends - self.now, finish)
        return load

    def save(self, parent: bytes, depth: int, keys: Sequence[bytes]) -> None:
        """Store computed blocks in every tier."""
        for tier in self.tiers:
            tier.put(parent, depth, keys, self._on_stored, self._on_removed)

    def _promote(self, root: bytes, keys: Sequence[bytes], first: int, places: Sequence[int]) -> None:
        """Store blocks from a slower tier in the faster ones, and mark all of them as used now."""
        for number, place in enumerate(places, first):
            key = keys[number]
            parent = keys[number - 1] if number else root
            for faster in self.tiers[:place]:
                faster.put(parent, number, [key], self._on_stored, self._on_removed)
            if key in self.tiers[place]:
                self.tiers[place].touch([key])
