"""Searching without blocks of one's own: the scheduler of vLLM, in a process apart from its workers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from foreword.blocks.layout import FINGERPRINT_BYTES, Layout
from foreword.config import TransferConfig
from foreword.integrations.vllm.config import Facts, Settings
from foreword.integrations.vllm.peers import ByRank, open_tiers, searched_peers, worker_memory
from foreword.offload.manager import StoreLoad
from foreword.offload.policy import search_timeout
from foreword.store.base import Store
from foreword.store.tiered import Rate
from foreword.store.urls import StoreUrl


class Search:
    """A block counts as found if every rank's part of it is there. What lies in the workers' own memory (`memory://`) is asked
    for over a Unix socket of each; one that does not answer in time has nothing."""

    def __init__(self, facts: Facts, settings: Settings) -> None:
        layouts = [facts.layout(rank) for rank in range(facts.ranks)]
        self._fingerprints = [layout.fingerprint for layout in layouts]
        self._memory: ByRank | None = None
        transfer = settings.transfer or TransferConfig()
        above = {"memory": self._open_memory, "peer": searched_peers(transfer, layouts)}
        self.store = open_tiers(settings.store.urls, None, above)
        self._timeout = settings.store.lookup_timeout
        self._block_size = facts.block_size
        self.prefill_rate = Rate()
        self._finders = ThreadPoolExecutor(4, "foreword-find")

    def _open_memory(self, place: StoreUrl, _: Layout | None) -> Store:
        """The first of them stands for all: a worker answers for whatever it has in memory."""
        store = ByRank(place.label)
        self._memory = self._memory or store
        return store

    def meet(self, addresses: Mapping[int, str]) -> None:
        """Where the workers answer for their memory, by rank."""
        if self._memory is not None:
            label = self._memory.label
            self._memory.meet(
                {self._fingerprints[rank]: worker_memory(where, label) for rank, where in addresses.items() if where}
            )

    def find(self, keys: Sequence[bytes]) -> StoreLoad:
        names = [self._fingerprints[0] + key for key in keys]
        store_load = StoreLoad(names, time.monotonic() + self._search_timeout(len(keys)))

        def search() -> None:
            found: list[list[int]] = []
            for fingerprint in self._fingerprints:
                names = [fingerprint + name[FINGERPRINT_BYTES:] for name in store_load.names]
                found.append(self.store.locate(names, deadline=store_load.deadline))
            store_load.places = min(found, key=len)

        self._finders.submit(search)
        return store_load

    def _search_timeout(self, blocks: int) -> float:
        """Seconds that a search may take, as in `OffloadManager`."""
        speed = self.prefill_rate.value
        return search_timeout(self._timeout, blocks * self._block_size / speed if speed else 0.0)

    def worth_loading(self, store_load: StoreLoad, skip: int, tokens: int) -> int:
        """All that was found: how fast the tiers are is known to the workers only."""
        return max(len(store_load.places or ()) - skip, 0)

    def tokens_by_tier(self, places: Iterable[int], block_size: int) -> dict[str, int]:
        return self.store.tokens_by_tier(places, block_size)

    def close(self) -> None:
        self._finders.shutdown(wait=False, cancel_futures=True)
        self.store.close()
