"""The states of a transfer, without I/O: a table from (role, state, event) to a transition.

The caller passes the time: every method gets `now`, in seconds of any clock that never goes back. Each state except the last
has a deadline; `tick` must be called when it passes. dev/concepts/transfer.md shows the table as diagrams.

Ownership of a migrated request (push). The source owns the request until its transfer ends with TAKEN. From FINISHED on it does
not decode, so the two sides never decode at the same time. The destination owns the request from the moment its `TAKE` is
accepted here, before the message is sent. If the source cannot tell which of the two happened, it asks (DOUBT). A destination
that answers "no" never takes the request after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from foreword.transfer.errors import ProtocolViolation, TransferError
from foreword.transfer.wire_format import Reason


class Role(StrEnum):
    PULL_SOURCE = "pull source"  # computes KV on request and sends it
    PULL_DESTINATION = "pull destination"  # requested the KV
    PUSH_SOURCE = "push source"  # migrates a running request to the peer
    PUSH_DESTINATION = "push destination"  # takes the request over


class State(StrEnum):
    ASKED = "asked"  # a PullRequest arrived; the service decides
    OFFERED = "offered"  # a PushRequest was sent
    SENDING = "sending"
    DELIVERED = "delivered"  # everything was sent; wait until the destination has taken it
    DOUBT = "doubt"  # delivered, but unknown whether the destination took it: ask
    WANTED = "wanted"  # a PullRequest was sent
    CONSIDERED = "considered"  # a PushRequest arrived; the service decides
    RECEIVING = "receiving"
    COMPLETE = "complete"  # everything arrived and was checked; the service takes it or cancels
    ENDED = "ended"


class TransferEvent(StrEnum):
    # Commands of this side's service
    ACCEPT = "accept"
    REFUSE = "refuse"
    SEND = "send"
    FINISH = "finish"
    TAKE = "take"
    CANCEL = "cancel"
    # Messages of the peer; those with wrong content are separate events
    GOT_ACCEPT = "got Accept"
    GOT_REFUSE = "got Refuse"
    GOT_PART = "got KVPart"
    GOT_BAD_PART = "got bad KVPart"
    GOT_KEEP_ALIVE = "got KeepAlive"
    GOT_FINISHED = "got Finished"
    GOT_GAPS = "got Finished with gaps"
    GOT_TAKEN = "got Taken"
    GOT_CANCEL = "got Cancel"
    GOT_QUERY = "got OwnershipQuery"
    GOT_YES = "got OwnershipAnswer yes"
    GOT_NO = "got OwnershipAnswer no"
    # Events of the connection and the clock
    BROKEN = "connection broke"
    GONE = "peer's process ended"
    DEADLINE = "deadline"


_Event = TransferEvent
COMMANDS: Final = frozenset({_Event.ACCEPT, _Event.REFUSE, _Event.SEND, _Event.FINISH, _Event.TAKE, _Event.CANCEL})
EXTERNAL: Final = frozenset({_Event.BROKEN, _Event.GONE, _Event.DEADLINE})


class Action(StrEnum):
    """An action that the caller must do after an event, in this order."""

    SEND_ACCEPT = "send Accept"
    SEND_REFUSE = "send Refuse"
    SEND_PART = "send KVPart"
    SEND_FINISHED = "send Finished"
    SEND_TAKEN = "send Taken"
    SEND_CANCEL = "send Cancel"
    SEND_NO = "send OwnershipAnswer no"
    ASK = "send OwnershipQuery until answered, reconnecting if needed"
    NOTIFY_ACCEPTED = "notify accepted"
    NOTIFY_PART = "notify part"
    NOTIFY_FINISHED = "notify finished"
    NOTIFY_ENDED = "notify ended"
    REMEMBER = "remember as taken"


class TransferOutcome(StrEnum):
    """How a transfer ended: the destination took it, it did not and never will, or (push) this cannot be found out."""

    TAKEN = "taken"
    NOT_TAKEN = "not taken"
    UNKNOWN = "unknown"


# The field of `Timings` that bounds a state. Entering a state again restarts its time.
LIMITS: Final = {
    State.ASKED: "answer",
    State.OFFERED: "answer",
    State.SENDING: "lease",
    State.DELIVERED: "lease",
    State.DOUBT: "lease",
    State.WANTED: "answer",
    State.CONSIDERED: "answer",
    State.RECEIVING: "progress",
    State.COMPLETE: "lease",
}
# Events that do not restart the time of a state that stays the same.
_NO_PROGRESS: Final = frozenset({_Event.BROKEN, _Event.GOT_CANCEL})


@dataclass(frozen=True, slots=True)
class Timings:
    """Time limits in seconds.

    Attributes:
        answer: until a request is accepted or refused.
        progress: between two signs of progress.
        lease: how long blocks are kept for the peer without a sign of progress.
    """

    answer: float = 10.0
    progress: float = 30.0
    lease: float = 60.0

    def of(self, state: State) -> float:
        return float(getattr(self, LIMITS[state]))


@dataclass(frozen=True, slots=True)
class Transition:
    """The next state and the actions; for the last state also how it ended and why (None: the event says why)."""

    state: State
    actions: tuple[Action, ...] = ()
    outcome: TransferOutcome | None = None
    reason: Reason | None = None


Transitions = Mapping[tuple[State, TransferEvent], Transition]


def _stay(state: State, *actions: Action) -> Transition:
    return Transition(state, actions)


def _end(
    *actions: Action, reason: Reason | None = None, outcome: TransferOutcome = TransferOutcome.NOT_TAKEN
) -> Transition:
    return Transition(State.ENDED, (*actions, Action.NOTIFY_ENDED), outcome, reason)


_TAKEN: Final = _end(outcome=TransferOutcome.TAKEN)
_LOST: Final = _end(reason=Reason.LOST)
_EXPIRED: Final = _end(Action.SEND_CANCEL, reason=Reason.DEADLINE)


def _open(*states: State) -> dict[tuple[State, TransferEvent], Transition]:
    """Transitions of every undecided state: either side may cancel; a deadline or a broken connection ends the transfer."""
    transitions: dict[tuple[State, TransferEvent], Transition] = {}
    for state in states:
        transitions[state, _Event.CANCEL] = _end(Action.SEND_CANCEL)
        transitions[state, _Event.GOT_CANCEL] = _end()
        transitions[state, _Event.BROKEN] = _LOST
        transitions[state, _Event.DEADLINE] = _EXPIRED
    return transitions


_SENDING: Final[Transitions] = {
    (State.SENDING, _Event.SEND): _stay(State.SENDING, Action.SEND_PART),
    (State.SENDING, _Event.FINISH): _stay(State.DELIVERED, Action.SEND_FINISHED),
}
_RECEIVING: Final[Transitions] = {
    (State.RECEIVING, _Event.GOT_PART): _stay(State.RECEIVING, Action.NOTIFY_PART),
    (State.RECEIVING, _Event.GOT_BAD_PART): _end(Action.SEND_CANCEL, reason=Reason.CONTENT),
    (State.RECEIVING, _Event.GOT_KEEP_ALIVE): _stay(State.RECEIVING),
    (State.RECEIVING, _Event.GOT_FINISHED): _stay(State.COMPLETE, Action.NOTIFY_FINISHED),
    (State.RECEIVING, _Event.GOT_GAPS): _end(Action.SEND_CANCEL, reason=Reason.GAPS),
}

TABLE: Final[Mapping[Role, Transitions]] = {
    Role.PULL_SOURCE: {
        **_open(State.ASKED, State.SENDING, State.DELIVERED),
        (State.ASKED, _Event.ACCEPT): _stay(State.SENDING, Action.SEND_ACCEPT),
        (State.ASKED, _Event.REFUSE): _end(Action.SEND_REFUSE),
        **_SENDING,
        (State.DELIVERED, _Event.GOT_TAKEN): _TAKEN,
    },
    Role.PULL_DESTINATION: {
        **_open(State.WANTED, State.RECEIVING),
        (State.WANTED, _Event.GOT_ACCEPT): _stay(State.RECEIVING, Action.NOTIFY_ACCEPTED),
        (State.WANTED, _Event.GOT_REFUSE): _end(),
        **_RECEIVING,
        (State.COMPLETE, _Event.TAKE): _end(Action.SEND_TAKEN, outcome=TransferOutcome.TAKEN),
        (State.COMPLETE, _Event.CANCEL): _end(Action.SEND_CANCEL),
        # Everything has arrived, and this side owned the request from the start: the source is not needed any more.
        (State.COMPLETE, _Event.GOT_CANCEL): _stay(State.COMPLETE),
        (State.COMPLETE, _Event.BROKEN): _stay(State.COMPLETE),
        (State.COMPLETE, _Event.DEADLINE): _EXPIRED,
    },
    Role.PUSH_SOURCE: {
        **_open(State.OFFERED, State.SENDING),
        (State.OFFERED, _Event.GOT_ACCEPT): _stay(State.SENDING, Action.NOTIFY_ACCEPTED),
        (State.OFFERED, _Event.GOT_REFUSE): _end(),
        **_SENDING,
        # No CANCEL in DELIVERED or DOUBT: the destination may already have taken it.
        (State.DELIVERED, _Event.GOT_TAKEN): _TAKEN,
        (State.DELIVERED, _Event.GOT_CANCEL): _end(),
        (State.DELIVERED, _Event.BROKEN): _stay(State.DOUBT, Action.ASK),
        (State.DELIVERED, _Event.DEADLINE): _stay(State.DOUBT, Action.ASK),
        (State.DOUBT, _Event.GOT_YES): _TAKEN,
        (State.DOUBT, _Event.GOT_NO): _end(reason=Reason.LOST),
        (State.DOUBT, _Event.GOT_TAKEN): _TAKEN,
        (State.DOUBT, _Event.GOT_CANCEL): _end(),
        (State.DOUBT, _Event.GONE): _end(reason=Reason.LOST),
        (State.DOUBT, _Event.BROKEN): _stay(State.DOUBT),
        (State.DOUBT, _Event.DEADLINE): _end(reason=Reason.UNKNOWN, outcome=TransferOutcome.UNKNOWN),
    },
    Role.PUSH_DESTINATION: {
        **_open(State.CONSIDERED, State.RECEIVING, State.COMPLETE),
        (State.CONSIDERED, _Event.ACCEPT): _stay(State.RECEIVING, Action.SEND_ACCEPT),
        (State.CONSIDERED, _Event.REFUSE): _end(Action.SEND_REFUSE),
        **_RECEIVING,
        (State.COMPLETE, _Event.TAKE): _end(Action.REMEMBER, Action.SEND_TAKEN, outcome=TransferOutcome.TAKEN),
        # The query may arrive on a new connection before this side notices that the old one broke, or after the source's lease.
        (State.RECEIVING, _Event.GOT_QUERY): _end(Action.SEND_NO, reason=Reason.LOST),
        (State.COMPLETE, _Event.GOT_QUERY): _end(Action.SEND_NO, reason=Reason.LOST),
    },
}
FIRST: Final = {
    Role.PULL_SOURCE: State.ASKED,
    Role.PULL_DESTINATION: State.WANTED,
    Role.PUSH_SOURCE: State.OFFERED,
    Role.PUSH_DESTINATION: State.CONSIDERED,
}
assert all(
    (State.COMPLETE, _Event.GOT_CANCEL) in transitions for role, transitions in TABLE.items() if "destination" in role
)


class Transfer:
    """The state of one side of one transfer. Not thread-safe: the caller serializes all calls.

    Attributes:
        state, deadline: the current ones; no deadline after the end.
        outcome, reason, message: how and why it ended; the reason is None for a transfer that was taken.
    """

    __slots__ = ("deadline", "message", "outcome", "reason", "role", "state", "timings")

    def __init__(self, role: Role, timings: Timings, now: float) -> None:
        self.role = role
        self.timings = timings
        self.state = FIRST[role]
        self.deadline: float | None = now + timings.of(self.state)
        self.outcome: TransferOutcome | None = None
        self.reason: Reason | None = None
        self.message = ""

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    def handle(
        self, event: TransferEvent, now: float, reason: Reason | None = None, message: str = ""
    ) -> tuple[Action, ...]:
        """Change the state by an event; returns the actions. `reason` and `message` say why an event ends the transfer.

        Messages and cancels that arrive after the end are ignored: they may have crossed it on the way.
        Raises ProtocolViolation for a message that the peer may not send now, and TransferError for a command that is not
        possible now, with the transfer's reason if it has ended.
        """
        transition = TABLE[self.role].get((self.state, event))
        if transition is None:
            return self._no_transition(event)
        if transition.state is State.ENDED:
            self.outcome = transition.outcome
            self.reason = (
                None if transition.outcome is TransferOutcome.TAKEN else transition.reason or reason or Reason.CANCELLED
            )
            self.message = message or str(event)
            self.deadline = None
        elif transition.state is not self.state or event not in _NO_PROGRESS:
            self.deadline = now + self.timings.of(transition.state)
        self.state = transition.state
        return transition.actions

    def _no_transition(self, event: TransferEvent) -> tuple[Action, ...]:
        if event in EXTERNAL or (self.ended and event not in COMMANDS) or event is _Event.CANCEL:
            return ()
        if event in COMMANDS:
            why = f" ({self.reason}: {self.message})" if self.reason else ""
            text = f"cannot {event}: this {self.role}'s transfer is {self.state}{why}"
            raise TransferError(text, reason=str(self.reason or Reason.FAILED))
        raise ProtocolViolation(f"the peer of a {self.role} broke the protocol: {event} in the state {self.state}")

    def tick(self, now: float) -> tuple[Action, ...]:
        """End the state if its deadline has passed; returns the actions."""
        if self.deadline is None or now < self.deadline:
            return ()
        limit = LIMITS[self.state]
        text = f"{self.state} for longer than {self.timings.of(self.state):g} s ({limit})"
        return self.handle(_Event.DEADLINE, now, Reason.DEADLINE, text)

    def progress(self, now: float) -> None:
        """Restart the state's time: the service is working on the transfer."""
        if self.deadline is not None:
            self.deadline = now + self.timings.of(self.state)
