"""Stores in other processes, one per rank: other instances (`peer://`), and the memory of the scheduler's own workers. Lookups
in them from vLLM's scheduler, if it is in another process than its workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.blocks.layout import Layout
from foreword.errors import ConfigError
from foreword.integrations.vllm.connector_config import ConnectorSettings, KVCacheInfo
from foreword.offload.lookups import StoreLookups
from foreword.offload.policy import LoadCosts
from foreword.store.base import Name, Store
from foreword.store.tier_counters import Rate
from foreword.store.tiered import TieredStore
from foreword.store.types import Opener, Reach, StoreUrl
from foreword.store.urls import open_store
from foreword.store.wrappers import ReadOnlyStore, StoreKeys
from foreword.transfer.name_table import NamesElsewhere
from foreword.transfer.peer import PeerStore, opener
from foreword.transfer.sockets import Address, parse_address
from foreword.transfer_config import TransferConfig

# For connections that carry lookups only: no payload, so the smallest ring.
# Of the tables of names in a worker's folder.
NAMES_PREFIX = "names-"
_LOOKUPS_ONLY = TransferConfig(links=("tcp",), ring="64KiB", queue="64KiB")


class StoreLookup:
    """Looks up blocks of all ranks; a block is found if every rank's part is. Has the attributes of `OffloadManager` for that.

    A `memory://` tier lies in the workers: each is asked over a Unix socket. A worker that does not answer in time has nothing.
    """

    def __init__(self, info: KVCacheInfo, settings: ConnectorSettings) -> None:
        self._units = [info.units(rank) for rank in range(info.ranks)]
        self._memory: RankStores | None = None
        layouts = [info.layouts(rank) for rank in range(info.ranks)]
        openers = {
            Reach.PROCESS: self._open_memory,
            Reach.INSTANCE: lookup_peer_opener(settings.transfer or TransferConfig(), layouts),
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
        store = RankStores(place.label, local=True)
        self._memory = self._memory or store
        return store

    def set_workers(self, addresses: Mapping[int, str]) -> None:
        """Where the workers listen, by rank; "" for one that does not."""
        if self._memory is not None:
            label = self._memory.label
            workers = {rank: worker_memory(where, label) for rank, where in addresses.items() if where}
            layouts = (
                (store, layout)
                for rank, store in workers.items()
                for one in self._units[rank]
                for layout in one.layouts
            )
            self._memory.set_ranks({layout.fingerprint: store for store, layout in layouts})
            self.store.warm_up(self._layouts)

    def note_rates(self, rates: Mapping[int, Sequence[float]]) -> None:
        """How fast the workers read each tier, in bytes per second, by rank."""
        self._rates.update(rates)

    def _read_rates(self) -> list[float]:
        """Read rates of the tiers, each that of the rank which reads it the most slowly: a load ends with its last part."""
        by_tier = zip(*self._rates.values(), strict=False)
        return [min((rate for rate in rates if rate), default=0.0) for rates in by_tier]

    def tokens_by_tier(self, places: Iterable[int], block_size: int) -> dict[str, int]:
        return self.store.tokens_by_tier(places, block_size)

    def close(self) -> None:
        self.lookups.close()
        self.store.close()


class RankStores(ReadOnlyStore):
    """A store per rank, for lookups. The layout fingerprint in a block's name says which rank it belongs to.

    The names of one call have the same fingerprint.
    """

    def __init__(self, label: str, *, local: bool = False) -> None:
        super().__init__(label)
        self.local = local
        self._ranks: dict[bytes, Store] = {}

    def set_ranks(self, ranks: Mapping[bytes, Store]) -> None:
        """The store of each rank, by the fingerprints of its layouts. Before this call every lookup misses."""
        self._ranks = dict(ranks)

    def known(self, names: Sequence[Name]) -> Sequence[bool | None]:
        store = self._ranks.get(names[0][:FINGERPRINT_BYTES]) if names else None
        return [False] * len(names) if store is None else store.known(names)

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        store = self._ranks.get(names[0][:FINGERPRINT_BYTES]) if names else None
        return 0 if store is None else store.lookup(names, deadline=deadline)

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        store = self._ranks.get(names[0][:FINGERPRINT_BYTES]) if names else None
        return [False] * len(names) if store is None else store.present(names, deadline=deadline)

    def close(self) -> None:
        for store in set(self._ranks.values()):
            store.close()


class WorkerMemory(PeerStore):
    """A worker's memory tiers, for the scheduler on the same host: what is in them it sees in the tables of names beside the
    worker's socket, and asks the worker only where these say nothing."""

    def __init__(self, address: str, label: str) -> None:
        super().__init__(address, config=_LOOKUPS_ONLY, label=label)
        self._folder = os.path.dirname(parse_address(address).path)
        self._tables: list[NamesElsewhere] | None = None

    def known(self, names: Sequence[Name]) -> Sequence[bool | None]:
        if self._tables is None:
            self._tables = [NamesElsewhere(path) for path in name_tables(self._folder)]
        if not self._tables:
            return [None] * len(names)
        tiers = [table.known(names) for table in self._tables]
        return tiers[0] if len(tiers) == 1 else [_in_any(told) for told in zip(*tiers, strict=True)]


def _in_any(told: Sequence[bool | None]) -> bool | None:
    return True if True in told else None if None in told else False


def name_tables(folder: str) -> list[str]:
    """The tables of names in a worker's folder, one for each of its memory tiers; none if it shows none."""
    try:
        return sorted(entry.path for entry in os.scandir(folder) if entry.name.startswith(NAMES_PREFIX))
    except OSError:
        return []


def worker_memory(address: str, label: str) -> Store:
    """A worker's memory tiers, for the scheduler on the same host."""
    return WorkerMemory(address, label)


def open_tiers(
    urls: Sequence[str], keys: StoreKeys | None, layouts: Sequence[Layout], openers: Mapping[Reach, Opener]
) -> TieredStore:
    """Like `open_store`, but without URLs there are no tiers: an instance may only hand prompts off. Codecs encode keys and
    values of all layouts."""
    coded = [layout for layout in layouts[1:] if layout.layers]
    if not urls:
        return TieredStore([])
    return open_store(urls, layouts[0] if layouts else None, openers, more_layouts=coded, keys=keys)


def rank_peer_opener(config: TransferConfig, rank: int, ranks: int) -> Opener:
    """Opens `peer://` for one rank: the same rank of the other instance."""
    open_peer = opener(config)

    def open_rank(place: StoreUrl, layout: Layout | None) -> Store:
        return open_peer(_rank_url(place, rank, ranks), layout)

    return open_rank


def lookup_peer_opener(config: TransferConfig, layouts: Sequence[Sequence[Layout]]) -> Opener:
    """Opens `peer://` for a scheduler that is in another process than its workers. It looks up the blocks of every rank."""
    lookups = replace(config, ring=_LOOKUPS_ONLY.ring, queue=_LOOKUPS_ONLY.queue, links=_LOOKUPS_ONLY.links)

    def open_all(place: StoreUrl, _: Layout | None) -> Store:
        stores = RankStores(place.label)
        openers = [(one, rank_peer_opener(lookups, rank, len(layouts))) for rank, one in enumerate(layouts)]
        opened = [(one, open_rank(place, one[0])) for one, open_rank in openers]
        stores.set_ranks({layout.fingerprint: store for one, store in opened for layout in one})
        return stores

    return open_all


def rank_address(address: str, rank: int, ranks: int) -> str:
    """Where a rank of the instance at `address` listens: each rank at the next port, or at a path with its number.

    Raises ConfigError for an invalid address.
    """
    place = parse_address(address)
    if ranks == 1:
        return str(place)
    if place.path:
        return str(Address(path=f"{place.path}.{rank}"))
    return str(Address(place.host, place.port + rank if place.port else 0))


def _rank_url(place: StoreUrl, rank: int, ranks: int) -> StoreUrl:
    if ranks == 1:
        return place
    parts = urlsplit(place.url)
    if not parts.netloc:
        return replace(place, url=f"{place.url}.{rank}", path=f"{place.path}.{rank}")
    try:
        return replace(place, url=f"peer://{rank_address(parts.netloc, rank, ranks)}")
    except ConfigError:
        return place  # opening it reports what is wrong with it
