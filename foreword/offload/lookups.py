"""Lookups of requests in the stores: within limits that adapt, each with one counted outcome.

The thread that asks answers what needs no call that may wait: blocks in memory, and blocks of which a store knows by itself
whether it has them (`Store.known`). Only the rest goes to a thread.

A request waits for its lookup as long as that can pay. Remote tiers get a tenth of the time that computing would take. Local
tiers answer at once, unless the machine is busy; then computing is slow too, so they get all of that time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from foreword.blocks.resume import alignment
from foreword.offload.counters import LookupCounts
from foreword.offload.policy import search_seconds
from foreword.offload.search import Found, StoredGroup, find_resumable
from foreword.store.background import use_background_cores
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TieredStore, TierSearch

_THREADS: Final = 4
_QUICK: Final = 0.0005  # seconds; the engine's thread waits a moment for lookups that usually are this quick
_WEIGHT: Final = 0.2
# A lookup ends by itself at its limit. A request waits this much longer, in case all threads are taken.
_SPARE_SECONDS: Final = 1.0
_MEMORY_SECONDS: Final = 0.5  # of these for memory, if it is asked last


@dataclass(slots=True, eq=False)
class StoreSearch:
    """A request's search in the stores. The thread that asks owns it; that thread or another one ends it.

    Attributes:
        lock: of all searches of an engine, and of what is counted of them; held for assignments only.
        patient: no request waits for it.
        deadline: then it ends without a result.
        found: the result; None before the search has ended, and where it has failed.
        tasks: what runs of it. An error may have kept it from saying that it has ended.
    """

    lock: threading.Lock = field(repr=False)
    patient: bool = False
    deadline: float = math.inf
    found: Found | None = None
    tasks: list[Future[None]] = field(default_factory=list)
    _ended: bool = False
    _count: Callable[[int, LookupOutcome], None] = lambda found, reason: None

    @property
    def answered(self) -> bool:
        """Whether the search has ended. At its deadline it ends without a result, and where it has failed."""
        if not self._ended and time.monotonic() >= self.deadline:
            self.end(None, 0, LookupOutcome.TIMED_OUT)
        if not self._ended and self.tasks and all(task.done() for task in self.tasks):
            self.end(None, 0, LookupOutcome.TIER_OFF)
        return self._ended

    def end(self, found: Found | None, tokens: int, reason: LookupOutcome) -> None:
        """End the search with what it has found, which is `tokens` tokens, and the reason why that is not more. Only the first
        call counts."""
        with self.lock:
            if self._ended:
                return
            self.found, self._ended = found, True
        self._count(tokens, reason)


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
        self._lock = threading.Lock()
        self._lookups: Counter[LookupOutcome] = Counter()
        self._tokens: Counter[LookupOutcome] = Counter()
        self._inline = 0
        self._threads = ThreadPoolExecutor(_THREADS, "foreword-find", use_background_cores)
        self._seconds = 0.0

    # Counts

    def counts(self) -> LookupCounts:
        with self._lock:
            return LookupCounts(self._lookups.copy(), self._tokens.copy(), self._inline)

    def refuse(self, outcome: LookupOutcome, tokens: int) -> None:
        """Count a request, and its tokens, for which nothing is looked up."""
        self._count(tokens, 0, outcome)

    def _count(self, tokens: int, found: int, reason: LookupOutcome) -> None:
        with self._lock:
            self._lookups[LookupOutcome.FOUND if found else reason] += 1
            self._tokens[LookupOutcome.FOUND] += found
            self._tokens[reason] += tokens - found

    # Lookups

    def search(
        self,
        groups: Sequence[StoredGroup],
        root: bytes,
        keys: Sequence[bytes],
        held: int,
        limit: int,
        *,
        patient: bool = False,
    ) -> StoreSearch:
        """Start a search for the longest position up to `limit` tokens from which the model can continue.

        Blocks of the first `held` tokens are on the device. `root` is the root key of the chain, `keys` are those of its
        blocks. A search that usually ends at once has ended when this returns.
        """
        tokens = max(limit - limit % alignment([one.group for one in groups]) - held, 0)
        local, remote = self._limits(tokens)
        began = time.monotonic()
        until = began + (self._load_timeout if patient else local + remote)
        search = StoreSearch(self._lock, patient, until + _SPARE_SECONDS, _count=partial(self._count, tokens))
        find = partial(find_resumable, self._store, groups, root, keys, held, limit)
        if self._answer_inline(search, find, held, until):
            return search
        ending: Future[None] = Future()

        def run() -> None:
            found, reason = None, LookupOutcome.TIER_OFF
            try:
                tiers = TierSearch(until) if patient else TierSearch(until + _MEMORY_SECONDS, local, remote)
                found = find(tiers)
                reason = tiers.reason
            finally:  # an error ends a search too: a request waits for it
                self._seconds += _WEIGHT * (time.monotonic() - began - self._seconds)
                search.end(found, 0 if found is None else found.position - held, reason)
                ending.set_result(None)
                self._on_end()

        search.tasks.append(self._threads.submit(run))
        if self._seconds < _QUICK:
            futures.wait([ending], 4 * _QUICK)
        return search

    def _answer_inline(self, search: StoreSearch, find: Callable[..., Found], held: int, limit: float) -> bool:
        """Answer a search on this thread. False if only a call that may block can tell."""
        tiers = TierSearch(limit)
        found = find(tiers, inline=True)
        if tiers.undecided:
            return False
        with self._lock:
            self._inline += 1
        search.end(found, found.position - held, tiers.reason)
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
