"""A tier of a tiered store: a guarded store (`tier_threads.py`) whose blocks are verified, with counters and a read rate."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from foreword.errors import BadFrame, StoreError, StoreFull, StoreHung, StoreReadOnly, StoreTimeout, StoreUnavailable
from foreword.store.background import divide, renew_in_child
from foreword.store.base import (
    BAD,
    FAILED,
    FOREIGN,
    UNREADABLE,
    Loan,
    Name,
    ReservedSlots,
    Store,
    StoreStatus,
    copy_error,
)
from foreword.store.frame import FOREIGN_REASONS, Frame, Header, UnreadBlock, check
from foreword.store.tier_counters import LookupOutcome, Rate, TierState
from foreword.store.tier_rules import BlockUse
from foreword.store.tier_threads import StoreGuard, TierCall

log = logging.getLogger("foreword.store")

Result = TypeVar("Result")
# The outcome of a read of a block: a verified frame, the reason why it is damaged, or MISSING, FAILED, UNREADABLE or FOREIGN.
Outcome = Frame | str | int
# Called with the positions of blocks whose buffers a store may still write into, and the call that does.
OnLate = Callable[[Sequence[int], TierCall[list[Outcome]]], None]

_DELETE_SECONDS: Final = 1.0
_STATUS_SECONDS: Final = 0.5
# How long a block that cannot be used is taken for absent, and how many are.
_SET_ASIDE: Final = {UNREADABLE: 5.0, FOREIGN: 60.0}
_MAX_SET_ASIDE: Final = 65_536
_KINDS: Final = {FAILED: "block_failed", UNREADABLE: "block_unreadable", FOREIGN: "block_foreign"}
_UNREAD_TO_OPEN: Final = 3
_LOOKED_AGAIN: Final = 16  # damaged blocks are read again in batches of this size


class StoreTier(StoreGuard):
    """A store of a tiered store, with its counters and measured read rate: what is read from it is verified.

    Args:
        writable: whether blocks are written to and deleted from the store.

    Attributes:
        listener: as in `subscribe`; None: there is none.
        location: names the tier to all instances that have it; "" if it ends with this process.
        local: whether it is memory or a disk of this machine.
        suspended: no block is searched or read here: an audit has found a wrong one that came from here.
        selective: whether the tier refuses some blocks. `defers`: whether it gets blocks late (`store/tier_admission.py`).
        faster: the faster tiers.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic, *, writable: bool = True) -> None:
        super().__init__(store, clock)
        self.location, self.local = store.label, store.local
        self.writable, self.suspended = writable, False
        self.read_rate = Rate(clock)
        self.selective = self.defers = False
        self.faster: Sequence[StoreTier] = ()
        self.listener: Callable[[bool, Sequence[Name]], None] | None = None
        self._status = StoreStatus()
        self._refusal = store.refusal
        self._set_aside: dict[Name, float] = {}
        self._unread = 0  # reads in succession in which the device gave no block
        self.after_fork()
        renew_in_child(self)

    def after_fork(self) -> None:
        """A forked child has none of the deletions that run in its parent, and would wait for their ends in vain."""
        # Running deletions that a block may be stored behind: until when it waits for them, and what they delete.
        self._deleting: dict[threading.Event, tuple[float, Collection[Name]]] = {}

    def subscribe(self, listener: Callable[[bool, Sequence[Name]], None]) -> None:
        """Call `listener(stored, names)` whenever blocks are stored in or removed from this tier by this process."""
        self.listener = listener
        self.store.on_evicted = lambda name: listener(False, [name])

    @property
    def state(self) -> TierState:
        """Whether the tier is used. Makes no call of the store."""
        if not self.breaker.closed:
            return TierState.OFF
        if self.suspended:
            return TierState.SUSPENDED
        if isinstance(self._refusal, StoreReadOnly) or not self.writable:
            return TierState.READ_ONLY
        if self._refusal is not None:
            return TierState.FULL
        return TierState.OK

    # Lookup

    @property
    def answers(self) -> bool:
        return not self.suspended and super().answers

    def lookup(self, names: Sequence[Name], deadline: float, before: Sequence[Name] = ()) -> tuple[int, LookupOutcome]:
        """Count the blocks from the first one on. `before` are the known ones before it in the chain."""
        self._probed = names[:1]
        self._note_chain(before, names)
        usable = names
        if self._set_aside:
            usable = list(itertools.takewhile(lambda name: not self._is_set_aside(name), names))
        return self._look_up(lambda: self.store.lookup(usable, deadline=deadline), 0, bool, deadline)

    def present(
        self, names: Sequence[Name], deadline: float, before: Sequence[Name] = ()
    ) -> tuple[list[bool], LookupOutcome]:
        self._note_chain(before, names)
        nothing = [False] * len(names)
        found, outcome = self._look_up(lambda: self.store.present(names, deadline=deadline), nothing, any, deadline)
        if self._set_aside:
            found = [there and not self._is_set_aside(name) for name, there in zip(names, found, strict=True)]
        return found, outcome

    def known_prefix(self, names: Sequence[Name]) -> tuple[int, LookupOutcome] | None:
        """Tell what `lookup` would find, if the store knows it by itself; None if a call must tell."""
        started = time.perf_counter()
        told = self._told(names)
        count = next((i for i, there in enumerate(told) if not there), len(told))
        if count < len(told) and told[count] is None:
            return None
        return count, self._count_lookup(LookupOutcome.FOUND if count else LookupOutcome.ABSENT, started)

    def known(self, names: Sequence[Name]) -> tuple[list[bool], LookupOutcome] | None:
        """The blocks that `present` would find, if the store knows it by itself; None if a call must tell."""
        started = time.perf_counter()
        told = self._told(names)
        if None in told:
            return None
        present = [bool(there) for there in told]
        return present, self._count_lookup(LookupOutcome.FOUND if any(present) else LookupOutcome.ABSENT, started)

    def _told(self, names: Sequence[Name]) -> Sequence[bool | None]:
        """Answers that the store gives by itself. None while the tier is suspended or its calls fail: a lookup then counts why
        it finds nothing, or is the trial call of the circuit breaker."""
        if not self.answers:
            return [None] * len(names)
        try:
            told = self.store.known(names)
        except Exception:  # noqa: BLE001 - as in `attempt`; the lookup that follows counts what is wrong
            return [None] * len(names)
        if self._set_aside:
            told = [there and not self._is_set_aside(name) for name, there in zip(names, told, strict=True)]
        return told

    def _count_lookup(self, outcome: LookupOutcome, started: float) -> LookupOutcome:
        with self._threads.lock:
            self.counters.lookups[outcome] += 1
            self.counters.lookup_seconds += time.perf_counter() - started
        return outcome

    def _is_set_aside(self, name: Name) -> bool:
        """Whether a block is there, but could not be used when it was read a short time ago."""
        return time.monotonic() < self._set_aside.get(name, 0.0)

    def _note_chain(self, before: Sequence[Name], names: Sequence[Name]) -> None:
        if before and names:
            self.store.note_chain(before, names)

    def _look_up(
        self, call: Callable[[], Result], nothing: Result, found_any: Callable[[Result], bool], deadline: float
    ) -> tuple[Result, LookupOutcome]:
        """Make a lookup, unless the tier may not be asked or the time is over, and count its outcome."""
        started = time.perf_counter()
        found, outcome = nothing, LookupOutcome.TIER_OFF
        if self.suspended:
            outcome = LookupOutcome.NOT_ALLOWED
        elif time.monotonic() >= deadline:  # a call would count as a failure of this tier, not of the slow one before
            outcome = LookupOutcome.TIMED_OUT
        elif self._admits():
            try:
                found = self.call(call, deadline)
            except Exception as error:  # noqa: BLE001 - as in `attempt`
                self._failed(error)
                outcome = LookupOutcome.TIMED_OUT if isinstance(error, StoreTimeout) else LookupOutcome.TIER_OFF
            else:
                self._succeeded()
                in_time = time.monotonic() < deadline
                missed = LookupOutcome.ABSENT if in_time else LookupOutcome.TIMED_OUT
                outcome = LookupOutcome.FOUND if found_any(found) else missed
        with self._threads.lock:
            self.counters.lookups[outcome] += 1
            self.counters.lookup_seconds += time.perf_counter() - started
        return found, outcome

    def warm_up(self, names: Sequence[Name], deadline: float) -> None:
        """Make lookups that are not counted, so that later ones need not connect or open anything. A tier that fails is found
        out by later calls."""
        with contextlib.suppress(StoreError):
            for name in names:
                self.call(partial(self.store.lookup, [name], deadline=deadline), deadline)

    # Reading

    def get(
        self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float, on_late: OnLate | None = None
    ) -> list[Frame | None]:
        """Read and verify frames. None for each one that is missing, damaged or not read. Those that are damaged when they are
        read once more, too, are deleted. Those that the device does not give, or that are for other readers, are left.

        A store that hangs may write into a buffer after this call has ended. `on_late` learns of such buffers; without it,
        a store that may block reads into memory of its own, and what it has read is copied.
        """
        if not self._admits():
            self._count_read([None] * len(names), 0.0)
            return [None] * len(names)
        self._probed = names[:1]
        started = time.perf_counter()
        private = self.blocking and on_late is None
        targets = [memoryview(bytearray(len(buffer))) for buffer in buffers] if private else buffers
        outcomes = self._read(names, targets, deadline, on_late)
        frames = [one if isinstance(one, Frame) else None for one in outcomes]
        if private:
            frames = [_copied(*pair) for pair in zip(frames, buffers, strict=True)]
        if self._count_read(frames, time.perf_counter() - started) < len(names):
            self._count_faults(names, [len(buffer) for buffer in buffers], outcomes, deadline)
        return frames

    @contextlib.contextmanager
    def lend(self, names: Sequence[Name], deadline: float) -> Iterator[tuple[Loan, list[Frame]]]:
        """The first of these frames, verified, in the memory of a store that lends it (`Store.lend`), up to one that is missing
        or damaged: `get` finds out what is the matter with that. They stay as they are until the context ends."""
        started = time.perf_counter()
        with self.lend_unverified(names, deadline) as loan:
            frames = list[Frame]()
            for name, data in zip(names, loan.frames, strict=False):
                outcome = _outcome(name, data, len(data), False)
                if not isinstance(outcome, Frame):
                    break
                frames.append(outcome)
            yield loan, frames
            if frames:  # the time of the borrower's copy is part of a read
                self._count_read(frames, time.perf_counter() - started)

    @contextlib.contextmanager
    def lend_unverified(self, names: Sequence[Name], deadline: float) -> Iterator[Loan]:
        """These frames in the memory of a store that lends it, not verified: the caller verifies them where it copies them to.
        It says with `count_read` how many were right, and reads the first that was not with `get`, which finds out."""
        loan = Loan()
        with contextlib.ExitStack() as stack:
            if not self.suspended:
                with contextlib.suppress(StoreError):
                    loan = stack.enter_context(self.store.lend(names, deadline=deadline))
            yield loan

    def count_read(self, blocks: int, size: int, seconds: float, missed: int = 0) -> None:
        """Count frames that were right, with their bytes together, the time that the read took, 0.0: not known, and those that
        were not read."""
        with self._threads.lock:
            self.counters.hit_blocks += blocks
            self.counters.missed_blocks += missed
            self.counters.read_bytes += size
            self.counters.read_seconds += seconds
            if size and seconds:
                self.read_rate.note(size, seconds)

    def _read(
        self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float, on_late: OnLate | None
    ) -> list[Outcome]:
        """Read in parts on several threads where that is faster. A part that fails is FAILED."""
        parts, errors = divide([len(buffer) for buffer in buffers], self.store.readers), list[Exception]()
        # Where calls do not block, this thread reads one part while others read theirs.
        calls: list[TierCall[list[Outcome]] | Exception | None] = [] if self.blocking else [None]
        for part in parts[len(calls) :]:
            calls.append(self._started(names[part], buffers[part], deadline))
        outcomes = list[Outcome]()
        for part, call in zip(parts, calls, strict=True):
            try:
                if isinstance(call, Exception):
                    raise call
                read = self._read_part(names[part], buffers[part], deadline) if call is None else call.result(deadline)
            except Exception as error:  # noqa: BLE001 - as in `attempt`
                errors.append(error)
                read = [FAILED] * (part.stop - part.start)
                if isinstance(error, StoreHung) and isinstance(call, TierCall) and on_late is not None:
                    on_late(range(part.start, part.stop), call)
            outcomes += read
        self._note_read(outcomes, errors)
        return outcomes

    def _note_read(self, outcomes: Sequence[Outcome], errors: Sequence[Exception]) -> None:
        """Tell the circuit breaker how a read went. A device that gives no block at all fails, whatever lookups say: they may
        need no device."""
        others = [one for one in outcomes if not isinstance(one, Frame)]
        read = len(others) < len(outcomes) or any(isinstance(one, str) or one == FOREIGN for one in others)
        unreadable = UNREADABLE in others
        if outcomes and not read and (unreadable or all(one == FAILED for one in others)):
            kind = StoreUnavailable if unreadable else StoreTimeout
            error = errors[0] if errors else kind("no block could be read")
            self._unread += not isinstance(error, StoreTimeout)
            self._failed(error, certain=self._unread >= _UNREAD_TO_OPEN)
            return
        self._unread = 0
        if outcomes:
            for error in errors:
                self.count_error(error)
            self._succeeded()

    def _started(
        self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float
    ) -> TierCall[list[Outcome]] | Exception:
        try:
            return self.start(lambda: self._read_part(names, buffers, deadline))
        except StoreError as error:
            return error

    def _read_part(self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float) -> list[Outcome]:
        sizes = self.store.get(names, buffers, deadline=deadline)
        authenticated = self.store.authenticates
        return [_outcome(*item, authenticated) for item in zip(names, buffers, sizes, strict=True)]

    def _count_read(self, frames: Sequence[Frame | None], seconds: float) -> int:
        """Count blocks and bytes. Returns how many blocks were read."""
        found = sum(frame is not None for frame in frames)
        read = sum(len(frame.data) for frame in frames if frame is not None)
        self.count_read(found, read, seconds, len(frames) - found)
        return found

    def _count_faults(
        self, names: Sequence[Name], sizes: Sequence[int], outcomes: Sequence[Outcome], deadline: float
    ) -> None:
        """Count blocks that are damaged or were not read. Delete damaged ones so that they can be stored again, and set those
        aside that are there and of no use now."""
        now, bad = time.monotonic(), dict[Name, int]()
        reasons, kinds = Counter[str](), Counter[int]()
        for name, size, one in zip(names, sizes, outcomes, strict=True):
            if isinstance(one, str):
                bad[name] = size
                reasons[one] += 1
            elif isinstance(one, int):
                kinds[one] += 1
                if one in _SET_ASIDE and len(self._set_aside) < _MAX_SET_ASIDE:
                    self._set_aside[name] = now + _SET_ASIDE[one]
        with self._threads.lock:
            for kind, word in _KINDS.items():
                if kinds[kind] and (kind != FAILED or kinds[kind] < len(outcomes)):
                    self.counters.errors[word] += kinds[kind]
        if len(self._set_aside) == _MAX_SET_ASIDE:
            self._set_aside = {name: until for name, until in self._set_aside.items() if until > now}
        if bad:
            with self._threads.lock:
                self.counters.bad.update(reasons)
            if self.writable:
                self._delete_bad(bad, deadline)

    def _delete_bad(self, sizes: Mapping[Name, int], deadline: float) -> None:
        """Delete blocks, given the lengths of buffers for them, that are still damaged when they are read again: what a network
        or a cable has changed on the way is sound where it is stored. Waits for it until the deadline; a slow store does it
        later, before it stores any."""
        done, until = threading.Event(), time.monotonic() + _DELETE_SECONDS

        def work() -> None:
            try:
                self.delete_damaged(sizes, until)
            except Exception as error:  # noqa: BLE001 - as in `attempt`
                self.count_error(error)
            finally:
                self._deleting.pop(done, None)
                done.set()

        self._deleting[done] = until, sizes
        try:
            if self.blocking:
                self.start(work).wait(deadline)
            else:
                work()
        except StoreError:
            del self._deleting[done]

    def examine(self, names: Sequence[Name], sizes: Sequence[int], deadline: float) -> list[Outcome]:
        """Read and verify blocks, given the lengths of buffers for them, without a count and without a consequence. All FAILED
        if the call fails."""
        buffers = [memoryview(bytearray(size)) for size in sizes]
        try:
            return self._read_part(names, buffers, deadline)
        except StoreError:
            return [FAILED] * len(names)

    def delete_damaged(self, sizes: Mapping[Name, int], deadline: float) -> int:
        """Read blocks, given the lengths of buffers for them, and delete those that are damaged. Returns how many. Raises
        StoreError."""
        count, names = 0, list(sizes)
        for low in range(0, len(names), _LOOKED_AGAIN):
            batch = names[low : low + _LOOKED_AGAIN]
            outcomes = self.examine(batch, [sizes[name] for name in batch], deadline)
            damaged = [name for name, one in zip(batch, outcomes, strict=True) if isinstance(one, str)]
            count += self._delete(damaged, deadline) if damaged else 0
        return count

    # Writing

    def admits(self, headers: Sequence[Header], use: BlockUse) -> list[bool]:
        """Choose the blocks, in chain order, that are to be written. Those that are used again were offered before."""
        return [not use.again] * len(headers)

    def takes_again(self, name: Name) -> bool:
        """Whether this block, or one before it, may be written when it is used again: it was refused before."""
        return False

    def put(self, frames: Sequence[Frame], deadline: float, *, wait: bool = True) -> int:
        """Store frames. Returns how many are present now, 0 if the store failed, or if they are written later.

        With `wait`, the caller's thread makes the call, however long it takes: a thread that writes to this tier only.
        """
        started = time.perf_counter()
        kept = self.attempt(lambda: self._put(frames, deadline), 0, None if wait else deadline)
        with self._threads.lock:
            self.counters.written_blocks += kept
            if kept:
                self.counters.written_bytes += sum(len(frame.data) for frame in frames) * kept // len(frames)
            self.counters.write_seconds += time.perf_counter() - started
        return kept

    def _put(self, frames: Sequence[Frame], deadline: float) -> int:
        for deletion, (until, deleted) in tuple(self._deleting.items()):
            if any(frame.name in deleted for frame in frames):  # until then it would be taken for present
                deletion.wait(max(min(until, deadline) - time.monotonic(), 0.0))
        try:
            kept = self.store.put(frames, deadline=deadline)
        except (StoreFull, StoreReadOnly) as error:  # it works: blocks can be read
            self.count_error(error)
            self._note_refusal(copy_error(error))
            return 0
        self._note_refusal(self.store.refusal)
        if self.listener is not None:
            names = [frame.name for frame in frames]
            self.notify(True, names if kept == len(names) else self._present(names, deadline))
        return kept

    def reserve(
        self, headers: Sequence[Header] | Sequence[UnreadBlock], deadline: float, *, unread: bool = False
    ) -> ReservedSlots:
        """Slots in a store that reserves them (`Store.reserve`); none if it fails."""
        given = {"unread": True} if unread else {}  # stores of earlier versions do not know it
        return self.attempt(lambda: self.store.reserve(headers, **given, deadline=deadline), ReservedSlots())

    def publish(
        self, reserved: ReservedSlots, headers: Sequence[Header], seconds: float, chosen: Collection[int] | None = None
    ) -> int:
        """Let the blocks with these headers be found, which are in the slots, or in the chosen ones: it took some seconds to
        write their frames. Returns how many are; none if the store fails, which then takes the slots back."""
        kept = self.attempt(lambda: self.store.publish(reserved, chosen), 0)
        size = sum(reserved.lengths[one] for one in (range(len(reserved.lengths)) if chosen is None else chosen))
        with self._threads.lock:
            self.counters.written_blocks += kept
            self.counters.written_bytes += size * kept // max(len(headers), 1)
            self.counters.write_seconds += seconds
        if self.listener is not None and kept:
            names = [header.name for header in headers]
            self.notify(True, names if kept == len(names) else self._present(names, math.inf))
        return kept

    def abandon(self, reserved: ReservedSlots) -> None:
        """Give reserved slots back."""
        self.store.abandon(reserved)

    def _note_refusal(self, refusal: StoreError | None) -> None:
        """Log when the store begins to refuse blocks, and when it takes them again."""
        with self._threads.lock:
            before, self._refusal = self._refusal, refusal
        if refusal is None:
            if before is not None:
                log.info("tier %s takes blocks again", self.label)
        elif before is None or isinstance(before, StoreReadOnly) != isinstance(refusal, StoreReadOnly):
            what = "takes no blocks now" if isinstance(refusal, StoreReadOnly) else "is full"
            log.warning("tier %s %s: %s", self.label, what, refusal.message)

    def _present(self, names: Sequence[Name], deadline: float) -> list[Name]:
        """The `names` that the store has. Empty if the store fails: then nothing is reported as stored."""
        present: list[Name] = []
        with contextlib.suppress(StoreError):
            known = self.store.present(names, deadline=deadline)
            present += [name for name, there in zip(names, known, strict=True) if there]
        return present

    def delete(self, names: Sequence[Name], deadline: float) -> int:
        """Delete blocks, even if the circuit breaker is open. Returns how many were present. Raises StoreError."""
        return self.call(lambda: self._delete(names, deadline), deadline)

    def delete_unneeded(self, names: Sequence[Name], unneeded: Callable[[Name], bool], deadline: float) -> int:
        """Delete those of these blocks that are unneeded, as `delete` does. A block that was needed again before it is given to
        `put` is there afterwards: `put` waits for what is deleted, and `deletes` says it to those who cannot wait."""
        wanted = frozenset(names)

        def work() -> int:
            # First: what is deferred may be under way to `put`, which would wait for this.
            self.drop_deferred(lambda name: name in wanted and unneeded(name), deadline)
            # The race is with a block that is needed again after it was chosen: its `put` comes later, and finds this.
            done = threading.Event()
            self._deleting[done] = deadline, wanted
            try:
                return self._delete_stored([name for name in names if unneeded(name)], deadline)
            finally:
                del self._deleting[done]
                done.set()

        return self.call(work, deadline)

    def deletes(self, names: Iterable[Name]) -> bool:
        """Whether one of these blocks is perhaps being deleted now, so that it is no use to find it."""
        if not self._deleting:
            return False
        running = [deleted for _, deleted in tuple(self._deleting.values())]
        return any(name in deleted for name in names for deleted in running)

    def _delete(self, names: Sequence[Name], deadline: float) -> int:
        self.drop_deferred(frozenset(names).__contains__, deadline)
        return self._delete_stored(names, deadline)

    def _delete_stored(self, names: Sequence[Name], deadline: float) -> int:
        count = self.store.delete(names, deadline=deadline)
        self.notify(False, names)
        return count

    def write_deferred(self, deadline: float, *, everything: bool = False) -> None:
        """Write the oldest of what is deferred, or everything, from the faster tiers."""

    def drop_deferred(self, chosen: Callable[[Name], bool], deadline: float) -> None:
        """Drop these blocks of what is deferred, after what is being written now. Raises StoreTimeout."""

    def notify(self, stored: bool, names: Sequence[Name]) -> None:
        """Tell the listener that this process has stored blocks here, or removed them."""
        if self.listener is not None and names:
            self.listener(stored, names)

    # Status and end

    def status(self) -> StoreStatus:
        """The status of the store; the last known one if it does not return."""
        with contextlib.suppress(StoreError):
            self._status = self.call(self.store.status, time.monotonic() + _STATUS_SECONDS)
        return self._status


def used_once(positions: Sequence[int], call: TierCall[list[Outcome]]) -> None:
    """`on_late` of a caller that uses each buffer for one read only: a late write changes nothing that it looks at."""


def _outcome(name: Name, buffer: memoryview, size: int, authenticated: bool) -> Outcome:
    if size == BAD:
        return "no_frame"
    if size <= 0:
        return size
    try:
        return check(buffer[:size], name, authenticated=authenticated)
    except BadFrame as error:
        return FOREIGN if error.reason in FOREIGN_REASONS else error.reason


def _copied(frame: Frame | None, buffer: memoryview) -> Frame | None:
    """The frame in other memory."""
    if frame is None:
        return None
    length = len(frame.data)
    buffer[:length] = frame.data
    return Frame(frame.header, buffer[:length])
