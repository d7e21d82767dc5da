"""Simulated tiers off the device: the real eviction policy over keys without data, and loads that take virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foreword.offload.policy import blocks_worth_loading
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


@dataclass(slots=True, eq=False)
class SimulatedLoad:
    """The counterpart of `offload.lookups.StoreLoad`. A search takes no time."""

    keys: Sequence[bytes]
    places: list[int]
    answered: bool = True
    done: bool = False
    skip: int = 0
    requested: int = 0
    tiers: list[int] = field(default_factory=list)

    def close(self) -> list[int]:
        """The tier of each loaded block."""
        return self.tiers if self.done else []


class SimulatedStores:
    """The counterpart of `engine_stores.EngineStores` for the scheduler, in virtual time.

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
        self._costs = costs
        self._block_size = block_size
        self._wait = wait
        self._on_stored = on_stored
        self._on_removed = on_removed
        self._free_at = [0.0] * len(tiers)

    def refuse_lookup(self, outcome: LookupOutcome, tokens: int) -> None:
        """Nothing is counted."""

    def hurry(self, search: SimulatedLoad) -> None:
        """Simulated loads are never patient."""

    def find(
        self, root: bytes, keys: Sequence[bytes], before: Sequence[bytes] = (), *, patient: bool = False
    ) -> SimulatedLoad:
        """The fastest tier of each block of a chain, up to the first block that no tier has."""
        places: list[int] = []
        for key in keys:
            place = next((i for i, tier in enumerate(self.tiers) if key in tier), -1)
            if place < 0:
                break
            places.append(place)
        return SimulatedLoad(keys, places)

    def worth_loading(self, store_load: SimulatedLoad, skip: int) -> int:
        """How many blocks after the first `skip` to load (see `EngineStores.worth_loading`)."""
        load_seconds = (self._per_block(place) for place in store_load.places[skip:])
        return blocks_worth_loading(load_seconds, self._block_size * self._costs.prefill)

    def load(self, store_load: SimulatedLoad, skip: int, blocks: Sequence[int]) -> None:
        """Load as many blocks as given, from number `skip` on. Loads from one tier are serialized."""
        store_load.skip, store_load.requested = skip, len(blocks)
        places = store_load.places[skip : skip + store_load.requested]
        ends = self.now
        for place in sorted(set(places)):
            cost = self._costs.load(self.tiers[place].tier)
            begins = max(ends, self._free_at[place])
            ends = begins + cost.latency + places.count(place) * self._per_block(place)
            self._free_at[place] = ends

        def finish() -> None:
            store_load.done, store_load.tiers = True, places
            self._promote(store_load, skip, places)

        self._wait(ends - self.now, finish)

    def save(self, parent: bytes, depth: int, keys: Sequence[bytes]) -> None:
        """Store computed blocks in every tier."""
        for tier in self.tiers:
            tier.put(parent, depth, keys, self._on_stored, self._on_removed)

    def _promote(self, store_load: SimulatedLoad, skip: int, places: Sequence[int]) -> None:
        """Store blocks from a slower tier in the faster ones, and mark all of them as used now."""
        for i, place in enumerate(places):
            key = store_load.keys[skip + i]
            parent = store_load.keys[skip + i - 1] if skip + i else key
            for faster in self.tiers[:place]:
                faster.put(parent, skip + i, [key], self._on_stored, self._on_removed)
            if key in self.tiers[place]:
                self.tiers[place].touch([key])

    def _per_block(self, place: int) -> float:
        return self._block_size * self._costs.load(self.tiers[place].tier).per_token
