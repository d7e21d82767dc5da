"""Prefetches: blocks of a coming prompt are loaded from the stores to the device before the request arrives.

Nothing is computed. A prefetch takes only memory that requests do not need, and ends early when they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from foreword.blocks.prefix_cache import BlockTable, Match, PrefixCache
from foreword.engine.external_kv import StoreKV, StorePosition

MAX_PREFETCHES: Final = 64
_MAX_LOADING: Final = 4

Search = Callable[[bytes, Sequence[bytes], int], StoreKV | StorePosition]


@dataclass(slots=True, eq=False)
class Prefetch:
    """One prefetch.

    Attributes:
        on_end: called with the table and the reason for an early end, before the table's blocks go back to the cache.
    """

    table: BlockTable
    on_end: Callable[[BlockTable, str], None]
    store: StoreKV | StorePosition | None = None


class Prefetches:
    """Prefetches that wait, and those that load.

    Args:
        search: starts a search in the stores for the blocks behind the first ones; None without stores.
        in_flight: keys of blocks that stores are loading.
    """

    def __init__(self, cache: PrefixCache, search: Search | None, in_flight: set[bytes]) -> None:
        self._cache = cache
        self._search = search
        self._in_flight = in_flight
        self._waiting: deque[Prefetch] = deque()
        self._loading: list[Prefetch] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._loading)

    def add(self, one: Prefetch) -> None:
        """Queue a prefetch. Its table has full blocks only."""
        self._waiting.append(one)

    def collect(self) -> None:
        """End the prefetches whose load has ended."""
        for one in [one for one in self._loading if one.store is not None and one.store.done]:
            self._loaded(one, "")

    def start(self, free: int) -> None:
        """Start the prefetches that are searched, with at most `free` blocks."""
        for one in list(self._waiting):
            if len(self._loading) >= _MAX_LOADING:
                return
            match = self._cache.lookup(one.table)
            if self._is_searched(one, len(match.blocks)):
                self._waiting.remove(one)
                free -= self._begin(one, match, free)

    def _is_searched(self, one: Prefetch, held: int) -> bool:
        full = len(one.table) // self._cache.block_size
        if held >= full or self._search is None:
            return True
        chain = one.table.chain
        keys = chain.keys_to(full)[:full]
        if keys[held] in self._in_flight:
            return False
        if one.store is None or held < one.store.first:
            one.store = self._search(chain.root, keys, held)
        return one.store.answered

    def _begin(self, one: Prefetch, match: Match, free: int) -> int:
        """Start to load, or end if there is nothing to load. Returns how many blocks it took."""
        cache, held, before = self._cache, len(match.blocks), self._cache.pool.num_free
        count = 0 if one.store is None or held < one.store.first else one.store.worth_loading(held)
        short = cache.new_blocks(one.table, match, (held + count) * cache.block_size) > free
        cache.admit(one.table, match)
        fresh = cache.extend(one.table, held + count) if count and not short else None
        if fresh is None or one.store is None:
            self._end(one, "too little memory is free" if count else "")
            return 0
        self._loading.append(one)
        one.store.begin(one.table.chain.keys_to(held + count)[: held + count], held, fresh)
        return before - cache.pool.num_free

    def cancel(self) -> bool:
        """End the prefetch that began to load last, because a request needs its memory. False if none is loading."""
        if self._loading:
            self._loaded(self._loading[-1], "a request needed the memory")
            return True
        return False

    def cancel_all(self, reason: str) -> None:
        """End all prefetches: the engine closes."""
        while self._loading:
            self._loaded(self._loading[-1], reason)
        while self._waiting:
            self._end(self._waiting.pop(), reason)

    def hurry(self, key: bytes) -> None:
        """A request waits for this block: its load may take no longer than computing it."""
        for one in self._loading:
            if one.store is not None:
                one.store.hurry(key)

    def _loaded(self, one: Prefetch, reason: str) -> None:
        assert one.store is not None
        self._loading.remove(one)
        full = one.store.close().tokens // self._cache.block_size
        self._cache.truncate(one.table, full)
        self._cache.publish(one.table, full)
        self._end(one, reason)

    def _end(self, one: Prefetch, reason: str) -> None:
        one.on_end(one.table, reason)
        if one.table.blocks:
            self._cache.release(one.table)
