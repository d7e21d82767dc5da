"""One tier of a tiered store: a store with counters, a circuit breaker, threads, and a measured read rate."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from foreword.errors import BadFrame, StoreError, StoreFull, StoreHung, StoreReadOnly, StoreTimeout
from foreword.store.admission import Admission, AdmissionRule, BlockUse
from foreword.store.base import BAD, FAILED, MISSING, Name, Store, StoreStatus, copy_error
from foreword.store.circuit_breaker import CircuitBreaker
from foreword.store.frame import Frame, Header, check
from foreword.store.parallel import divide
from foreword.store.tier_counters import LookupOutcome, Rate, TierCounters, TierState
from foreword.store.tier_threads import TierCall, TierThreads

log = logging.getLogger("foreword.store")

Result = TypeVar("Result")
# What became of a block: a verified frame, the reason why it is bad, MISSING or FAILED.
Outcome = Frame | str | int
# Called with the positions of blocks whose buffers a store may still write into, and the call that does.
OnLate = Callable[[Sequence[int], TierCall[list[Outcome]]], None]

_PROBE_SECONDS: Final = 5.0
_DELETE_SECONDS: Final = 1.0
_STATUS_SECONDS: Final = 0.5
_CLOSE_SECONDS: Final = 5.0


class StoreTier:
    """One store of a tiered store, with its counters, circuit breaker, threads and measured read rate.

    Calls of a store that may block are made on the tier's own threads, and the caller waits until shortly after the deadline.
    A call that has not returned then is a failure. While one is hung, the tier is skipped, and a thread of its own probes it.

    Args:
        writable: whether blocks are written to and deleted from the store.
        rule: which blocks are written; None: all.

    Attributes:
        local: whether it is memory or a disk of this machine.
        suspended: no block is searched or read here: an audit has found a wrong one that came from here.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float] = time.monotonic,
        *,
        writable: bool = True,
        rule: AdmissionRule | None = None,
    ) -> None:
        self.store = store
        self.label = store.label
        self.writable = writable
        self.suspended = False
        self.blocking = store.blocking
        self.local = store.local
        self.counters = TierCounters()
        self.breaker = CircuitBreaker(clock)
        self.read_rate = Rate(clock)
        self.admission = None if rule is None else Admission(rule, clock)
        self._threads = TierThreads(f"foreword-{store.label}")
        self._lock = threading.Lock()
        self._listener: Callable[[bool, Sequence[Name]], None] | None = None
        self._status = StoreStatus()
        self._refusal = store.refusal
        self._probed: Sequence[Name] = ()
        self._deleting: dict[threading.Event, float] = {}  # running deletions of bad blocks, and their deadlines

    def subscribe(self, listener: Callable[[bool, Sequence[Name]], None]) -> None:
        """Call `listener(stored, names)` whenever blocks are stored in or removed from this tier by this process."""
        self._listener = listener
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
        return TierState.OK if self._refusal is None else TierState.FULL

    # Calls

    def attempt(self, call: Callable[[], Result], default: Result, deadline: float | None = None) -> Result:
        """Return the call's result, or `default` if it fails or the circuit breaker is open.

        With a deadline, the call is made on a thread of the tier, and fails if it does not return by then.
        """
        if not self._admits(inline=deadline is None):
            return default
        try:
            result = call() if deadline is None else self.call(call, deadline)
        except Exception as error:  # noqa: BLE001 - where a store's failure becomes a miss
            self._failed(error)
            return default
        self._succeeded()
        return result

    def call(self, call: Callable[[], Result], deadline: float) -> Result:
        """Make a call of the store. Raises what it raises, and StoreHung if it has not returned shortly after the deadline."""
        return self._threads.call(call, deadline) if self.blocking else call()

    def _admits(self, *, inline: bool = False) -> bool:
        """Whether a call may be made now. While a call is hung, only the tier's own probes are. While one is overdue, a call
        would probably lose its deadline too, so only those on the caller's thread are made, which has no other work."""
        hung = self._threads.hung
        if hung and not self.breaker.is_open and self.breaker.failed(certain=True):
            self._log_opened("a call does not return")
        if (hung or inline or not self._threads.overdue) and self.breaker.allows():
            if not hung:
                return True
            self._probe()
        with self._lock:
            self.counters.skipped += 1
        return False

    def _probe(self) -> None:
        """Make one lookup that no caller waits for. If it returns, the tier is used again."""

        def look_up() -> None:
            try:
                self.store.lookup(self._probed, deadline=time.monotonic() + _PROBE_SECONDS)
            except Exception as error:  # noqa: BLE001 - as in `attempt`
                self._failed(error)
                return
            self._threads.forgive()
            self._succeeded()

        with contextlib.suppress(StoreError):
            self._threads.start(look_up)

    def _failed(self, error: Exception) -> None:
        if self.breaker.failed():
            self._log_opened(error.message if isinstance(error, StoreError) else type(error).__name__)
        self.count_error(error)

    def _log_opened(self, reason: str) -> None:
        log.warning("tier %s is not used for now, after repeated errors: %s", self.label, reason)

    def _succeeded(self) -> None:
        if self.breaker.succeeded():
            log.info("tier %s works again", self.label)

    def count_error(self, error: Exception) -> None:
        self._count_error(error.code if isinstance(error, StoreError) else type(error).__name__)

    def _count_error(self, kind: str, count: int = 1) -> None:
        with self._lock:
            self.counters.errors[kind] += count

    # Lookup

    def lookup(self, names: Sequence[Name], deadline: float, before: Sequence[Name] = ()) -> tuple[int, LookupOutcome]:
        """Count the blocks from the first one on. `before` are the known ones before it in the chain."""
        self._probed = names[:1]
        self._note_chain(before, names)
        return self._look_up(lambda: self.store.lookup(names, deadline=deadline), 0, bool, deadline)

    def present(
        self, names: Sequence[Name], deadline: float, before: Sequence[Name] = ()
    ) -> tuple[list[bool], LookupOutcome]:
        self._note_chain(before, names)
        nothing = [False] * len(names)
        return self._look_up(lambda: self.store.present(names, deadline=deadline), nothing, any, deadline)

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
        elif (
            time.monotonic() >= deadline
        ):  # a call would count as a failure of this tier, not of the slow one before it
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
        with self._lock:
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
        self,
        names: Sequence[Name],
        buffers: Sequence[memoryview],
        deadline: float,
        on_late: OnLate | None = None,
    ) -> list[Frame | None]:
        """Read and verify frames. None for each one that is missing, bad or failed. Bad ones are deleted.

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
            self._count_faults(names, outcomes, deadline)
        return frames

    def _read(
        self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float, on_late: OnLate | None
    ) -> list[Outcome]:
        """Read in parts on several threads where that is faster. A part that fails is FAILED."""
        parts = divide([len(buffer) for buffer in buffers], self.store.readers)
        inline = 0 if self.blocking else 1
        running: list[TierCall[list[Outcome]] | Exception] = []
        for part in parts[inline:]:
            running.append(self._started(names[part], buffers[part], deadline))
        outcomes: list[Outcome] = []
        errors: list[Exception] = []
        if inline:
            outcomes += self._inline(names[parts[0]], buffers[parts[0]], deadline, errors)
        for part, call in zip(parts[inline:], running, strict=True):
            outcomes += self._outcomes(part, call, deadline, on_late, errors)
        if any(isinstance(one, Frame) or one != FAILED for one in outcomes):
            for error in errors:
                self.count_error(error)
            self._succeeded()
        elif outcomes:
            self._failed(errors[0] if errors else StoreTimeout("no block could be read"))
        return outcomes

    def _started(
        self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float
    ) -> TierCall[list[Outcome]] | Exception:
        try:
            return self._threads.start(lambda: self._read_part(names, buffers, deadline))
        except StoreError as error:
            return error

    def _inline(
        self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float, errors: list[Exception]
    ) -> list[Outcome]:
        try:
            return self._read_part(names, buffers, deadline)
        except Exception as error:  # noqa: BLE001 - as in `attempt`
            errors.append(error)
            return [FAILED] * len(names)

    def _outcomes(
        self,
        part: slice,
        call: TierCall[list[Outcome]] | Exception,
        deadline: float,
        on_late: OnLate | None,
        errors: list[Exception],
    ) -> list[Outcome]:
        """The outcomes of a part that another thread reads."""
        positions = range(part.start, part.stop)
        try:
            if isinstance(call, Exception):
                raise call
            return call.result(deadline)
        except Exception as error:  # noqa: BLE001 - as in `attempt`
            errors.append(error)
            if isinstance(error, StoreHung) and isinstance(call, TierCall) and on_late is not None:
                on_late(positions, call)
            return [FAILED] * len(positions)

    def _read_part(self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float) -> list[Outcome]:
        sizes = self.store.get(names, buffers, deadline=deadline)
        authenticated = self.store.authenticates
        return [_outcome(*item, authenticated) for item in zip(names, buffers, sizes, strict=True)]

    def _count_read(self, frames: Sequence[Frame | None], seconds: float) -> int:
        """Count blocks and bytes. Returns how many blocks were read."""
        found = sum(frame is not None for frame in frames)
        read = sum(len(frame.data) for frame in frames if frame is not None)
        with self._lock:
            self.counters.hit_blocks += found
            self.counters.missed_blocks += len(frames) - found
            self.counters.read_bytes += read
            self.counters.read_seconds += seconds
            if read:
                self.read_rate.note(read, seconds)
        return found

    def _count_faults(self, names: Sequence[Name], outcomes: Sequence[Outcome], deadline: float) -> None:
        """Count bad and failed blocks, and delete bad ones so that they can be stored again."""
        failed = sum(not isinstance(one, Frame) and one == FAILED for one in outcomes)
        if 0 < failed < len(outcomes):
            self._count_error("block_failed", failed)
        bad = {name: one for name, one in zip(names, outcomes, strict=True) if isinstance(one, str)}
        if not bad:
            return
        with self._lock:
            self.counters.bad.update(bad.values())
        if self.writable:
            self._delete_bad(list(bad), deadline)

    def _delete_bad(self, names: Sequence[Name], deadline: float) -> None:
        """Delete blocks. Waits for it until the deadline; a slow store does it later, before it stores any."""
        done, until = threading.Event(), time.monotonic() + _DELETE_SECONDS

        def work() -> None:
            try:
                self._delete(names, until)
            except Exception as error:  # noqa: BLE001 - as in `attempt`
                self.count_error(error)
            finally:
                self._deleting.pop(done, None)
                done.set()

        self._deleting[done] = until
        try:
            if self.blocking:
                self._threads.start(work).wait(deadline)
            else:
                work()
        except StoreError:
            del self._deleting[done]

    # Writing

    def admits(self, headers: Sequence[Header], use: BlockUse) -> list[bool]:
        """Which of these blocks, in chain order, are to be written. Those that are used again were offered before."""
        if self.admission is None:
            return [not use.again] * len(headers)
        return self.admission.choose(headers, use)

    def put(self, frames: Sequence[Frame], deadline: float, *, wait: bool = True) -> int:
        """Store frames. Returns how many are present now, 0 if the store failed.

        With `wait`, the caller's thread makes the call, however long it takes: a thread that writes to this tier only.
        """
        started = time.perf_counter()
        kept = self.attempt(lambda: self._put(frames, deadline), 0, None if wait else deadline)
        with self._lock:
            self.counters.written_blocks += kept
            if kept:
                self.counters.written_bytes += sum(len(frame.data) for frame in frames) * kept // len(frames)
            self.counters.write_seconds += time.perf_counter() - started
        return kept

    def _put(self, frames: Sequence[Frame], deadline: float) -> int:
        for deletion, until in tuple(self._deleting.items()):  # until then the bad block would be taken for present
            deletion.wait(max(min(until, deadline) - time.monotonic(), 0.0))
        try:
            kept = self.store.put(frames, deadline=deadline)
        except (StoreFull, StoreReadOnly) as error:  # it works: blocks can be read
            self.count_error(error)
            self._note_refusal(copy_error(error))
            return 0
        self._note_refusal(self.store.refusal)
        if self._listener is not None:
            names = [frame.name for frame in frames]
            self._notify(True, names if kept == len(names) else self._present(names, deadline))
        return kept

    def _note_refusal(self, refusal: StoreError | None) -> None:
        """Log when the store begins to refuse blocks, and when it takes them again."""
        with self._lock:
            before, self._refusal = self._refusal, refusal
        if refusal is None:
            if before is not None:
                log.info("tier %s takes blocks again", self.label)
        elif before is None or isinstance(before, StoreReadOnly) != isinstance(refusal, StoreReadOnly):
            what = "takes no blocks now" if isinstance(refusal, StoreReadOnly) else "is full"
            log.warning("tier %s %s: %s", self.label, what, refusal.message)

    def _present(self, names: Sequence[Name], deadline: float) -> list[Name]:
        """Those of `names` that the store has. Empty if the store fails: then nothing is reported as stored."""
        present: list[Name] = []
        with contextlib.suppress(StoreError):
            known = self.store.present(names, deadline=deadline)
            present += [name for name, there in zip(names, known, strict=True) if there]
        return present

    def delete(self, names: Sequence[Name], deadline: float) -> int:
        """Delete blocks, even if the circuit breaker is open. Returns how many were present. Raises StoreError."""
        return self.call(lambda: self._delete(names, deadline), deadline)

    def _delete(self, names: Sequence[Name], deadline: float) -> int:
        count = self.store.delete(names, deadline=deadline)
        self._notify(False, names)
        return count

    def erase(self, layout: bytes, root: bytes, deadline: float) -> int:
        """Delete all blocks with this layout and root (b"": any), even if the circuit breaker is open. Returns how many were
        present. Raises StoreError."""
        return self.call(lambda: self._erase(layout, root, deadline), deadline)

    def _erase(self, layout: bytes, root: bytes, deadline: float) -> int:
        if self._listener is not None:
            for names in self.store.list_names(layout, root, deadline=deadline):
                self._notify(False, names)
        return self.store.erase(layout, root, deadline=deadline)

    def _notify(self, stored: bool, names: Sequence[Name]) -> None:
        if self._listener is not None and names:
            self._listener(stored, names)

    # Status and end

    def status(self) -> StoreStatus:
        """The status of the store; the last known one if it does not return."""
        with contextlib.suppress(StoreError):
            self._status = self.call(self.store.status, time.monotonic() + _STATUS_SECONDS)
        return self._status

    def close(self) -> None:
        """Close the store. If a call of it is hung, the store is closed when that is possible, and nothing waits for it."""
        try:
            if self._threads.hung:
                self._threads.call(self.store.close, time.monotonic() + _CLOSE_SECONDS)
            else:
                self.store.close()
        except StoreError as error:
            self.count_error(error)
        self._threads.stop()


def used_once(positions: Sequence[int], call: TierCall[list[Outcome]]) -> None:
    """`on_late` of a caller that uses each buffer for one read only: a late write changes nothing that it looks at."""


def _outcome(name: Name, buffer: memoryview, size: int, authenticated: bool) -> Outcome:
    if size == BAD:
        return "unreadable"
    if size <= 0:
        return FAILED if size == FAILED else MISSING
    try:
        return check(buffer[:size], name, authenticated=authenticated)
    except BadFrame as error:
        return error.reason


def _copied(frame: Frame | None, buffer: memoryview) -> Frame | None:
    """The frame in other memory."""
    if frame is None:
        return None
    length = len(frame.data)
    buffer[:length] = frame.data
    return Frame(frame.header, buffer[:length])
