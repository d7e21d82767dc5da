"""The two sides of a transfer as a service uses them, and the service: `KVSource` has the KV, `KVDestination` receives it.

Any thread may call. There are two locks, taken in this order: `_notifying` is held while the service is notified, `_lock`
guards the state. Messages to the peer are queued under `_lock`, so they leave in the order of the states.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from foreword.blocks.layout import Layout
from foreword.transfer.channel import Channel
from foreword.transfer.errors import TransferError
from foreword.transfer.link import Payload, Received
from foreword.transfer.parts import ReceivedParts, payload_bytes
from foreword.transfer.protocol import Action, Role, State, Timings, Transfer, TransferEvent, TransferOutcome
from foreword.transfer.wire_format import (
    Accept,
    Buffer,
    Cancel,
    Finished,
    KeepAlive,
    KVPart,
    OwnershipAnswer,
    OwnershipQuery,
    PullRequest,
    PushRequest,
    Reason,
    Refuse,
    Taken,
    TransferMessage,
)

log = logging.getLogger("foreword.transfer")

_QUERY_INTERVAL: Final = 0.5
_REMEMBERED: Final = 1 << 16

_EVENTS: dict[type[TransferMessage], TransferEvent] = {
    Accept: TransferEvent.GOT_ACCEPT,
    Refuse: TransferEvent.GOT_REFUSE,
    KeepAlive: TransferEvent.GOT_KEEP_ALIVE,
    Taken: TransferEvent.GOT_TAKEN,
    Cancel: TransferEvent.GOT_CANCEL,
    OwnershipQuery: TransferEvent.GOT_QUERY,
}


class TransferService:
    """An instance's service for its peers. An engine's service extends it; as it is, it refuses every request and has no
    blocks, and serves an instance that only fetches.

    Calls come on a connection's reader thread, one at a time per connection, or on the clock's, and must be quick: nothing else
    is read from that peer meanwhile. Copying a part is quick; waiting for a step of the engine is not. Answers (`accept`,
    `refuse`, `take` ...) may be given inside the call or later, from any thread. A call must not wait for a lock whose holder
    calls into a transfer. An exception is logged and ends the transfer with the reason `failed`.

    For one transfer `finished` and `ended` exclude each other, and parts come before `finished`, one at a time. No lock of the
    transfer is held during `part`, which may wait for a device: the transfer may end, `ended` be called and `cancel` return
    while it runs, or just before. So a service begins to write only if its own flag says that the blocks are still the
    transfer's, and frees them when nothing is written any more (`disaggregation.kv_transfer.KVReceive`).

    Args:
        layout: of this instance's blocks; None if it has none.
    """

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout

    def pull_requested(self, source: KVSource) -> None:
        """A peer requests the KV of `source.request`.

        Call `source.accept()` or `source.refuse()`, then `send` for each part, then `finish`.
        """
        source.refuse(Reason.ROLE, "this instance does not compute for others")

    def push_requested(self, destination: KVDestination) -> None:
        """A peer migrates the running request `destination.request`. Call `destination.accept(have)` or `refuse()`."""
        destination.refuse(Reason.ROLE, "this instance takes no requests over")

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        """How many of these blocks (layout fingerprint and key), from the first on, can be sent now. On its own thread."""
        return 0

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        """Whole sealed frames of at most `longest` bytes in the order of `names`, in batches; None for a missing one.

        A batch's memory may be reused when the next batch is requested. Runs on its own thread; ends early if the peer is gone.
        """
        return iter(())

    def accepted(self, transfer: TransferSide) -> None:
        """The peer accepted a transfer that began here; `transfer.have` is what it answered."""

    def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
        """KV arrived, and its checksum matches.

        `payload.release()` must be called, now or later, when its bytes are not read any more; do not write to it. Unreleased
        payloads occupy the link's memory, so keep few.
        """
        payload.release()

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
        """All parts arrived. Call `destination.take()` to take the request over, or `cancel`."""
        destination.cancel(Reason.ROLE, "this instance takes no KV")

    def ended(self, transfer: TransferSide) -> None:
        """Called exactly once for every transfer, however it ended (`transfer.outcome`, `reason`, `message`).

        Also called from within this side's own `refuse`, `take` and `cancel`. The peer needs nothing of the transfer any more.
        """


class TransferSide:
    """The common part of both sides.

    Attributes:
        channel: sends to the peer.
        id: 16 random bytes, the same on both sides.
        opening: the message that began the transfer.
        request: its opaque description.
        have: leading blocks that the destination has (source of a pull: from the start; of a push: once accepted), or that
            were cached at the source (destination of a pull, once accepted).
        context: free for the service.
    """

    def __init__(
        self,
        channel: Channel,
        number: bytes,
        role: Role,
        opening: PullRequest | PushRequest,
        registry: TransferRegistry,
    ) -> None:
        self.channel = channel
        self.id = number
        self.opening = opening
        self.request = opening.request
        self.have = opening.have if isinstance(opening, PullRequest) else 0
        self.context: Any = None
        self._registry = registry
        self._lock = threading.RLock()
        self._notifying = threading.RLock()
        self._ended = threading.Event()
        self._transfer = Transfer(role, registry.timings, time.monotonic())

    @property
    def role(self) -> Role:
        return self._transfer.role

    @property
    def state(self) -> State:
        return self._transfer.state

    @property
    def outcome(self) -> TransferOutcome | None:
        """How it ended; None before the end."""
        return self._transfer.outcome

    @property
    def reason(self) -> Reason | None:
        """Why it ended without being taken."""
        return self._transfer.reason

    @property
    def message(self) -> str:
        """The reason in words."""
        return self._transfer.message

    def wait(self, timeout: float) -> TransferOutcome | None:
        """Wait for the end; None if it does not come within `timeout` seconds."""
        self._ended.wait(timeout)
        return self.outcome

    def begin(self, notify: Callable[[], object]) -> None:
        """Notify the service of a transfer that the peer began."""
        with self._notifying:
            self._guarded(notify)

    def refuse(self, reason: Reason, message: str = "") -> None:
        """Refuse what the peer began. Raises TransferError if it has been answered or has ended."""
        self.handle(TransferEvent.REFUSE, reason, message, Refuse(reason, message[:2000]))

    def cancel(self, reason: Reason = Reason.CANCELLED, message: str = "") -> bool:
        """End the transfer. It waits for no part that is being written. When it returns, no other call of the service about it
        is in progress.

        Returns whether the transfer has ended, also if it ended before. False if only the peer knows the outcome: a request
        that has just been handed over.
        """
        self.handle(TransferEvent.CANCEL, reason, message)
        return self._transfer.ended

    def handle(
        self, event: TransferEvent, reason: Reason | None = None, text: str = "", message: TransferMessage | None = None
    ) -> tuple[Action, ...]:
        """Change the state by an event and do what follows; returns the actions.

        `message` is what a command sends. Raises ProtocolViolation, TransferError; see `Transfer.handle`.
        """
        with self._notifying:
            with self._lock:
                actions = self._transfer.handle(event, time.monotonic(), reason, text)
                self._send(actions, message)
            self._notify(actions)
            return actions

    def tick(self, now: float, patience: float = 0.0) -> None:
        """End the transfer if its deadline has passed.

        If the service is being notified, this waits for `patience` seconds only: one slow service must not stop the clock of
        all transfers, and the next tick comes soon.
        """
        deadline = self._transfer.deadline
        if deadline is None or now < deadline or not self._notifying.acquire(timeout=patience):
            return
        try:
            with self._lock:
                actions = self._transfer.tick(now)
                self._send(actions)
            self._notify(actions)
        finally:
            self._notifying.release()

    def got(self, received: Received) -> None:
        """Handle a message of the peer. Raises ProtocolViolation."""
        match received.message:
            case OwnershipAnswer(taken):
                self.handle(TransferEvent.GOT_YES if taken else TransferEvent.GOT_NO)
            case Accept(have):
                with self._lock:
                    if self.state in (State.OFFERED, State.WANTED):
                        self.have = have
                self.handle(TransferEvent.GOT_ACCEPT)
            case Refuse(reason, text) | Cancel(reason, text):
                self.handle(_EVENTS[type(received.message)], reason, text)
            case KVPart():  # a source has no transition for it: a ProtocolViolation
                received.payload.release()
                self.handle(TransferEvent.GOT_PART)
            case message:
                self.handle(_EVENTS.get(type(message), TransferEvent.GOT_FINISHED))

    def _send(self, actions: Sequence[Action], message: TransferMessage | None = None) -> None:
        """Queue the messages that an event requires; under `_lock`."""
        for action in actions:
            match action:
                case Action.SEND_ACCEPT | Action.SEND_REFUSE | Action.SEND_FINISHED | Action.SEND_TAKEN:
                    assert message is not None
                    self.channel.post(message, self.id)
                case Action.SEND_CANCEL:
                    reason = self._transfer.reason or Reason.FAILED
                    self.channel.post(Cancel(reason, self._transfer.message[:2000]), self.id)
                case Action.SEND_NO:
                    self.channel.post(OwnershipAnswer(False), self.id)
                case Action.ASK | Action.REMEMBER:
                    self._registry.perform(self, action)

    def _notify(self, actions: Sequence[Action]) -> None:
        """Notify the service; under `_notifying`."""
        service = self._registry.service
        if Action.NOTIFY_ACCEPTED in actions:
            self._guarded(lambda: service.accepted(self))
        if Action.NOTIFY_ENDED in actions:
            self.channel.wake_senders()
            self._registry.perform(self, Action.NOTIFY_ENDED)
            self._guarded(lambda: service.ended(self))
            self._ended.set()

    def _guarded(self, call: Callable[[], object]) -> None:
        """Call the service. An exception ends this transfer, not the connection's thread."""
        try:
            call()
        except TransferError as error:
            # The transfer may have ended while the service was about to answer; `ended` says so.
            if not self._transfer.ended:
                self.cancel(Reason.FAILED, error.message)
        except Exception as error:  # the edge of this package: a service may raise anything
            log.exception("the service failed in a transfer")
            self._registry.count("service_errors")
            self.cancel(Reason.FAILED, f"the service failed: {type(error).__name__}")


class KVSource(TransferSide):
    """The side that has the KV."""

    def accept(self, cached: int = 0) -> None:
        """Accept a `pull_requested`; `cached` leading blocks need not be computed. Raises TransferError if it has ended."""
        self.handle(TransferEvent.ACCEPT, message=Accept(cached))

    def keep_alive(self) -> None:
        """Tell the peer that the computation continues although there is nothing to send yet.

        Call it at least every few seconds. It is cheap: calls that come too often send nothing. Ignored after the end.
        """
        with self._lock:
            deadline = self._transfer.deadline
            if self.state is not State.SENDING or deadline is None:
                return
            now, timings = time.monotonic(), self._registry.timings
            if deadline - now < timings.lease - min(timings.lease, timings.progress) / 5:
                self._transfer.progress(now)
                self.channel.post(KeepAlive(), self.id)

    def send(
        self, part: KVPart, buffers: Sequence[Buffer], *, sent: Callable[[], None] | None = None, wait: float = 30.0
    ) -> bool:
        """Queue a part; its payload is the concatenated bytes of `buffers` (contiguous, item size 1).

        Args:
            sent: called exactly once, from another thread or from within, as soon as the buffers may change: the part was
                sent, was dropped because the transfer ended, or was not queued at all.
            wait: seconds to wait for room in the queue.

        Returns False if there was no room within that time. Raises TransferError if the transfer has ended or is not in the
        right state, or if the part's size does not match its layout.
        """
        try:
            size = sum(map(len, buffers))
            expected = payload_bytes(self.channel.layout, part)
            if size != expected:
                raise TransferError(f"a part of {part.tokens} tokens has {expected} bytes, not {size}")
            if size > self.channel.largest:
                raise TransferError(f"a part of {size} bytes is longer than the {self.channel.largest} of this link")
            with self._lock:
                self._transfer.handle(TransferEvent.SEND, time.monotonic())
        except TransferError:
            if sent is not None:
                sent()
            raise
        return self.channel.put(part, self.id, buffers, sent, wait, lambda: self._transfer.ended)

    def finish(self, result: bytes, tokens: int) -> None:
        """Everything was sent; `tokens` tokens have KV. The peer answers. Raises TransferError if it has ended."""
        self.handle(TransferEvent.FINISH, message=Finished(result, tokens))


class KVDestination(TransferSide):
    """The side that receives the KV."""

    def __init__(
        self,
        channel: Channel,
        number: bytes,
        role: Role,
        opening: PullRequest | PushRequest,
        registry: TransferRegistry,
    ) -> None:
        super().__init__(channel, number, role, opening, registry)
        self._received = ReceivedParts(channel.layout, opening.keys, self.have)

    def differing_key(self, keys: Sequence[bytes]) -> int | None:
        """The first block whose key, as the peer has announced it by now, is not in `keys`; None if all are.

        `keys` are those that this side has computed, of all full blocks from the first one on.
        """
        announced = self._received.keys
        return next((block for block, key in enumerate(keys) if announced.get(block, key) != key), None)

    def accept(self, have: int = 0) -> None:
        """Accept a `push_requested`; the first `have` blocks are here already. Raises TransferError if it has ended."""
        self.have = self._received.have = have
        self.handle(TransferEvent.ACCEPT, message=Accept(have))

    def take(self) -> bool:
        """Take a complete request over. True: this side owns it now. False: the transfer has ended; do not continue it."""
        with self._notifying:
            if self._transfer.ended:
                return False
            self.handle(TransferEvent.TAKE, message=Taken())
            return True

    def got(self, received: Received) -> None:
        match received.message:
            case KVPart() as part:
                self._got_part(part, received)
            case Finished() as finished:
                self._got_finished(finished)
            case _:
                super().got(received)

    def _got_part(self, part: KVPart, received: Received) -> None:
        """Check a part completely before the service sees it."""
        payload = received.payload
        if self._transfer.ended:
            payload.release()
            return
        fault = self._received.find_fault(part, len(payload))
        if fault is None and not received.sound():
            fault = "the checksum of a part does not match"
        event = TransferEvent.GOT_PART if fault is None else TransferEvent.GOT_BAD_PART
        with self._notifying:
            try:
                actions = self.handle(event, Reason.CONTENT, fault or "")
            except BaseException:
                payload.release()
                raise
            wanted = Action.NOTIFY_PART in actions
            if wanted:
                self._received.add(part)
        if wanted:
            self._guarded(lambda: self._registry.service.part(self, part, payload))
        else:
            payload.release()

    def _got_finished(self, message: Finished) -> None:
        if self._transfer.ended:
            return
        gap = self._received.find_gap(message.tokens)
        event = TransferEvent.GOT_FINISHED if gap is None else TransferEvent.GOT_GAPS
        with self._notifying:
            if Action.NOTIFY_FINISHED in self.handle(event, Reason.GAPS, gap or ""):
                self._guarded(lambda: self._registry.service.finished(self, message.result, message.tokens))


class TransferRegistry:
    """The transfers of one endpoint: those in progress, those in doubt, and the ids of those that were taken. Thread-safe.

    Args:
        service: is notified of the transfers.
        limit: transfers in progress at a time.
        lock: the endpoint's; held for assignments only.
    """

    def __init__(self, service: TransferService, timings: Timings, limit: int, lock: threading.Condition) -> None:
        self.service, self.timings = service, timings
        self._limit = limit
        self._lock = lock
        self._sides: dict[bytes, TransferSide] = {}
        self._taken: OrderedDict[bytes, float] = OrderedDict()
        self._next_query: dict[bytes, float] = {}
        self._counts: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    def add(self, side: TransferSide) -> bool:
        """Add a transfer; False if there are too many or the registry is closed."""
        with self._lock:
            if len(self._sides) >= self._limit:
                return False
            self._sides[side.id] = side
            return True

    def find(self, transfer: bytes) -> TransferSide | None:
        return self._sides.get(transfer)

    def all(self) -> list[TransferSide]:
        with self._lock:
            return list(self._sides.values())

    def of_channel(self, channel: Channel) -> list[TransferSide]:
        return [side for side in self.all() if side.channel is channel]

    def was_taken(self, transfer: bytes) -> bool:
        """Whether this instance has taken a request over, as destination."""
        return transfer in self._taken

    def due_queries(self, now: float) -> list[TransferSide]:
        """The transfers in doubt whose peer should be asked now."""
        with self._lock:
            due = [number for number, at in self._next_query.items() if at <= now]
            self._next_query.update(dict.fromkeys(due, now + _QUERY_INTERVAL))
            return [self._sides[number] for number in due if number in self._sides]

    def close(self) -> None:
        """Accept no more transfers."""
        self._limit = 0

    def count(self, name: str) -> None:
        """Count a rare event."""
        with self._lock:
            self._counts[name] += 1

    def status(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Transfers in progress by `role, state`, ended ones by outcome or reason, and the counts of rare events."""
        with self._lock:
            states = Counter(f"{side.role}, {side.state}" for side in self._sides.values())
            return dict(states), dict(self._ended), dict(self._counts)

    def perform(self, side: TransferSide, action: Action) -> None:
        """An action of a transfer that concerns the endpoint: `ASK`, `REMEMBER`, `NOTIFY_ENDED`."""
        with self._lock:
            if action is Action.ASK:
                self._next_query[side.id] = 0.0
            elif action is Action.REMEMBER:
                self._remember(side)
            elif action is Action.NOTIFY_ENDED:
                self._sides.pop(side.id, None)
                self._next_query.pop(side.id, None)
                taken = side.outcome is TransferOutcome.TAKEN
                self._ended["taken" if taken else str(side.reason)] += 1

    def _remember(self, side: TransferSide) -> None:
        """Remember a taken request for longer than the source can ask: it waits one lease, then asks for another one."""
        now = time.monotonic()
        while self._taken and (next(iter(self._taken.values())) < now or len(self._taken) >= _REMEMBERED):
            self._taken.popitem(last=False)
        self._taken[side.id] = now + 3 * max(side.opening.seconds, self.timings.lease)
