"""Lookups from vLLM's scheduler, if it is in another process than its workers: in the stores, and with the extras in other
instances (`peer://`) and in the workers' memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from foreword.blocks.layout import Layout
from foreword.integrations.vllm.connector_config import ConnectorSettings, KVCacheInfo
from foreword.integrations.vllm.connector_extras import opened_by, transfer_extra
from foreword.offload.lookups import StoreLookups
from foreword.offload.policy import LoadCosts
from foreword.store.base import Store
from foreword.store.tier_counters import Rate
from foreword.store.tiered import TieredStore
from foreword.store.types import Opener, Reach, StoreUrl
from foreword.store.urls import open_store

if TYPE_CHECKING:
    from foreword.integrations.vllm_extras.interfaces import WorkersMemory
    from foreword.store.key_interfaces import StoreKeys


class StoreLookup:
    """Looks up blocks of all ranks; a block is found if every rank's part is. Has the attributes of `OffloadManager` for that.

    A `memory://` tier lies in the workers: each is asked over a Unix socket. A worker that does not answer in time has nothing.
    """

    def __init__(self, info: KVCacheInfo, settings: ConnectorSettings) -> None:
        self._units = [info.units(rank) for rank in range(info.ranks)]
        self._memory: WorkersMemory | None = None
        layouts = [info.layouts(rank) for rank in range(info.ranks)]
        openers = {
            Reach.PROCESS: self._open_memory,
            Reach.INSTANCE: opened_by(lambda extra: extra.lookup_peers(settings, layouts)),
        }
        self.store = open_tiers(settings.store.urls, settings.keys(), (), openers)
        self.prefill_rate = Rate()
        self._rates: dict[int, Sequence[float]] = {}
        self.costs = LoadCosts(
            [one.block_bytes for one in info.groups],
            [one.block_size for one in info.groups],
            self._read_rates,
            lambda: self.prefill_rate.value,
        )
        self.lookups = StoreLookups(
            self.store, settings.store.lookup_timeout, settings.store.load_timeout, lambda: self.prefill_rate.last
        )
        self._layouts = [one[0].fingerprint for one in layouts]
        self.store.warm_up(self._layouts)

    def _open_memory(self, place: StoreUrl, _: Layout | None) -> Store:
        """The first memory tier stands for all: a worker answers for all of its memory."""
        store = transfer_extra().workers_stores(place.label)
        self._memory = self._memory or store
        return store

    def set_workers(self, addresses: Mapping[int, str]) -> None:
        """Where the workers listen, by rank; "" for one that does not."""
        if self._memory is not None:
            self._memory.set_workers(addresses, self._units)
            self.store.warm_up(self._layouts)

    def note_rates(self, rates: Mapping[int, Sequence[float]]) -> None:
        """How fast the workers read each tier, in bytes per second, by rank."""
        self._rates.update(rates)

    def _read_rates(self) -> list[float]:
        """Read rates of the tiers, each that of the rank which reads it the most slowly: a load ends with its last part."""
        by_tier = zip(*self._rates.values(), strict=False)
        return [min((rate for rate in rates if rate), default=0.0) for rates in by_tier]

    def close(self) -> None:
        self.lookups.close()
        self.store.close()


def open_tiers(
    urls: Sequence[str],
    keys: StoreKeys | None,
    layouts: Sequence[Layout],
    openers: Mapping[Reach, Opener],
    device: str = "cpu",
) -> TieredStore:
    """Like `open_store`, but without URLs there are no tiers: an instance may only hand prompts off. Codecs encode keys and
    values of all layouts."""
    if not urls:
        return TieredStore([])
    # Stores take the first layout for that of the longest blocks.
    first = max(layouts, key=lambda layout: layout.block_bytes, default=None)
    coded = [layout for layout in layouts if layout.layers and layout is not first]
    return open_store(urls, first, openers, more_layouts=coded, keys=keys, device=device)
