"""One side of one transfer, as a service holds it: `Source` has the KV, `Destination` gets it.

Any thread may call. Two locks, taken in this order: `_telling` is held while the service is told something, `_lock` guards the
state. What goes to the peer is queued under `_lock`, so messages leave in the order of the states.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from foreword.errors import TransferError
from foreword.transfer.link import Received
from foreword.transfer.messages import (
    Accept,
    Answer,
    Buffer,
    Cancel,
    Finished,
    Message,
    Offer,
    Part,
    Query,
    Reason,
    Refuse,
    Taken,
    Want,
    Working,
    split_keys,
)
from foreword.transfer.parts import Ledger, payload_bytes
from foreword.transfer.protocol import Action, Event, Outcome, Role, State, Timings, Transfer

if TYPE_CHECKING:
    from foreword.transfer.connection import Connection

log = logging.getLogger("foreword.transfer")

_EVENTS = {
    Accept: Event.GOT_ACCEPT,
    Refuse: Event.GOT_REFUSE,
    Working: Event.GOT_WORKING,
    Taken: Event.GOT_TAKEN,
    Cancel: Event.GOT_CANCEL,
    Query: Event.GOT_QUERY,
}


class _Side:
    """What both sides have in common.

    Attributes:
        id: 16 random bytes, the same on both sides.
        request: the opaque description with which it began.
        have: leading blocks that the destination has (source of a pull: from the start; of a push: once accepted) or that
            were cached at the source (destination of a pull, once accepted).
        context: for the service, which may keep here what it likes.
    """

    def __init__(
        self, connection: Connection, number: bytes, role: Role, opening: Want | Offer, timings: Timings
    ) -> None:
        self.connection = connection
        self.id = number
        self.request = opening.request
        self.opening = opening
        self.have = opening.have if isinstance(opening, Want) else 0
        self.context: Any = None
        self._lock = threading.RLock()
        self._telling = threading.RLock()
        self._ended = threading.Event()
        self._transfer = Transfer(role, timings, time.monotonic())

    @property
    def keys(self) -> list[bytes]:
        """Of the full blocks that were named when it began."""
        return split_keys(self.opening.keys)

    @property
    def role(self) -> Role:
        return self._transfer.role

    @property
    def state(self) -> State:
        return self._transfer.state

    @property
    def outcome(self) -> Outcome | None:
        """How it ended; None before."""
        return self._transfer.outcome

    @property
    def reason(self) -> Reason | None:
        """Why it ended without being taken."""
        return self._transfer.reason

    @property
    def message(self) -> str:
        return self._transfer.message

    @property
    def deadline(self) -> float | None:
        """When it ends by itself (`time.monotonic()`), unless something happens; None once it has ended."""
        return self._transfer.deadline

    def wait(self, timeout: float) -> Outcome | None:
        """Wait for the end; None if it does not come within `timeout` seconds."""
        self._ended.wait(timeout)
        return self.outcome

    def begin(self, tell: Callable[[], object]) -> None:
        """Tell the service of a transfer that the peer began."""
        with self._telling:
            self._guarded(tell)

    def refuse(self, reason: Reason, message: str = "") -> None:
        """Say no to what the peer began. Raises TransferError if it has been answered or has ended."""
        self._command(Event.REFUSE, Refuse(reason, message[:2000]), reason, message)

    def cancel(self, reason: Reason = Reason.CANCELLED, message: str = "") -> bool:
        """End it. Returns whether it has ended, also if before; False where only the peer can say what becomes of it (a
        request that was handed over a moment ago). When it returns, no call of the service about it is under way."""
        self._command(Event.CANCEL, Cancel(reason, message[:2000]), reason, message)
        return self._transfer.ended

    def _command(
        self, event: Event, message: Message | None, reason: Reason | None = None, text: str = ""
    ) -> tuple[Action, ...]:
        with self._telling:
            with self._lock:
                actions = self._transfer.handle(event, time.monotonic(), reason, text)
                self._send(actions, message)
            self._tell(actions)
            return actions

    def world(self, event: Event, message: str = "") -> None:
        """Something happened that concerns it: the connection broke, the peer is gone."""
        self._follow(event, Reason.LOST, message)

    def tick(self, now: float, patience: float = 0.0) -> None:
        """End it if its deadline has passed. While the service is being told something this waits for `patience` seconds only:
        one slow service must not stop everybody's clock, and the next tick comes soon."""
        deadline = self.deadline
        if deadline is None or now < deadline or not self._telling.acquire(timeout=patience):
            return
        try:
            with self._lock:
                actions = self._transfer.tick(now)
                self._send(actions, None)
            self._tell(actions)
        finally:
            self._telling.release()

    def _follow(self, event: Event, reason: Reason | None = None, text: str = "") -> None:
        with self._telling:
            with self._lock:
                actions = self._transfer.handle(event, time.monotonic(), reason, text)
                self._send(actions, None)
            self._tell(actions)

    def got(self, received: Received) -> None:
        """A message of the peer's. Raises ProtocolViolation."""
        message = received.message
        if isinstance(message, Answer):
            event = Event.GOT_YES if message.taken else Event.GOT_NO
        elif type(message) in _EVENTS:
            event = _EVENTS[type(message)]
        else:
            received.payload.release()
            self._strange(message)
            return
        if isinstance(message, Accept):
            self._note_accept(message)
        why = message if isinstance(message, Refuse | Cancel) else None
        self._follow(event, why.reason if why else None, why.message if why else "")

    def _strange(self, message: Message) -> None:
        """A message that this side never gets; a table without a rule for it says so."""
        self._follow(Event.GOT_PART if isinstance(message, Part) else Event.GOT_FINISHED)

    def _note_accept(self, message: Accept) -> None:
        with self._lock:
            if self.state in (State.OFFERED, State.WANTED):
                self.have = message.have

    def _send(self, actions: Sequence[Action], message: Message | None) -> None:
        """Queue what an event asks for; under `_lock`."""
        for action in actions:
            if action is Action.SEND_CANCEL and not isinstance(message, Cancel):
                reason = self._transfer.reason or Reason.FAILED
                self.connection.post(Cancel(reason, self._transfer.message[:2000]), self.id)
            elif action is Action.SEND_NO:
                self.connection.post(Answer(False), self.id)
            elif action is Action.REMEMBER:
                self.connection.host.remember(self)  # type: ignore[arg-type]
            elif action is Action.ASK:
                self.connection.host.ask(self)  # type: ignore[arg-type]
            elif action.startswith("send") and message is not None and action is not Action.SEND_PART:
                self.connection.post(message, self.id)

    def _tell(self, actions: Sequence[Action]) -> None:
        """Tell the service; under `_telling`."""
        service = self.connection.host.service
        if Action.TELL_ACCEPTED in actions:
            self._guarded(lambda: service.accepted(self))  # type: ignore[arg-type]
        if Action.TELL_ENDED in actions:
            self.connection.nudge()
            self.connection.host.forget(self)  # type: ignore[arg-type]
            self._guarded(lambda: service.ended(self))  # type: ignore[arg-type]
            self._ended.set()

    def _guarded(self, call: Callable[[], object]) -> None:
        """A service's defect ends one transfer, not the connection's thread."""
        try:
            call()
        except TransferError as error:
            # It ended while the service was about to answer; `ended` tells it so.
            if not self._transfer.ended:
                self.cancel(Reason.FAILED, error.message)
        except Exception as error:  # the edge of this room: whatever a service raises ends one transfer
            log.exception("the service failed in a transfer")
            self.connection.host.count("service_errors")
            self.cancel(Reason.FAILED, f"the service failed: {type(error).__name__}")


class Source(_Side):
    """The side that has the KV."""

    def accept(self, cached: int = 0) -> None:
        """Say yes to a `wanted`; `cached` leading blocks need not be computed. Raises TransferError if it has ended."""
        self._command(Event.ACCEPT, Accept(cached))

    def working(self) -> None:
        """There is nothing to send yet, but it is being worked on; to be called at least every few seconds meanwhile. Cheap:
        what is called too often is not sent. Ignored once it has ended."""
        with self._lock:
            if self.state is not State.SENDING or self.deadline is None:
                return
            now = time.monotonic()
            timings = self._transfer.timings
            if self.deadline - now < timings.lease - min(timings.lease, timings.progress) / 5:
                self._transfer.progress(now)
                self.connection.post(Working(), self.id)

    def send(
        self, part: Part, buffers: Sequence[Buffer], *, sent: Callable[[], None] | None = None, wait: float = 30.0
    ) -> bool:
        """Queue a part; its payload is the bytes of `buffers` (contiguous, in units of a byte) in a row.

        Args:
            sent: called exactly once, from another thread or from within, as soon as the buffers may change: the part went out,
                was dropped because the transfer ended, or was not queued at all.
            wait: seconds to wait for room in the queue.

        Returns False if there was no room within that time. Raises TransferError if the transfer has ended, is not at this
        stage, or the part has another size than its layout says.
        """
        try:
            size = sum(map(len, buffers))
            expected = payload_bytes(self.connection.layout, part)
            if size != expected:
                raise TransferError(f"a part of {part.tokens} tokens has {expected} bytes, not {size}")
            if size > self.connection.largest:
                raise TransferError(f"a part of {size} bytes is longer than the {self.connection.largest} of this link")
            with self._lock:
                self._transfer.handle(Event.SEND, time.monotonic())
        except TransferError:
            if sent is not None:
                sent()
            raise
        return self.connection.put(part, self.id, buffers, sent, wait, lambda: self._transfer.ended)

    def finish(self, result: bytes, tokens: int) -> None:
        """Everything was sent; `tokens` tokens have KV. The peer answers. Raises TransferError if it has ended."""
        self._command(Event.FINISH, Finished(result, tokens))


class Destination(_Side):
    """The side that gets the KV."""

    def __init__(
        self, connection: Connection, number: bytes, role: Role, opening: Want | Offer, timings: Timings
    ) -> None:
        super().__init__(connection, number, role, opening, timings)
        self._ledger = Ledger(connection.layout, opening.keys, self.have)

    def accept(self, have: int = 0) -> None:
        """Say yes to an `offered`; the first `have` blocks are here already. Raises TransferError if it has ended."""
        self.have = self._ledger.have = have
        self._command(Event.ACCEPT, Accept(have))

    def take(self) -> bool:
        """Take what is complete. True: it is this side's from now on. False: it has ended, and must not be gone on with."""
        with self._telling:
            if self._transfer.ended:
                return False
            self._command(Event.TAKE, Taken())
            return True

    def got(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Part):
            self._got_part(message, received)
        elif isinstance(message, Finished):
            self._got_finished(message)
        else:
            super().got(received)

    def _got_part(self, part: Part, received: Received) -> None:
        """Nothing is looked at, let alone handed over, before all of it has been checked."""
        payload = received.payload
        if self._transfer.ended:
            payload.release()
            return
        fault = self._ledger.fault(part, len(payload))
        if fault is None and not received.sound():
            fault = "the checksum of a part does not fit"
        with self._telling:
            try:
                with self._lock:
                    event = Event.GOT_PART if fault is None else Event.GOT_BAD_PART
                    actions = self._transfer.handle(event, time.monotonic(), Reason.CONTENT, fault or "")
                    self._send(actions, None)
            except BaseException:
                payload.release()
                raise
            if Action.TELL_PART not in actions:
                payload.release()
                self._tell(actions)
                return
            self._ledger.note(part)
            self._guarded(lambda: self.connection.host.service.part(self, part, payload))

    def _got_finished(self, message: Finished) -> None:
        if self._transfer.ended:
            return
        gap = self._ledger.gap(message.tokens)
        with self._telling:
            with self._lock:
                event = Event.GOT_FINISHED if gap is None else Event.GOT_GAPS
                actions = self._transfer.handle(event, time.monotonic(), Reason.GAPS, gap or "")
                self._send(actions, None)
            self._tell(actions)
            if Action.TELL_FINISHED in actions:
                self._guarded(lambda: self.connection.host.service.finished(self, message.result, message.tokens))

    @property
    def received_keys(self) -> dict[int, bytes]:
        """The key of each full block that was named so far, by the block's number."""
        return dict(self._ledger.keys)
