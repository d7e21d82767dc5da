"""A tiered store: several stores as one, fastest first, where the failure of a store is a cache miss.

`TieredStore` counts every error and timeout of a tier and looks for the block in the next tier. A circuit breaker skips
a tier that keeps failing. Every frame is verified (checksum, name, length) before a caller sees it; a frame that does
not pass is counted and deleted from its tier.

No tier delays another: each has its own threads, memory is read on the caller's thread, a tier that is not the last gets
half of the time that is left, and a call that does not return is abandoned shortly after its deadline.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, groupby, zip_longest
from typing import Any, Final

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.blocks.layout import NAME_BYTES
from foreword.errors import StoreConfigError, StoreError
from foreword.store.background import at_once
from foreword.store.base import MISSING, Name, Store, StoredBlock, StoreStatus, copy_error, step_deadline
from foreword.store.frame import Frame, Header
from foreword.store.tier import OnLate, StoreTier
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tier_rules import BlockUse, TierRule
from foreword.store.tier_threads import TierCall

Tiers = tuple[int, ...]  # indexes of tiers
OnFailure = Callable[[StoreTier, StoreError], None]


def raise_failure(tier: StoreTier, error: StoreError) -> None:
    raise error


_WARM_UP_SECONDS: Final = 5.0
HOLD_NEEDS: Final = "hold needs a faster tier, which has the blocks until they are written"


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """A verified frame that `TieredStore.fetch` has read, and the index of the tier that it came from."""

    frame: Frame
    tier: int


class TierSearch:
    """A search in the tiers: how long it may take, and why it may have missed something. Used by one thread.

    Args:
        deadline: the end of all calls.
        local, remote: seconds that the calls of local tiers may take together, and those of remote tiers. With both, a remote
            tier that hangs takes no time from the local ones, nor the other way round.

    Attributes:
        parts: how many lookups share the time that is left; the next one gets this part of it.
        undecided: tiers that may block were not asked, and do not know by themselves whether they have a block.
    """

    __slots__ = ("_left", "_missed", "deadline", "parts", "undecided")

    def __init__(self, deadline: float, local: float = math.inf, remote: float = math.inf) -> None:
        self.deadline = deadline
        self.parts = 1
        self.undecided = False
        self._left = {True: local, False: remote}
        self._missed: set[LookupOutcome] = set()

    def until(self, tier: StoreTier, later: Iterable[StoreTier]) -> float:
        """The deadline of a call of `tier`. Half of the time is for tiers that are asked later, if they share it."""
        if not tier.blocking:
            return self.deadline
        now = time.monotonic()
        left = min(self._left[tier.local], self.deadline - now) / self.parts
        # Whether what this tier takes is missing for a later one.
        shared = any(math.isinf(self._left[tier.local]) or (one.blocking and one.local == tier.local) for one in later)
        return now + left / (2 if shared else 1)

    def note(self, tier: StoreTier, began: float, until: float, outcome: LookupOutcome, *, complete: bool) -> None:
        """A call that began at `began` and had until `until` has ended. `complete`: it has found all that was asked."""
        now = time.monotonic()
        if tier.blocking:
            self._left[tier.local] = max(self._left[tier.local] - (now - began), 0.0)
        if not complete:
            late = outcome is LookupOutcome.FOUND and now >= until
            self._missed.add(LookupOutcome.TIMED_OUT if late else outcome)

    @property
    def reason(self) -> LookupOutcome:
        """Why more was not found."""
        for one in (LookupOutcome.TIMED_OUT, LookupOutcome.TIER_OFF, LookupOutcome.NOT_ALLOWED):
            if one in self._missed:
                return one
        return LookupOutcome.ABSENT


class TieredStore(Store):
    """Several stores as one, fastest first. A failing tier never makes a block operation raise.

    Args:
        stores: the tiers.
        persistent: indexes of the tiers that outlive the process (None: all). Records are written to these if there are
            any. They are read from the last tier first, which is the one shared by the most instances.
        writable: indexes of the tiers that take writes (None: all). The other tiers are only read: blocks are never
            put, promoted, pinned or deleted there, and records are written there only if there is no other tier.
        rules: which blocks each tier takes (None, or no rules: all).
        locations: names of the tiers that all instances use; by default their labels.

    Attributes:
        writable: indexes of the tiers that take writes.
        selective: whether a tier does not take every block. `defers`: whether one gets blocks late.
        record_tiers: the tiers that keep records, in the order in which they are read.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        persistent: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        writable: Sequence[int] | None = None,
        rules: Sequence[TierRule | None] = (),
        locations: Sequence[str] | None = None,
    ) -> None:
        self.writable: Tiers = tuple(range(len(stores)) if writable is None else sorted(writable))
        self.tiers = [
            (rule.tier if rule is not None else StoreTier)(store, clock, writable=index in self.writable)
            for index, (store, rule) in enumerate(zip_longest(stores, rules))
        ]
        for index, tier in enumerate(self.tiers):
            tier.faster = self.tiers[:index]
            if tier.defers and not index:
                raise StoreConfigError(f"{tier.label}: {HOLD_NEEDS}")
        for tier, location in zip(self.tiers, locations or (), strict=locations is not None):
            tier.location = location
        self.defers = any(tier.defers for tier in self.tiers)
        self.selective = any(tier.selective for tier in self.tiers)
        self.label = " > ".join(tier.label for tier in self.tiers)
        chosen = sorted(persistent or ()) or self.writable or range(len(stores))
        self.record_tiers = [self.tiers[index] for index in chosen][::-1]

    def subscribe(self, listener: Callable[[int, bool, Sequence[Name]], None]) -> None:
        """Call `listener(tier, stored, names)` whenever this process stores blocks in a writable tier or removes them.

        Evictions by a server such as Redis, and changes that other processes make, are not reported. The listener is
        called on any thread and possibly under a store's lock: it must be quick and must not raise.
        """
        for index in self.writable:
            self.tiers[index].subscribe(partial(listener, index))

    # Blocks

    def locate(
        self,
        names: Sequence[Name],
        *,
        deadline: float = math.inf,
        search: TierSearch | None = None,
        inline: bool = False,
        before: Sequence[Name] = (),
    ) -> list[int]:
        """The tier of each of `names`, up to the first that is missing everywhere. A hint: only `fetch` verifies.

        Args:
            deadline: then the call returns what it has found until then.
            search: how the time is divided, in place of a deadline.
            inline: do not ask tiers that may block, but take what they know by themselves (`search.undecided`).
            before: the blocks of the chain before the first name: some stores need them to find it.
        """
        search = search or TierSearch(deadline)
        places: list[int] = []
        while len(places) < len(names):
            found = len(places)
            for index, tier in enumerate(self.tiers):
                if len(places) == len(names):
                    break
                rest, known = names[len(places) :], [*before, *names[: len(places)]]
                until, began = search.until(tier, self.tiers[index + 1 :]), time.monotonic()
                if inline and tier.blocking:
                    told = tier.known_prefix(rest)
                    if told is None:
                        search.undecided = True
                        return places
                    count, outcome = told
                else:
                    count, outcome = tier.lookup(rest, until, known)
                search.note(tier, began, until, outcome, complete=count == len(rest))
                places += [index] * count
            if len(places) == found or len(self.tiers) == 1:
                break
        return places

    def find(
        self,
        names: Sequence[Name],
        *,
        deadline: float = math.inf,
        search: TierSearch | None = None,
        inline: bool = False,
        before: Sequence[Name] = (),
    ) -> list[int]:
        """The tier of each of `names`, each by itself; -1 for one that is missing everywhere. A hint: only `fetch` verifies.

        The arguments are those of `locate`.
        """
        search = search or TierSearch(deadline)
        places = [-1] * len(names)
        for index, tier in enumerate(self.tiers):
            missing = [i for i, place in enumerate(places) if place < 0]
            if not missing:
                break
            until, began = search.until(tier, self.tiers[index + 1 :]), time.monotonic()
            if inline and tier.blocking:
                told = tier.known([names[i] for i in missing])
                if told is None:
                    search.undecided = True
                    break
                present, outcome = told
            else:
                present, outcome = tier.present([names[i] for i in missing], until, [*before, *names[: missing[0]]])
            search.note(tier, began, until, outcome, complete=all(present))
            for i, there in zip(missing, present, strict=True):
                if there:
                    places[i] = index
        return places

    def warm_up(self, layouts: Iterable[bytes]) -> None:
        """Make a lookup for each layout in every tier that may block, in all tiers at once and for at most 5 seconds: they
        connect and open indexes before a request waits for it. Takes the fingerprints of the layouts. Never raises."""
        names = [one + bytes(NAME_BYTES - FINGERPRINT_BYTES) for one in layouts]
        deadline, asked = time.monotonic() + _WARM_UP_SECONDS, [tier for tier in self.tiers if tier.blocking]
        at_once([partial(tier.warm_up, names, deadline) for tier in asked])

    def turns(self, deadline: float) -> Iterator[tuple[int, float]]:
        """The index of each tier that may be read, and the deadline of a call of it, until the deadline has passed."""
        last = len(self.tiers) - 1
        for index, tier in enumerate(self.tiers):
            left = deadline - time.monotonic()
            if left <= 0:  # the call would count as a failure of this tier, not of the slow one
                return
            if not tier.suspended:
                yield index, deadline - left / 2 if tier.blocking and index < last else deadline

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        return [place >= 0 for place in self.find(names, deadline=deadline)]

    def tokens_by_tier(self, places: Iterable[int], block_size: int, most: int = sys.maxsize) -> dict[str, int]:
        """Count the first `most` tokens by the label of their tier, given the result of `locate`."""
        counts: dict[str, int] = {}
        for place in places:
            if most <= 0:
                break
            label = self.tiers[place].label
            counts[label] = counts.get(label, 0) + min(block_size, most)
            most -= block_size
        return counts

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        return len(self.locate(names, deadline=deadline))

    def fetch(
        self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float, on_late: OnLate | None = None
    ) -> list[FetchedBlock | None]:
        """Read and verify each block from the fastest tier that has a good copy.

        A store that hangs may write into a buffer after this call has ended. `on_late` learns of such buffers, on this thread
        and before the end of this call. Without it there are none, but blocks of stores that may block are copied once more.
        """
        found: list[FetchedBlock | None] = [None] * len(names)
        late: set[int] = set()
        for index, until in self.turns(deadline):
            missing = [i for i, one in enumerate(found) if one is None and i not in late]
            if not missing:
                break

            def note(positions: Sequence[int], call: TierCall[Any], missing: Sequence[int] = missing) -> None:
                late.update(missing[i] for i in positions)
                on_late([missing[i] for i in positions], call)  # type: ignore[misc]

            parts = [names[i] for i in missing], [buffers[i] for i in missing]
            frames = self.tiers[index].get(*parts, until, note if on_late is not None else None)
            for i, frame in zip(missing, frames, strict=True):
                if frame is not None:
                    found[i] = FetchedBlock(frame, index)
        return found

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        found = self.fetch(names, buffers, deadline=deadline)
        return [MISSING if one is None else len(one.frame.data) for one in found]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Store frames in every writable tier that takes them. Returns the largest number that one tier kept."""
        headers, use = [frame.header for frame in frames], BlockUse()

        def into(tier: StoreTier) -> int:
            chosen = list(compress(frames, tier.admits(headers, use)))
            return tier.put(chosen, deadline, wait=False) if chosen else 0

        return max((into(self.tiers[index]) for index in self.writable), default=0)

    def admitted(
        self, headers: Sequence[Header], use: BlockUse, tiers: Tiers | None = None
    ) -> Iterator[tuple[Tiers, int, int]]:
        """Divide blocks, in chain order, into runs that the same tiers take: these tiers, start and end of each run.

        Args:
            tiers: those that may take them; None: all writable ones.
        """
        tiers = self.writable if tiers is None else tiers
        choices = [self.tiers[index].admits(headers, use) for index in tiers]
        low = 0
        for taken, run in groupby(zip(*choices, strict=True) if choices else [()] * len(headers)):
            high = low + len(list(run))
            yield tuple(compress(tiers, taken)), low, high
            low = high

    def takes_again(self, name: Name) -> bool:
        """Whether a tier may take this block, or one before it, when it is used again. False for most: it is a quick test."""
        return any(self.tiers[index].takes_again(name) for index in self.writable)

    def promotion_targets(self, tier: int) -> Tiers:
        """The faster, writable tiers to which a block found in this tier is copied."""
        return tuple(index for index in self.writable if index < tier)

    def promoted(self, headers: Sequence[Header], tier: int) -> Iterator[tuple[Tiers, int, int]]:
        """Divide blocks found in this tier, in chain order, as `admitted` does: into runs for the same faster tiers."""
        return self.admitted(headers, BlockUse(promotion=True), self.promotion_targets(tier))

    def read_through(self, tier: int) -> StoreTier | None:
        """The tier into whose slots blocks of this one are read, so that it has them without a copy: the only one to which they
        are promoted, if it takes all blocks and reserves slots."""
        faster = [self.tiers[index] for index in self.promotion_targets(tier)]
        takes = len(faster) == 1 and not faster[0].selective and faster[0].store.memory is not None
        return faster[0] if takes else None

    def drop_deferred(self, names: Sequence[Name]) -> None:
        """Nothing continues these blocks: what a tier defers of them is not written."""
        for tier in self.tiers:
            with contextlib.suppress(StoreError):
                tier.drop_deferred(frozenset(names).__contains__, step_deadline(math.inf))

    def write_deferred(self, timeout: float) -> None:
        """Write what tiers defer, for about `timeout` seconds."""
        for tier in self.tiers:
            tier.write_deferred(time.monotonic() + timeout, everything=True)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        """Delete blocks from every tier, even where the circuit breaker is open. Returns the largest number of one tier.

        Raises StoreError if a tier fails: a deletion must not be reported as complete when it is not.
        """
        return max((tier.delete(names, deadline) for tier in self.tiers), default=0)

    def pin(
        self,
        names: Sequence[Name],
        *,
        pinned: bool = True,
        deadline: float,
        failed: Callable[[], object] = lambda: None,
    ) -> int:
        """Pin or unpin blocks in every writable tier. Returns the largest number of one tier. `failed` is called for each that
        fails: what it has of them is not pinned. That opens no circuit breaker: pins are tried again and again, and a tier that
        is full, read-only or making its index can be read."""

        def in_tier(tier: StoreTier) -> int:
            if pinned:
                tier.write_deferred(deadline, everything=True)
            try:
                return tier.ask(lambda: tier.store.pin(names, pinned=pinned, deadline=deadline), deadline, tells=False)
            except StoreError:
                failed()
                return 0

        return max((in_tier(self.tiers[index]) for index in self.writable), default=0)

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        """List the blocks of all tiers. A block in several tiers is listed several times."""
        for tier in self.tiers:
            yield from tier.store.scan(deadline=deadline)

    # Records

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        """Write to every tier that keeps records. Raises StoreError if all of them failed."""
        failures = list[StoreError]()

        def put(tier: StoreTier) -> None:
            try:
                tier.call(partial(tier.store.put_record, key, data, deadline=deadline), deadline)
            except StoreError as error:
                tier.count_error(error)
                failures.append(error)

        at_once([partial(put, tier) for tier in self.record_tiers])
        if failures and len(failures) == len(self.record_tiers):
            raise failures[0]

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        """Raises StoreError if a tier does not answer and none of the others has it."""
        return next((data for _, data in self.record_copies(key, deadline=deadline)), None)

    def record_copies(self, key: str, *, deadline: float) -> Iterator[tuple[StoreTier, bytes]]:
        """A record as each tier has it. Raises StoreError after the last one if a tier does not answer."""
        problem: StoreError | None = None
        for tier in self.record_tiers:
            try:
                found = tier.ask(partial(tier.store.get_record, key, deadline=deadline), deadline)
                if found is not None:
                    yield tier, bytes(found)
            except StoreError as error:
                problem = error
        if problem is not None:
            raise copy_error(problem)

    def delete_record(self, key: str, *, deadline: float) -> bool:
        """Delete from every tier. Raises StoreError if one fails: the record would come back from there."""
        gone = [
            tier.call(partial(tier.store.delete_record, key, deadline=deadline), deadline) for tier in self.record_tiers
        ]
        return any(gone)

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        """Raises StoreError if a tier fails: an incomplete list would look as if records had been deleted."""
        keys: set[str] = set()
        for tier in self.record_tiers:
            keys.update(tier.call(partial(tier.store.records, prefix, deadline=deadline), deadline))
        return sorted(keys)

    # Status

    def status(self) -> StoreStatus:
        """Sums over the tiers; -1 blocks if one tier does not know."""
        each = [tier.status() for tier in self.tiers]
        blocks = -1 if any(one.blocks < 0 for one in each) else sum(one.blocks for one in each)
        return StoreStatus(
            blocks,
            sum(one.bytes for one in each),
            sum(one.budget for one in each),
            sum(one.pinned_bytes for one in each),
            sum(one.evictions for one in each),
        )

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
