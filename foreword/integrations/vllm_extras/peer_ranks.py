"""Stores of other instances (`peer://`), one per rank, and the memory of workers for a scheduler in another process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.blocks.layout import BlockUnits, Layout
from foreword.errors import ConfigError
from foreword.store.base import Name, Store
from foreword.store.read_only import ReadOnlyStore
from foreword.store.types import Opener, StoreUrl
from foreword.transfer.name_table import NamesElsewhere
from foreword.transfer.peer import PeerStore, opener
from foreword.transfer.sockets import Address, parse_address
from foreword.transfer_config import TransferConfig

# The tables of names in a worker's folder begin with this.
NAMES_PREFIX = "names-"
# For connections that carry lookups only: no payload, so the smallest ring.
_LOOKUPS_ONLY = TransferConfig(links=("tcp",), ring="64KiB")


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


class WorkersStores(RankStores):
    """The memory tiers of a scheduler's own workers. Implements `WorkersMemory` of the connector."""

    def __init__(self, label: str) -> None:
        super().__init__(label, local=True)

    def set_workers(self, addresses: Mapping[int, str], units: Sequence[Sequence[BlockUnits]]) -> None:
        workers = {rank: WorkerMemory(where, self.label) for rank, where in addresses.items() if where}
        found = ((store, layout) for rank, store in workers.items() for one in units[rank] for layout in one.layouts)
        self.set_ranks({layout.fingerprint: store for store, layout in found})


def rank_peer_opener(config: TransferConfig, rank: int, ranks: int) -> Opener:
    """Opens `peer://` for one rank: the same rank of the other instance."""
    open_peer = opener(config)

    def open_rank(place: StoreUrl, layout: Layout | None) -> Store:
        return open_peer(_rank_url(place, rank, ranks), layout)

    return open_rank


def lookup_peer_opener(config: TransferConfig, layouts: Sequence[Sequence[Layout]]) -> Opener:
    """Opens `peer://` for a scheduler that is in another process than its workers. It looks up the blocks of every rank."""
    lookups = replace(config, ring=_LOOKUPS_ONLY.ring, links=_LOOKUPS_ONLY.links)

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
