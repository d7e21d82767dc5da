"""The offload manager as the embedded engine uses it: its lookups, decisions and loads for the scheduler (`external_kv`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from foreword.offload.lookups import Result, StoreLoad
from foreword.offload.manager import MIN_PATIENCE, OffloadManager
from foreword.offload.search import StoredGroup
from foreword.offload.writer import WRITE_TIMEOUT
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TierSearch


class EngineStores(OffloadManager):
    """An `OffloadManager` whose calls take chains of keys. The `BlockStores` and `PositionStores` of `external_kv`."""

    def find(
        self, root: bytes, keys: Sequence[bytes], before: Sequence[bytes] = (), *, patient: bool = False
    ) -> StoreLoad:
        """Start a search for a chain's blocks, of a model with one KV group. `StoreLoad.places` has the result.

        `before` are the keys of the blocks before them, which are on the device.
        """
        names, ahead = self.units[0].names(root, keys), self.units[0].names(root, before)

        def look_up(search: TierSearch, inline: bool) -> Result:
            places = self.store.locate(names, search=search, inline=inline, before=ahead)
            return places, len(places) * self.block_size

        store_load = StoreLoad(names, 0.0, root, patient=patient)
        return self.lookups.start(store_load, len(keys) * self.block_size, look_up)[0]

    def refuse_lookup(self, outcome: LookupOutcome, tokens: int) -> None:
        """Count a request, and its tokens, for which nothing is looked up."""
        self.lookups.refuse(outcome, tokens)

    def worth_loading(self, store_load: StoreLoad, skip: int) -> int:
        """How many blocks after the first `skip` to load because that is faster than computing them; 0 for none.

        While the prefill speed is unknown, all blocks found are worth loading.
        """
        places = (store_load.places or [])[skip:]
        return len(places) if store_load.patient else self.costs.blocks_worth_loading(places)

    def hurry(self, store_load: StoreLoad) -> None:
        """A request waits for this patient load: from now on it may take as long as computing its blocks."""
        per_token = self.costs.seconds_per_token
        if store_load.patient and per_token is not None:
            store_load.patient = False
            compute = (store_load.tokens or store_load.requested * self.block_size) * per_token
            store_load.deadline = min(store_load.deadline, time.monotonic() + max(compute, MIN_PATIENCE))

    def load_position(
        self,
        store_load: StoreLoad,
        groups: Sequence[StoredGroup],
        keys: Sequence[bytes],
        held: int,
        blocks: Sequence[int],
    ) -> None:
        """Start to load what a search for a position has found and the device does not hold: of each group, in order, the
        blocks behind the first `held` tokens that the position needs."""
        found = store_load.found
        assert found is not None
        wanted = [
            (number, block)
            for number, one in enumerate(groups)
            for block in sorted(one.group.needed(found.position))
            if block * one.group.block_size >= held
        ]
        names, numbers, places, rows = [], [], [], []
        for (number, block), device_block in zip(wanted, blocks, strict=True):
            frames = self.units[number].names(store_load.root, groups[number].keys(keys, [block]))
            names += frames
            numbers += [number] * len(frames)
            places += [found.places[number, block]] * len(frames)
            rows += self.units[number].of_blocks([device_block])
        store_load.names, store_load.groups, store_load.places = names, numbers, places
        store_load.tokens = found.position - held
        self.load(store_load, 0, rows)

    def pin(self, root: bytes, keys: Sequence[bytes], *, pinned: bool = True, group: int = 0) -> Future[int]:
        """Pin or unpin blocks of a KV group in every tier. What waits to be written is written first."""
        names = self.units[group].names(root, keys)

        def work() -> int:
            self._writer.flush(WRITE_TIMEOUT)
            return self.store.pin(names, pinned=pinned, deadline=time.monotonic() + WRITE_TIMEOUT)

        return self.later(work)

    def erase_queued(self, roots: Sequence[bytes], timeout: float = 5.0) -> int:
        """Drop what waits to be written of chains whose roots begin with one of these bytes: an erasure of the stores follows.
        Returns how many blocks are still being written after `timeout` seconds."""
        return self._writer.erase(roots, timeout)
