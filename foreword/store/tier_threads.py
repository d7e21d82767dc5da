"""How the calls of one store are made (`StoreGuard`): on threads, so that a call that does not return delays no other store,
and through a circuit breaker.

A caller waits for its call until shortly after the deadline and then abandons it. The thread of an abandoned call is not
used again until the call returns. The number of threads and of waiting calls is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from foreword.errors import StoreError, StoreHung, StoreUnavailable
from foreword.store.background import background_thread, renew_in_child
from foreword.store.base import Name, Store
from foreword.store.tier_counters import Filling, TierCounters

log = logging.getLogger("foreword.store")

_FAILURES_TO_OPEN: Final = 3
_SUCCESS_COUNTS: Final = 0.25  # seconds for which a success shows that the store as a whole works
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
Result = TypeVar("Result")

GRACE: Final = 0.02  # seconds after the deadline in which a store may return what it has
_THREADS: Final = 16
_WAITING: Final = 64
_IDLE: Final = 30.0  # seconds after which a thread without calls ends
_HUNG: Final = 0.25  # seconds after which an abandoned call is not late but hung
_PROBE_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 5.0


class CircuitBreaker:
    """Opens after 3 consecutive failures, unless a call has just succeeded. While it is open, no call is allowed until a
    pause has passed.

    After the pause one trial call is allowed at a time. If it succeeds, the circuit closes; if it fails, the next pause is
    twice as long, up to 30 seconds. The tier's lock guards it.
    """

    __slots__ = ("_clock", "_failures", "_open_until", "_pause", "_succeeded_at")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._open_until = 0.0  # 0.0 while the circuit is closed
        self._succeeded_at = -math.inf

    def allows(self) -> bool:
        now = self._clock()
        if now < self._open_until:
            return False
        if self._open_until:  # this is the trial call: refuse the others until it has ended
            self._open_until = now + self._pause
        return True

    def succeeded(self) -> bool:
        """Note a call that succeeded. Returns whether the circuit was open until now."""
        closed = self._open_until > 0.0
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._open_until = 0.0
        self._succeeded_at = self._clock()
        return closed

    def succeeded_again(self) -> bool:
        """Note a call that succeeded, unless one has failed since the last success. It only assigns, so it needs no lock."""
        if self._failures or self._open_until:
            return False
        self._succeeded_at = self._clock()
        return True

    def failed(self, *, certain: bool = False) -> bool:
        """Note a call that failed; a `certain` failure opens the circuit at once. Returns whether it has just opened."""
        self._failures += 1
        works = self._failures < _FAILURES_TO_OPEN or self._clock() - self._succeeded_at < _SUCCESS_COUNTS
        if works and not certain and not self._open_until:
            return False
        opened = not self._open_until
        self._open_until = self._clock() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return opened

    @property
    def is_open(self) -> bool:
        """Whether no call is allowed now."""
        return self._clock() < self._open_until

    @property
    def closed(self) -> bool:
        """Whether calls are allowed without a limit. While the circuit is open, that begins with a trial call that succeeds."""
        return not self._open_until


class TierCall(Generic[Result]):
    """A call that runs on a thread of a tier.

    Attributes:
        started: a thread has begun the call, so it may use its buffers until it has `returned`.
        abandoned_at: when its caller stopped waiting; 0.0 before.
    """

    __slots__ = ("_after", "_done", "_error", "_lock", "_result", "_work", "abandoned_at", "returned", "started")

    def __init__(self, work: Callable[[], Result], lock: threading.Lock) -> None:
        self._work: Callable[[], Result] | None = work
        self._lock = lock
        self._done = threading.Lock()
        self._done.acquire()
        self._after: list[Callable[[], None]] = []
        self._result: Result | None = None
        self._error: BaseException | None = None
        self.started = self.returned = False
        self.abandoned_at = 0.0

    def wait(self, deadline: float) -> bool:
        """Wait until the call has returned. False if that is not so shortly after the deadline; the call continues."""
        left = min(max(deadline + GRACE - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        return self._done.acquire(timeout=left)

    def result(self, deadline: float) -> Result:
        """Wait for the result. Raises what the call raised, or StoreHung shortly after the deadline."""
        if not self.wait(deadline) and self._abandon():
            raise StoreHung("a call has not returned by its deadline")
        if not self.returned:
            raise StoreUnavailable("the thread of a call has failed")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def when_returned(self, then: Callable[[], None]) -> None:
        """Call `then` when the call has returned, or never started; at once if that is so already."""
        with self._lock:
            if self.started and not self.returned:
                self._after.append(then)
                return
        then()

    def _abandon(self) -> bool:
        with self._lock:
            if not self.returned:
                self.abandoned_at = time.monotonic()
            return not self.returned

    def run(self) -> None:
        """Run the call on this thread, unless its caller has abandoned it."""
        after: list[Callable[[], None]] = []
        try:
            with self._lock:
                if self.abandoned_at or self._work is None:
                    return
                self.started = True
            try:
                self._result = self._work()
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
                self._error = error
            self._work = None
            with self._lock:
                self.returned = True
                after, self._after = self._after, []
        finally:
            self._done.release()
        for then in after:
            then()


class TierThreads:
    """Up to 16 daemon threads that make the calls of one tier. Threads start when they are needed and end when idle.

    Attributes:
        lock: the one of the tier, for what it counts and decides, too. Nothing waits under it. A forked child has a new one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.after_fork()
        renew_in_child(self)

    def after_fork(self) -> None:
        """Start without threads: those of the parent do not exist in a forked child."""
        self._calls: queue.SimpleQueue[TierCall[object] | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self._running: set[TierCall[object]] = set()
        self._forgiven: set[TierCall[object]] = set()
        self._queued = 0
        self._threads = 0
        self._returned_at = 0.0  # when a call last returned that was not abandoned
        self.filling = Filling()

    @property
    def hung(self) -> bool:
        """Whether a call was abandoned some time ago, has not returned, and was not forgiven."""
        if not self._running:
            return False
        since = time.monotonic() - _HUNG
        with self.lock:
            return any(0.0 < call.abandoned_at < since for call in self._running - self._forgiven)

    @property
    def overdue(self) -> bool:
        """Whether a call was abandoned, has not returned, and no other one has returned in time since."""
        if not self._running:
            return False
        with self.lock:
            return any(call.abandoned_at > self._returned_at for call in self._running - self._forgiven)

    def forgive(self) -> None:
        """The store works, although calls of it have not returned. They keep their threads."""
        with self.lock:
            self._forgiven = {call for call in self._running if call.abandoned_at}

    def start(self, work: Callable[[], Result]) -> TierCall[Result]:
        """Make a call on a thread of the tier. Raises StoreUnavailable if too many calls have not returned."""
        call = TierCall(work, self.lock)
        with self.lock:
            stuck = len(self._running) >= _THREADS and all(call.abandoned_at for call in self._running)
            if stuck or self._queued >= _WAITING:
                raise StoreUnavailable(f"{len(self._running)} calls of this tier have not returned")
            self._queued += 1
            spawn = self._queued + len(self._running) > self._threads and self._threads < _THREADS
            self._threads += spawn
        self._calls.put(call)  # type: ignore[arg-type]
        if spawn:
            background_thread(partial(_serve, weakref.ref(self), self._calls), self._name, bound=False)
        return call

    def call(self, work: Callable[[], Result], deadline: float) -> Result:
        """Make a call and wait for its result. Raises what the call raises, StoreHung or StoreUnavailable."""
        return self.start(work).result(deadline)

    def stop(self) -> None:
        """End the threads that are idle now. Later calls start new ones."""
        with self.lock:
            idle = self._threads - len(self._running) - self._queued
        for _ in range(idle):
            self._calls.put(None)

    def _run(self, call: TierCall[object]) -> None:
        with self.lock:
            self._queued -= 1
            self._running.add(call)
        try:
            call.run()
        finally:
            with self.lock:
                self._running.discard(call)
                self._forgiven.discard(call)
                if not call.abandoned_at:
                    self._returned_at = time.monotonic()

    def _ended(self) -> bool:
        """A thread was idle: whether it may end. A call that was just queued keeps it."""
        with self.lock:
            if self._queued:
                return False
            self._threads -= 1
            return True


def _serve(owner: weakref.ref[TierThreads], calls: queue.SimpleQueue[TierCall[object] | None]) -> None:
    """The loop of one thread. It keeps no reference to the tier while it waits."""
    while True:
        call: TierCall[object] | None = None
        with contextlib.suppress(queue.Empty):
            call = calls.get(timeout=_IDLE)
        threads = owner()
        if threads is None or (call is None and threads._ended()):
            return
        if call is not None:
            threads._run(call)
        del threads, call


class StoreGuard:
    """Makes the calls of one store, and none for a while if they keep failing.

    Those that may block are made on threads of its own, and the caller waits until shortly after the deadline. A call that has
    not returned then is a failure. While one is hung, no other is made, and a thread of its own probes the store.

    Attributes:
        counters: calls that failed or were not made are counted here.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.label, self.blocking = store, store.label, store.blocking
        self.counters = TierCounters()
        self.breaker = CircuitBreaker(clock)
        self._threads = TierThreads(store.label)
        self._probed: Sequence[Name] = ()  # what a probe looks up

    @property
    def lock(self) -> threading.Lock:
        """Guards what the guard, and the tier that has it, counts and decides. Nothing waits under it."""
        return self._threads.lock

    @property
    def filling(self) -> Filling:
        """The reads of this process into slots of the tier."""
        return self._threads.filling

    def attempt(self, call: Callable[[], Result], default: Result, deadline: float | None = None) -> Result:
        """Return the result of `ask`, or `default` if it fails."""
        try:
            return self.ask(call, deadline)
        except StoreError:
            return default

    def ask(self, call: Callable[[], Result], deadline: float | None = None, *, tells: bool = True) -> Result:
        """Make a call of the store, unless the circuit breaker is open. Raises StoreError.

        With a deadline, the call is made on a thread of the tier, and fails if it does not return by then. `tells`: whether a
        failure says that the store does not work; otherwise it is only counted.
        """
        if not self._admits(inline=deadline is None):
            raise StoreUnavailable(f"tier {self.label} is not used for now")
        try:
            result = call() if deadline is None else self.call(call, deadline)
        except Exception as error:
            (self._failed if tells else self.count_error)(error)
            raise error if isinstance(error, StoreError) else StoreUnavailable(type(error).__name__) from error
        self._succeeded()
        return result

    def call(self, call: Callable[[], Result], deadline: float) -> Result:
        """Make a call of the store. Raises what it raises, and StoreHung if it has not returned shortly after the deadline."""
        return self._threads.call(call, deadline) if self.blocking else call()

    def start(self, call: Callable[[], Result]) -> TierCall[Result]:
        """Make a call of the store on a thread of the tier. Raises StoreUnavailable if too many have not returned."""
        return self._threads.start(call)

    @property
    def answers(self) -> bool:
        """Whether calls are made, and nothing says that the next one will be late. One that is off has its trial calls."""
        return self.breaker.closed and not self._threads.hung and not self._threads.overdue

    def _admits(self, *, inline: bool = False) -> bool:
        """Whether a call may be made now. While a call is hung, only the tier's own probes are. While one is overdue, a call
        would probably lose its deadline too, so only those on the caller's thread are made, which has no other work."""
        hung = self._threads.hung
        late = not (hung or inline) and self._threads.overdue
        if self.breaker.closed and not (hung or late):
            return True
        with self._threads.lock:
            opened = hung and not self.breaker.is_open and self.breaker.failed(certain=True)
            allowed = not late and self.breaker.allows()
            self.counters.skipped += hung or not allowed
        if opened:
            self._log_opened("a call does not return")
        if hung and allowed:
            self._probe()
        return allowed and not hung

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
            self.start(look_up)

    def _failed(self, error: Exception, *, certain: bool = False) -> None:
        with self._threads.lock:
            opened = self.breaker.failed(certain=certain)
        if opened:
            self._log_opened(error.message if isinstance(error, StoreError) else type(error).__name__)
        self.count_error(error)

    def _log_opened(self, reason: str) -> None:
        log.warning("tier %s is not used for now, after repeated errors: %s", self.label, reason)

    def _succeeded(self) -> None:
        if self.breaker.succeeded_again():
            return
        with self._threads.lock:
            closed = self.breaker.succeeded()
        if closed:
            log.info("tier %s works again", self.label)

    def count_error(self, error: Exception) -> None:
        with self._threads.lock:
            self.counters.errors[error.code if isinstance(error, StoreError) else type(error).__name__] += 1

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
