"""Lookups of requests in the stores: within limits that adapt, each with one counted outcome.

The thread that asks answers what needs no call that may wait: blocks in memory, and blocks of which a store knows by itself
whether it has them (`Store.known`). Only the rest goes to a thread.

A request waits for its lookup as long as that can pay. Remote tiers get a tenth of the time that computing would take. Local
tiers answer at once, unless the machine is busy; then computing is slow too, so they get all of that time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from foreword.blocks.resume import alignment
from foreword.offload.policy import search_seconds
from foreword.offload.search import Found, StoredGroup, find_resumable
from foreword.store.background import use_background_cores
from foreword.store.base import Name
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TieredStore, TierSearch

if TYPE_CHECKING:
    from foreword.offload.device import Event

_THREADS: Final = 4
_QUICK: Final = 0.0005  # seconds; the engine's thread waits a moment for lookups that usually are this quick
_WEIGHT: Final = 0.2
# A lookup ends by itself at its limit. A request waits this much longer, in case all threads are taken.
_SPARE_SECONDS: Final = 1.0
_MEMORY_SECONDS: Final = 0.5  # of these for memory, if it is asked last

# What a lookup found: the tier of each block, or a position. And how many tokens that is.
Result = tuple[list[int] | Found, int]


@dataclass(frozen=True, slots=True)
class LookupCounts:
    """Lookups by outcome, and the tokens that were looked up: those found, and the rest by the reason. `inline` of the lookups
    were answered on the thread that asked."""

    lookups: dict[LookupOutcome, int] = field(default_factory=dict)
    tokens: dict[LookupOutcome, int] = field(default_factory=dict)
    inline: int = 0


@dataclass(slots=True, eq=False)
class StoreLoad:
    """One request's lookup in the stores and the load that may follow.

    The engine's thread owns it, a thread of the lookups and then one of the loads fills it. The engine's thread never waits for
    a copy: `close` says that no copy begins any more, and the blocks are the load's until it is `done`.

    Attributes:
        names: names of the blocks that are looked up, then loaded.
        root: root key of the chain, if the lookup is for a position.
        groups: the KV group of each block; empty if there is one group only.
        deadline: end of the lookup, then of the load.
        places: the tier of each block that was found, in chain order; None before the lookup has ended.
        found: the result of a lookup for a position.
        tokens: how many tokens the load saves, if that does not follow from the number of blocks.
        skip, requested: the load skips the first `skip` blocks and loads the next `requested` into the device blocks `blocks`.
        patient: load all that is found, even if computing it would be faster: no request waits for it.
        mark: the device's work when the blocks were handed over, which their former contents belong to; None on a CPU.
        held_up: the load waits for that work, which computing would wait for too: its deadline moves. `waited`: for how many
            seconds it did.
        loaded: number of blocks that were loaded; `tiers` are the tiers that they came from.
        copying: copies into the blocks that have begun and are not known to be done.
        finished: no copy begins any more.
        tasks: what runs of the lookup, then of the load. An error may have kept one from saying that it has ended.
    """

    names: Sequence[Name]
    deadline: float
    root: bytes = b""
    places: list[int] | None = None
    groups: Sequence[int] = ()
    found: Found | None = None
    tokens: int = 0
    patient: bool = False
    skip: int = 0
    requested: int = 0
    blocks: list[int] = field(default_factory=list)
    mark: Event | None = None
    held_up: bool = False
    waited: float = 0.0
    loaded: int = 0
    tiers: list[int] = field(default_factory=list)
    copying: int = 0
    started: float = 0.0
    finished: bool = False
    tasks: list[Future[None]] = field(default_factory=list)
    _ended: bool = False
    _lost: bool = False
    _count: Callable[[int, LookupOutcome], None] = lambda found, reason: None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # held for assignments only

    @property
    def answered(self) -> bool:
        """Whether the lookup has ended. At its deadline it ends without a result, and where it has failed."""
        if not self._ended and time.monotonic() >= self.deadline:
            self.end(None, LookupOutcome.TIMED_OUT)
        if not self._ended and self._has_run():
            self.end(None, LookupOutcome.TIER_OFF)
        return self._ended

    def _has_run(self) -> bool:
        return bool(self.tasks) and all(task.done() for task in self.tasks)

    def end(self, result: Result | None, reason: LookupOutcome) -> None:
        """End the lookup with what it has found, and the reason why that is not more. Only the first call counts."""
        with self._lock:
            if self._ended:
                return
            what, tokens = result or (None, 0)
            self.found = what if isinstance(what, Found) else None
            self.places = what if isinstance(what, list) else None
            self._ended = True
        self._count(tokens, reason)

    @property
    def done(self) -> bool:
        """Whether the load has ended, or its deadline has passed, and nothing is written into its blocks any more."""
        late = not self.held_up and time.monotonic() >= self.deadline
        if not self.finished and (late or self._has_run()):
            self.close()
        return self.finished and not self.copying

    def close(self) -> list[int]:
        """End the load: no copy begins from now on. Those that have begun write until the load is `done`. Returns the tier of
        each block that was loaded by now."""
        with self._lock:
            self.finished = True
            return list(self.tiers)

    def discard(self) -> None:
        """End the load as if no block had been loaded: the device is about to lose its contents."""
        with self._lock:
            self.finished = self._lost = True
            self.tiers = []

    def begin_copy(self) -> bool:
        """Count a copy of the next blocks into the device, which is about to be queued. False if the load was closed: it must
        not be queued then."""
        with self._lock:
            self.copying += not self.finished
            return not self.finished

    def end_copy(self, tiers: Sequence[int] | None) -> None:
        """The oldest copy is done, of blocks that came from `tiers`. None if it failed: what follows it does not count."""
        with self._lock:
            self._lost |= tiers is None
            if tiers is not None and not self._lost:
                self.loaded += len(tiers)
                self.tiers += tiers
            self.copying -= 1


class StoreLookups:
    """Looks up the prefixes of requests. Calls come from the engine's thread and do not block.

    Args:
        lookup_timeout: seconds for remote tiers; more where computing takes long, or its speed is not known yet.
        load_timeout: seconds for lookups that no request waits for.
        prefill_rate: the engine's measured prefill speed in tokens per second; 0.0 while it is unknown.
        on_end: called from other threads when a lookup has ended.
    """

    def __init__(
        self,
        store: TieredStore,
        lookup_timeout: float,
        load_timeout: float,
        prefill_rate: Callable[[], float],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._lookup_timeout = lookup_timeout
        self._load_timeout = load_timeout
        self._prefill_rate = prefill_rate
        self._on_end = on_end
        self._counting = threading.Lock()
        self._lookups: Counter[LookupOutcome] = Counter()
        self._tokens: Counter[LookupOutcome] = Counter()
        self._inline = 0
        self._threads = ThreadPoolExecutor(_THREADS, "foreword-find", use_background_cores)
        self._seconds = 0.0

    # Counts

    def counts(self) -> LookupCounts:
        with self._counting:
            return LookupCounts(dict(self._lookups), dict(self._tokens), self._inline)

    @property
    def total(self) -> int:
        """How many lookups were counted."""
        with self._counting:
            return sum(self._lookups.values()) + self._inline

    def refuse(self, outcome: LookupOutcome, tokens: int) -> None:
        """Count a request, and its tokens, for which nothing is looked up."""
        self._count(tokens, 0, outcome)

    def _count(self, tokens: int, found: int, reason: LookupOutcome) -> None:
        with self._counting:
            self._lookups[LookupOutcome.FOUND if found else reason] += 1
            self._tokens[LookupOutcome.FOUND] += found
            self._tokens[reason] += tokens - found

    # Lookups

    def find_position(
        self,
        groups: Sequence[StoredGroup],
        root: bytes,
        keys: Sequence[bytes],
        held: int,
        limit: int,
        *,
        patient: bool = False,
    ) -> StoreLoad:
        """Start a lookup of the longest position up to `limit` tokens from which the model can continue.

        Blocks of the first `held` tokens are on the device. `StoreLoad.found` has the result. A lookup that usually ends at
        once has ended when this returns.
        """
        best = limit - limit % alignment([one.group for one in groups])

        def look_up(search: TierSearch, inline: bool) -> Result:
            found = find_resumable(self._store, groups, root, keys, held, limit, search, inline=inline)
            return found, found.position - held

        load, ending = self.start(StoreLoad([], 0.0, root, patient=patient), best - held, look_up)
        if ending is not None and self._seconds < _QUICK:
            futures.wait([ending], 4 * _QUICK)
        return load

    def start(
        self, load: StoreLoad, tokens: int, look_up: Callable[[TierSearch, bool], Result]
    ) -> tuple[StoreLoad, Future[None] | None]:
        """Start a lookup of `tokens` tokens. It has ended if no future is returned.

        `look_up(search, inline)` makes it. With `inline`, it asks no tier that may block; `search.undecided` says whether that
        leaves something open.
        """
        began = time.monotonic()
        local, remote = self._limits(tokens)
        limit = began + (self._load_timeout if load.patient else local + remote)
        load.deadline = limit + _SPARE_SECONDS
        load._count = partial(self._count, tokens)
        if self._answer_inline(load, limit, look_up):
            return load, None
        ending: Future[None] = Future()

        def run() -> None:
            result, reason = None, LookupOutcome.TIER_OFF
            try:
                search = TierSearch(limit) if load.patient else TierSearch(limit + _MEMORY_SECONDS, local, remote)
                result = look_up(search, False)
                reason = search.reason
            finally:  # an error ends a lookup too: a request waits for it
                self._seconds += _WEIGHT * (time.monotonic() - began - self._seconds)
                load.end(result, reason)
                ending.set_result(None)
                self._on_end()

        load.tasks.append(self._threads.submit(run))
        return load, ending

    def _answer_inline(self, load: StoreLoad, limit: float, look_up: Callable[[TierSearch, bool], Result]) -> bool:
        """Answer a lookup on this thread. False if only a call that may block can tell."""
        search = TierSearch(limit)
        result = look_up(search, True)
        if search.undecided:
            return False
        with self._counting:
            self._inline += 1
        load.end(result, search.reason)
        self._on_end()
        return True

    def _limits(self, tokens: int) -> tuple[float, float]:
        """Seconds for the local tiers, and for the remote ones."""
        rate, tiers = self._prefill_rate(), self._store.tiers
        local, remote = search_seconds(self._lookup_timeout, tokens / rate if rate else None)
        has_remote = any(not tier.local for tier in tiers)
        only_remote = has_remote and not any(tier.local and tier.blocking for tier in tiers)
        return 0.0 if only_remote else local, remote if has_remote else 0.0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
