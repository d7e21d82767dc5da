"""Lookups in the stores from vLLM's scheduler, if it is in another process than its workers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from foreword.blocks.layout import FINGERPRINT_BYTES, Layout
from foreword.config import TransferConfig
from foreword.integrations.vllm.config import ConnectorSettings, KVCacheInfo
from foreword.integrations.vllm.rank_stores import RankStores, lookup_peer_opener, open_tiers, worker_memory
from foreword.offload.manager import StoreLoad
from foreword.offload.policy import search_timeout
from foreword.store.base import Store
from foreword.store.tiered import Rate
from foreword.store.urls import StoreUrl


class StoreLookup:
    """Looks up blocks of all ranks; a block is found if every rank's part is. Has the methods of `OffloadManager` for that.

    A `memory://` tier lies in the workers: each is asked over a Unix socket. A worker that does not answer in time has nothing.
    """

    def __init__(self, info: KVCacheInfo, settings: ConnectorSettings) -> None:
        layouts = [info.layout(rank) for rank in range(info.ranks)]
        self._fingerprints = [layout.fingerprint for layout in layouts]
        self._memory: RankStores | None = None
        openers = {
            "memory": self._open_memory,
            "peer": lookup_peer_opener(settings.transfer or TransferConfig(), layouts),
        }
        self.store = open_tiers(settings.store.urls, None, openers)
        self._timeout = settings.store.lookup_timeout
        self._block_size = info.block_size
        self.prefill_rate = Rate()
        self._pool = ThreadPoolExecutor(4, "foreword-lookup")

    def _open_memory(self, place: StoreUrl, _: Layout | None) -> Store:
        """The first memory tier stands for all: a worker answers for all of its memory."""
        store = RankStores(place.label)
        self._memory = self._memory or store
        return store

    def set_workers(self, addresses: Mapping[int, str]) -> None:
        """Where the workers listen, by rank; "" for one that does not."""
        if self._memory is not None:
            label = self._memory.label
            self._memory.set_ranks(
                {self._fingerprints[rank]: worker_memory(where, label) for rank, where in addresses.items() if where}
            )

    def find(self, keys: Sequence[bytes]) -> StoreLoad:
        """Start a lookup."""
        names = [self._fingerprints[0] + key for key in keys]
        load = StoreLoad(names, time.monotonic() + self._lookup_timeout(len(keys)))

        def look_up() -> None:
            found: list[list[int]] = []
            for fingerprint in self._fingerprints:
                names = [fingerprint + name[FINGERPRINT_BYTES:] for name in load.names]
                found.append(self.store.locate(names, deadline=load.deadline))
            load.places = min(found, key=len)

        self._pool.submit(look_up)
        return load

    def _lookup_timeout(self, blocks: int) -> float:
        """Seconds that a lookup may take, as in `OffloadManager`."""
        rate = self.prefill_rate.value
        return search_timeout(self._timeout, blocks * self._block_size / rate if rate else 0.0)

    def worth_loading(self, load: StoreLoad, skip: int, tokens: int) -> int:
        """All blocks that were found: only the workers know how fast the tiers are."""
        return max(len(load.places or ()) - skip, 0)

    def tokens_by_tier(self, places: Iterable[int], block_size: int) -> dict[str, int]:
        return self.store.tokens_by_tier(places, block_size)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.store.close()
