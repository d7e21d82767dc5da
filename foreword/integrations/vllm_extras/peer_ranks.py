"""Stores of other instances (`peer://`), one per rank, and the memory of workers for a scheduler in another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from foreword.blocks.layout import Layout
from foreword.config import TransferConfig
from foreword.errors import ConfigError
from foreword.integrations.vllm.rank_stores import RankStores
from foreword.store.base import Store
from foreword.store.types import Opener, StoreUrl
from foreword.transfer.peer import PeerStore, opener
from foreword.transfer.sockets import Address, parse_address

# For connections that carry lookups only: no payload, so the smallest ring.
_LOOKUPS_ONLY = TransferConfig(links=("tcp",), ring="64KiB", queue="64KiB")


def worker_memory(address: str, label: str) -> Store:
    """A worker's memory tiers, for the scheduler on the same host."""
    return PeerStore(address, config=_LOOKUPS_ONLY, label=label)


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
