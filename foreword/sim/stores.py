"""Simulated tiers below the device: the real eviction policy over names without bytes, and loads that take virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foreword.offload.policy import blocks_worth_loading
from foreword.routing.directory import CacheTier
from foreword.sim.costs import EngineCosts
from foreword.store.chain_lru import ChainLru

Told = Callable[[CacheTier, bytes, Sequence[bytes]], None]
Removed = Callable[[CacheTier, Sequence[bytes]], None]


class SimTier:
    """A store of a given number of blocks: LRU over chains, tails before heads (`store/chain_lru.py`)."""

    def __init__(self, tier: CacheTier, blocks: int) -> None:
        self.tier = tier
        self.chains = ChainLru(blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self.chains.index

    def touch(self, keys: Sequence[bytes]) -> None:
        now, index = self.chains.tick(), self.chains.index
        for key in keys:
            self.chains.touch(index[key], now)

    def put(self, parent: bytes, depth: int, keys: Sequence[bytes], stored: Told, removed: Removed) -> None:
        """Keep blocks that follow `parent` at number `depth` of their chain."""
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
            removed(self.tier, gone)
        if keys:
            stored(self.tier, parent, keys)

    def _add(self, key: bytes, parent: bytes, depth: int, now: int, gone: list[bytes]) -> bool:
        slot = self.chains.allocate()
        if slot is None:
            slot = self.chains.evict(now)
            if slot is None:
                return False
            gone.append(self.chains.evicted)
        self.chains.add(slot, key, parent, depth, now)
        return True


@dataclass(slots=True, eq=False)
class SimulatedLoad:
    """A search and a load (`cache.StoreLoad`): the search takes no time, the load ends at `ends`."""

    keys: Sequence[bytes]
    places: list[int]
    answered: bool = True
    done: bool = False
    skip: int = 0
    asked: int = 0
    taken: list[int] = field(default_factory=list)

    def close(self) -> list[int]:
        """The tier of each block that was loaded."""
        return self.taken if self.done else []


class SimStores:
    """What the scheduler asks for blocks off the device (`cache.OffloadManager`), in virtual time.

    Args:
        tiers: the fastest first.
        wait: called with the seconds that a load takes and what to do at its end.
    """

    def __init__(
        self,
        tiers: Sequence[SimTier],
        costs: EngineCosts,
        block_size: int,
        wait: Callable[[float, Callable[[], None]], None],
        stored: Told,
        removed: Removed,
    ) -> None:
        self.tiers = tiers
        self.now = 0.0
        self._costs = costs
        self._block_size = block_size
        self._wait = wait
        self._stored = stored
        self._removed = removed
        self._free_at = [0.0] * len(tiers)

    def find(self, keys: Sequence[bytes]) -> SimulatedLoad:
        """Where each of a chain's blocks lies, up to the first that is nowhere."""
        places: list[int] = []
        for key in keys:
            place = next((i for i, tier in enumerate(self.tiers) if key in tier), -1)
            if place < 0:
                break
            places.append(place)
        return SimulatedLoad(keys, places)

    def worth_loading(self, store_load: SimulatedLoad, skip: int, tokens: int) -> int:
        """How many blocks after the first `skip` should be loaded rather than computed (`OffloadManager.worth_loading`)."""
        load_seconds = (self._per_block(place) for place in store_load.places[skip:])
        return blocks_worth_loading(load_seconds, self._block_size * self._costs.prefill)

    def load(self, store_load: SimulatedLoad, skip: int, blocks: Sequence[int]) -> None:
        """Load as many blocks from number `skip` on. Loads from one tier follow each other."""
        store_load.skip, store_load.asked = skip, len(blocks)
        places = store_load.places[skip : skip + store_load.asked]
        ends = self.now
        for place in sorted(set(places)):
            cost = self._costs.load(self.tiers[place].tier)
            begins = max(ends, self._free_at[place])
            ends = begins + cost.latency + places.count(place) * self._per_block(place)
            self._free_at[place] = ends

        def arrived() -> None:
            store_load.done, store_load.taken = True, places
            self._promote(store_load, skip, places)

        self._wait(ends - self.now, arrived)

    def save(self, parent: bytes, depth: int, keys: Sequence[bytes]) -> None:
        """Blocks that were computed go into every tier."""
        for tier in self.tiers:
            tier.put(parent, depth, keys, self._stored, self._removed)

    def _promote(self, store_load: SimulatedLoad, skip: int, places: Sequence[int]) -> None:
        """What came from a slower tier goes into the faster ones, and all of it was used now."""
        for i, place in enumerate(places):
            key = store_load.keys[skip + i]
            above = store_load.keys[skip + i - 1] if skip + i else key
            for faster in self.tiers[:place]:
                faster.put(above, skip + i, [key], self._stored, self._removed)
            if key in self.tiers[place]:
                self.tiers[place].touch([key])

    def _per_block(self, place: int) -> float:
        return self._block_size * self._costs.load(self.tiers[place].tier).per_token
