"""Other processes as stores, rank by rank: other instances (`peer://`), and for the scheduler its own workers' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from foreword.blocks.layout import FINGERPRINT_BYTES, Layout
from foreword.config import TransferConfig
from foreword.errors import ConfigError
from foreword.store.base import Name, Store
from foreword.store.bases import ReadOnlyStore
from foreword.store.tiered import TieredStore
from foreword.store.urls import Opener, StoreUrl, open_store
from foreword.transfer.peer import PeerStore, opener
from foreword.transfer.sockets import Address, parse_address

# A connection over which only questions go: no payload, so no ring worth speaking of.
_ASKING = TransferConfig(links=("tcp",), ring="64KiB", queue="64KiB")


class ByRank(ReadOnlyStore):
    """What several ranks have, each of them a store of its own; a name's fingerprint says whose it is. It is only searched."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._ranks: dict[bytes, Store] = {}

    def meet(self, ranks: Mapping[bytes, Store]) -> None:
        """Where each rank's blocks are, by its layout's fingerprint; nothing is found before."""
        self._ranks = dict(ranks)

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        store = self._ranks.get(names[0][:FINGERPRINT_BYTES]) if names else None
        return 0 if store is None else store.lookup(names, deadline=deadline)

    def close(self) -> None:
        for store in self._ranks.values():
            store.close()


def worker_memory(address: str, label: str) -> Store:
    """A worker's memory tiers, for the scheduler on the same host."""
    return PeerStore(address, config=_ASKING, label=label)


def open_tiers(urls: Sequence[str], layout: Layout | None, openers: Mapping[str, Opener]) -> TieredStore:
    """Like `open_store`, but no URL is no tier: an instance that only hands over and takes over has none."""
    return open_store(urls, layout, openers) if urls else TieredStore([])


def peers_of(config: TransferConfig, rank: int, ranks: int) -> Opener:
    """Opens `peer://` for one rank: the same rank of another instance."""
    open_peer = opener(config)

    def open_at(place: StoreUrl, layout: Layout | None) -> Store:
        return open_peer(_shifted(place, rank, ranks), layout)

    return open_at


def searched_peers(config: TransferConfig, layouts: Sequence[Layout]) -> Opener:
    """Opens `peer://` for a scheduler apart from its workers, which looks for every rank's part."""
    asking = replace(config, ring=_ASKING.ring, queue=_ASKING.queue, links=_ASKING.links)

    def open_all(place: StoreUrl, _: Layout | None) -> Store:
        found = ByRank(place.label)
        count = len(layouts)
        found.meet(
            {layout.fingerprint: peers_of(asking, rank, count)(place, layout) for rank, layout in enumerate(layouts)}
        )
        return found

    return open_all


def at_rank(address: str, rank: int, ranks: int) -> str:
    """Where a rank listens, of an instance that listens at `address`: each at the next port, or a path of its own.

    Raises ConfigError for what is no address.
    """
    place = parse_address(address)
    if ranks == 1:
        return str(place)
    if place.path:
        return str(Address(path=f"{place.path}.{rank}"))
    return str(Address(place.host, place.port + rank if place.port else 0))


def _shifted(place: StoreUrl, rank: int, ranks: int) -> StoreUrl:
    if ranks == 1:
        return place
    parts = urlsplit(place.url)
    if not parts.netloc:
        return replace(place, url=f"{place.url}.{rank}", path=f"{place.path}.{rank}")
    try:
        return replace(place, url=f"peer://{at_rank(parts.netloc, rank, ranks)}")
    except ConfigError:
        return place  # whoever opens it says what is wrong with it
