"""External KV: KV of a sequence that this engine does not compute. The contract, and loads from the stores.

A sequence takes blocks and waits while they are filled. They are published when that is over. A prefetch loads blocks of a
coming prompt before its request arrives. It takes only memory that requests do not need, and ends early when they do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from foreword.blocks.layout import BlockUnits, Layout
from foreword.blocks.pool import BlockPool
from foreword.blocks.prefix_cache import BlockTable, Match, PrefixCache
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.offload.load import LoadPlan, StoreLoad
from foreword.offload.lookups import StoreSearch
from foreword.offload.manager import MIN_PATIENCE, OffloadManager
from foreword.offload.policy import LoadCosts
from foreword.offload.search import Found, StoredGroup
from foreword.offload.writer import WRITE_TIMEOUT
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TieredStore
from foreword.tokens.token_logprob import TokenLogprob

if TYPE_CHECKING:
    from foreword.offload.staging import StagingArena

MAX_PREFETCHES: Final = 64
# Prefetches that load at the same time.
_MAX_LOADING: Final = 4


@dataclass(frozen=True, slots=True)
class KVArrival:
    """External KV that has come.

    Attributes:
        start: leading tokens that had KV before.
        tokens: leading tokens that have KV now.
        cached_tokens: leading tokens that were cached, here or at the sender.
        tiers: the store tier of each block that was loaded.
        origin: the instance that sent the KV; "" for a store.
        seconds: how long a store took.
        token, logprob: the token after the prompt, if the sender sampled it. Then `tokens` is the whole prompt.
    """

    start: int
    tokens: int
    cached_tokens: int
    tiers: Sequence[int] = ()
    origin: str = ""
    token: int | None = None
    logprob: TokenLogprob | None = None
    seconds: float = 0.0


class ExternalKV(Protocol):
    """Fills blocks that a sequence holds: a load from the stores, a remote prefill, or an incoming migration. The engine's
    thread makes these calls, and each returns at once: none waits for a copy on the device.

    Attributes:
        from_store: a load from the stores; the engine's loop keeps looking at it, because it has a deadline.
        blocks: those that it fills.
    """

    from_store: bool
    blocks: Sequence[int]

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        ...

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        """Fill `blocks`, which follow the first `held` blocks of the sequence. `keys` are those of its full blocks."""
        ...

    @property
    def writing(self) -> bool:
        """After `close`: a copy into the blocks had begun, and is not done. The blocks must not be used for anything else."""
        ...

    def close(self) -> KVArrival:
        """Begin no copy any more, and say what has come. A second call returns the same."""
        ...


class UnsettledBlocks:
    """Blocks of external KV that was closed while copies into them were queued on the device. Each has a reference until the
    copies are done: nothing writes into a block that the pool gives to a sequence."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._closed: list[ExternalKV] = []

    def __bool__(self) -> bool:
        return bool(self._closed)

    def hold(self, closed: ExternalKV) -> None:
        """Keep the blocks of external KV that was just closed, if something is written into them. Call it before the blocks
        are released."""
        if closed.writing:
            self._pool.share(closed.blocks)
            self._closed.append(closed)

    def release(self) -> None:
        """Give back the blocks whose copies are done."""
        done = [one for one in self._closed if not one.writing]
        for one in done:
            self._closed.remove(one)
            self._pool.release(one.blocks)


class RemoteKV(ExternalKV, Protocol):
    """A prompt that another instance computes (`disaggregation.remote_prefill.RemotePrefill`).

    Attributes:
        min_tokens: for fewer tokens it is not worth it.
        closed: `close` was called.
    """

    min_tokens: int
    closed: bool


class BlockSearch(Protocol):
    """A search in the stores (`offload.lookups.StoreSearch`)."""

    @property
    def answered(self) -> bool: ...
    @property
    def found(self) -> Found | None: ...


class Load(Protocol):
    """A load from the stores (`offload.load.StoreLoad`)."""

    @property
    def done(self) -> bool: ...
    def close(self) -> list[int]: ...


AnyLoad = TypeVar("AnyLoad", bound=Load)
Done = TypeVar("Done")


class Stores(Protocol[AnyLoad]):
    """The stores that may hold blocks (`EngineStores`), of these KV groups, and what is worth loading."""

    @property
    def groups(self) -> Sequence[StoredGroup]: ...
    @property
    def costs(self) -> LoadCosts: ...
    def search(
        self, root: bytes, keys: Sequence[bytes], held: int, limit: int, /, *, patient: bool = False
    ) -> BlockSearch: ...
    def load(
        self, plan: LoadPlan, root: bytes, keys: Sequence[bytes], blocks: Sequence[int], /, *, patient: bool = False
    ) -> AnyLoad: ...
    def hurry(self, load: AnyLoad, /) -> None: ...
    def refuse_lookup(self, outcome: LookupOutcome, tokens: int, /) -> None: ...


class StoreKV:
    """Blocks of one sequence in the stores: searched behind the first `first` ones, then loaded if that is faster than
    computing. With several KV groups a load brings all that it was to bring, or nothing.

    Args:
        root: root key of the chain.
        keys: of all full blocks of the chain.
        in_flight: keys of the blocks that are being loaded for any sequence. This load adds its own.
        patient: load all that is found, however long it takes.
    """

    from_store = True

    def __init__(
        self,
        stores: Stores[Any],
        root: bytes,
        keys: Sequence[bytes],
        first: int,
        block_size: int,
        in_flight: set[bytes],
        *,
        patient: bool = False,
    ) -> None:
        self.first = first
        self._stores = stores
        self._root = root
        self._keys = keys
        self._block_size = block_size
        self._in_flight = in_flight
        self._patient = patient
        self._search = stores.search(root, keys, first * block_size, len(keys) * block_size, patient=patient)
        self._plan: LoadPlan | None = None
        self._load: Load | None = None
        self._held = 0
        self._began = 0.0
        self._loading: Sequence[bytes] = ()
        self._measured = False
        self.blocks: Sequence[int] = ()

    @property
    def answered(self) -> bool:
        """The search has ended, or has taken too long."""
        return self._search.answered

    @property
    def reach(self) -> int:
        """In a model with windows, tokens up to which the stores have every block of the groups with full attention."""
        found = self._search.found
        return 0 if found is None or found.step else found.reach

    def worth_loading(self, held: int) -> int:
        """How many blocks after the first `held` are loaded rather than computed."""
        found, size = self._search.found, self._block_size
        if found is None:
            return 0
        self._plan = self._stores.costs.best(found, held * size, patient=self._patient)
        return 0 if self._plan is None else self._plan.position // size - held

    @property
    def done(self) -> bool:
        return self._load is not None and self._load.done

    @property
    def writing(self) -> bool:
        return self._load is not None and not self._load.done

    def hurry(self, key: bytes) -> None:
        """A request waits for this block: loading may take no longer than computing."""
        if key in self._loading and self._load is not None:
            self._stores.hurry(self._load)

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        assert self._plan is not None
        self._held, self._loading, self._began = held, keys[held:], time.monotonic()
        self.blocks = blocks
        self._in_flight.update(self._loading)
        self._load = self._stores.load(self._plan, self._root, self._keys, blocks, patient=self._patient)

    def close(self) -> KVArrival:
        loaded = [] if self._load is None else self._load.close()
        if self._plan is not None and self._load is not None and not self._patient and not self._measured:
            self._measured = True
            blocks = self._plan.wanted(self._stores.groups)
            self._stores.costs.note_load(blocks, time.monotonic() - self._began, whole=len(loaded) >= len(self.blocks))
        tiers = self._arrived(loaded)
        self._in_flight.difference_update(self._loading)
        start, tokens = self._held * self._block_size, (self._held + len(tiers)) * self._block_size
        return KVArrival(start, tokens, tokens, tiers, seconds=time.monotonic() - self._began if tiers else 0.0)

    def _arrived(self, tiers: Sequence[int]) -> Sequence[int]:
        """The tier of each block of the sequence that has come, given those of what was loaded."""
        found = self._search.found
        if found is None or found.step:
            return tiers
        if len(tiers) < len(self.blocks):
            return ()
        # The first group's blocks come first; a window has fewer than the tokens that they stand for.
        count = len(self._loading)
        return tiers[:count] if self._stores.groups[0].group.whole or not tiers else [tiers[-1]] * count


StartSearch = Callable[[bytes, Sequence[bytes], int], StoreKV]


@dataclass(slots=True, eq=False)
class _Prefetch:
    table: BlockTable
    on_end: Callable[[BlockTable, str], None]
    store: StoreKV | None = None


class Prefetches:
    """Prefetches that wait, and those that load.

    Args:
        search: starts a search in the stores for the blocks behind the first ones; None without stores.
        in_flight: keys of blocks that stores are loading.
        unsettled: keeps the blocks of prefetches that end early.
    """

    def __init__(
        self, cache: PrefixCache, search: StartSearch | None, in_flight: set[bytes], unsettled: UnsettledBlocks
    ) -> None:
        self._cache = cache
        self._unsettled = unsettled
        self._search = search
        self._in_flight = in_flight
        self._waiting: deque[_Prefetch] = deque()
        self._loading: list[_Prefetch] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._loading)

    def add(self, table: BlockTable, on_end: Callable[[BlockTable, str], None]) -> None:
        """Queue a prefetch of a table, which has full blocks only. `on_end` is called with it and the reason for an early end,
        before its blocks go back to the cache."""
        self._waiting.append(_Prefetch(table, on_end))

    def tables(self) -> list[BlockTable]:
        return [one.table for one in (*self._waiting, *self._loading)]

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

    def _is_searched(self, one: _Prefetch, held: int) -> bool:
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

    def _begin(self, one: _Prefetch, match: Match, free: int) -> int:
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

    def _loaded(self, one: _Prefetch, reason: str) -> None:
        assert one.store is not None
        self._loading.remove(one)
        full = one.store.close().tokens // self._cache.block_size
        self._unsettled.hold(one.store)
        self._cache.truncate(one.table, full)
        self._cache.publish(one.table, full)
        self._end(one, reason)

    def _end(self, one: _Prefetch, reason: str) -> None:
        one.on_end(one.table, reason)
        if one.table.blocks:
            self._cache.release(one.table)


class EngineStores(OffloadManager):
    """The offload manager as the embedded engine uses it, with calls that take chains of keys: the `Stores` of its scheduler.

    Args:
        kinds: the KV groups of the model's layers; None: each layout has one with full attention.
    """

    def __init__(
        self,
        store: TieredStore,
        staging: StagingArena,
        groups: Sequence[Layout | BlockUnits],
        *,
        kinds: Sequence[KVGroup] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(store, staging, groups, **options)
        sizes = [one.tokens * one.per_block for one in self.units]
        kinds = [KVGroup(GroupKind.FULL, size) for size in sizes] if kinds is None else kinds
        self.groups = [
            StoredGroup(kind, tuple(layout.fingerprint for layout in one.layouts), one.per_block, divided=True)
            for kind, one in zip(kinds, self.units, strict=True)
        ]

    def search(
        self, root: bytes, keys: Sequence[bytes], held: int, limit: int, *, patient: bool = False
    ) -> StoreSearch:
        """Start a search in the stores (`StoreLookups.search`)."""
        return self.lookups.search(self.groups, root, keys, held, limit, patient=patient)

    def refuse_lookup(self, outcome: LookupOutcome, tokens: int) -> None:
        """Count a request, and its tokens, for which nothing is looked up."""
        self.lookups.refuse(outcome, tokens)

    def load(
        self, plan: LoadPlan, root: bytes, keys: Sequence[bytes], blocks: Sequence[int], *, patient: bool = False
    ) -> StoreLoad:
        """Start to load what is planned into the device blocks `blocks`: of each KV group, in order, those behind the first
        `plan.held` tokens."""
        free = iter(blocks)
        parts = plan.blocks(self.groups, keys, lambda group, block: next(free))
        load = self.hand_over(root, parts, plan.position - plan.held, patient=patient)
        assert next(free, None) is None, "a block for which nothing is planned"
        self.start(load)
        return load

    def hurry(self, load: StoreLoad) -> None:
        """A request waits for this patient load: from now on it may take as long as computing its blocks."""
        per_token = self.costs.seconds_per_token
        if load.patient and per_token is not None:
            load.patient = False
            load.deadline = min(load.deadline, time.monotonic() + max(load.tokens * per_token, MIN_PATIENCE))

    def after_writes(self, work: Callable[[], Done]) -> Future[Done]:
        """Do something once what waits to be written is written."""

        def both() -> Done:
            self.flush_writes(WRITE_TIMEOUT)
            return work()

        return self.later(both)

    def erasing(self, roots: Sequence[bytes], timeout: float = 5.0) -> AbstractContextManager[int]:
        """The stores are swept inside of chains whose roots begin with one of these bytes. Drops what waits to be written of
        them, and lets no load bring such blocks into a tier meanwhile. Gives how many blocks are still being written after
        `timeout` seconds."""
        return self._writer.erasing(roots, timeout)
