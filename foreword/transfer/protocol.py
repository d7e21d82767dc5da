"""The states of a transfer, without I/O: a table from (role, state, event) to what follows.

Time comes from outside: every method gets `now`, seconds of any clock that goes forward. Each state but the last has a
deadline; `tick` must be called when it passes. docs/concepts/transfer.md shows the table as diagrams (`diagram`).

Who owns a request that moves (push). The source owns it until its transfer ends with TAKEN; from FINISHED on it rests, so that
no two sides go on with it. The destination owns it from the moment in which its `TAKE` is accepted here, before the message is
sent. If the source cannot see which of the two it was, it asks (DOUBT); whoever answers "no" has made sure that it stays so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from foreword.errors import ProtocolViolation, TransferError
from foreword.transfer.messages import Reason


class Role(StrEnum):
    PULL_SOURCE = "pull source"  # was asked to compute KV and to send it
    PULL_DESTINATION = "pull destination"  # asked for it
    PUSH_SOURCE = "push source"  # gives a running request away
    PUSH_DESTINATION = "push destination"  # takes it over


class State(StrEnum):
    ASKED = "asked"  # a Want arrived; the service decides
    OFFERED = "offered"  # an Offer was sent
    SENDING = "sending"
    DELIVERED = "delivered"  # everything was sent; rests until the other side has taken it
    DOUBT = "doubt"  # delivered, but no word whether it was taken: ask
    WANTED = "wanted"  # a Want was sent
    CONSIDERED = "considered"  # an Offer arrived; the service decides
    RECEIVING = "receiving"
    COMPLETE = "complete"  # everything arrived and was checked; the service takes it or does not
    ENDED = "ended"


class Event(StrEnum):
    # Ours: commands of the service
    ACCEPT = "accept"
    REFUSE = "refuse"
    SEND = "send"
    FINISH = "finish"
    TAKE = "take"
    CANCEL = "cancel"
    # The peer's: messages, the good and the bad ones told apart
    GOT_ACCEPT = "got Accept"
    GOT_REFUSE = "got Refuse"
    GOT_PART = "got Part"
    GOT_BAD_PART = "got Part that does not fit"
    GOT_WORKING = "got Working"
    GOT_FINISHED = "got Finished"
    GOT_GAPS = "got Finished with gaps"
    GOT_TAKEN = "got Taken"
    GOT_CANCEL = "got Cancel"
    GOT_QUERY = "got Query"
    GOT_YES = "got Answer yes"
    GOT_NO = "got Answer no"
    # The world's
    BROKEN = "connection broke"
    GONE = "peer's process ended"
    DEADLINE = "deadline"


COMMANDS: Final = frozenset({Event.ACCEPT, Event.REFUSE, Event.SEND, Event.FINISH, Event.TAKE, Event.CANCEL})
WORLD: Final = frozenset({Event.BROKEN, Event.GONE, Event.DEADLINE})


class Action(StrEnum):
    """What whoever does the I/O must do, in this order."""

    SEND_ACCEPT = "send Accept"
    SEND_REFUSE = "send Refuse"
    SEND_PART = "send Part"
    SEND_FINISHED = "send Finished"
    SEND_TAKEN = "send Taken"
    SEND_CANCEL = "send Cancel"
    SEND_NO = "send Answer no"
    ASK = "send Query, on a new connection if need be, until answered"
    TELL_ACCEPTED = "tell accepted"
    TELL_PART = "tell part"
    TELL_FINISHED = "tell finished"
    TELL_ENDED = "tell ended"
    REMEMBER = "remember that it was taken"


class Outcome(StrEnum):
    """How a transfer ended: the destination has it, or never will, or (push) nobody can say."""

    TAKEN = "taken"
    NOT_TAKEN = "not taken"
    UNKNOWN = "unknown"


class Limit(StrEnum):
    """Which of the configured times bounds a state. A state that is entered again starts anew."""

    ANSWER = "answer"
    PROGRESS = "progress"
    LEASE = "lease"


LIMITS: Final = {
    State.ASKED: Limit.ANSWER,
    State.OFFERED: Limit.ANSWER,
    State.SENDING: Limit.LEASE,
    State.DELIVERED: Limit.LEASE,
    State.DOUBT: Limit.LEASE,
    State.WANTED: Limit.ANSWER,
    State.CONSIDERED: Limit.ANSWER,
    State.RECEIVING: Limit.PROGRESS,
    State.COMPLETE: Limit.LEASE,
}
# Events that do not start the state's time anew although it stays the same.
_NO_PROGRESS: Final = frozenset({Event.BROKEN, Event.GOT_CANCEL})


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. `answer`: for yes or no. `progress`: between two signs of progress. `lease`: how long blocks are kept for the
    other side without one."""

    answer: float = 10.0
    progress: float = 30.0
    lease: float = 60.0

    def of(self, state: State) -> float:
        return float(getattr(self, LIMITS[state].value))


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows: the next state, what to do, and at the end how it ended and why (None: the event says why)."""

    state: State
    actions: tuple[Action, ...] = ()
    outcome: Outcome | None = None
    reason: Reason | None = None


Rules = Mapping[tuple[State, Event], Rule]


def _stay(state: State, *actions: Action) -> Rule:
    return Rule(state, actions)


def _end(*actions: Action, reason: Reason | None = None, outcome: Outcome = Outcome.NOT_TAKEN) -> Rule:
    return Rule(State.ENDED, (*actions, Action.TELL_ENDED), outcome, reason)


_TAKEN: Final = _end(outcome=Outcome.TAKEN)
_LOST: Final = _end(reason=Reason.LOST)
_EXPIRED: Final = _end(Action.SEND_CANCEL, reason=Reason.DEADLINE)


def _open(*states: State) -> dict[tuple[State, Event], Rule]:
    """What holds in every state in which nothing is decided yet: either side may cancel, deadlines and breaks end it."""
    rules: dict[tuple[State, Event], Rule] = {}
    for state in states:
        rules[state, Event.CANCEL] = _end(Action.SEND_CANCEL)
        rules[state, Event.GOT_CANCEL] = _end()
        rules[state, Event.BROKEN] = _LOST
        rules[state, Event.DEADLINE] = _EXPIRED
    return rules


_SENDING: Final[Rules] = {
    (State.SENDING, Event.SEND): _stay(State.SENDING, Action.SEND_PART),
    (State.SENDING, Event.FINISH): _stay(State.DELIVERED, Action.SEND_FINISHED),
}
_RECEIVING: Final[Rules] = {
    (State.RECEIVING, Event.GOT_PART): _stay(State.RECEIVING, Action.TELL_PART),
    (State.RECEIVING, Event.GOT_BAD_PART): _end(Action.SEND_CANCEL, reason=Reason.CONTENT),
    (State.RECEIVING, Event.GOT_WORKING): _stay(State.RECEIVING),
    (State.RECEIVING, Event.GOT_FINISHED): _stay(State.COMPLETE, Action.TELL_FINISHED),
    (State.RECEIVING, Event.GOT_GAPS): _end(Action.SEND_CANCEL, reason=Reason.GAPS),
}

TABLE: Final[Mapping[Role, Rules]] = {
    Role.PULL_SOURCE: {
        **_open(State.ASKED, State.SENDING, State.DELIVERED),
        (State.ASKED, Event.ACCEPT): _stay(State.SENDING, Action.SEND_ACCEPT),
        (State.ASKED, Event.REFUSE): _end(Action.SEND_REFUSE),
        **_SENDING,
        (State.DELIVERED, Event.GOT_TAKEN): _TAKEN,
    },
    Role.PULL_DESTINATION: {
        **_open(State.WANTED, State.RECEIVING),
        (State.WANTED, Event.GOT_ACCEPT): _stay(State.RECEIVING, Action.TELL_ACCEPTED),
        (State.WANTED, Event.GOT_REFUSE): _end(),
        **_RECEIVING,
        (State.COMPLETE, Event.TAKE): _end(Action.SEND_TAKEN, outcome=Outcome.TAKEN),
        (State.COMPLETE, Event.CANCEL): _end(Action.SEND_CANCEL),
        # All of it is here, and the request was this side's from the start: the source's fate changes nothing.
        (State.COMPLETE, Event.GOT_CANCEL): _stay(State.COMPLETE),
        (State.COMPLETE, Event.BROKEN): _stay(State.COMPLETE),
        (State.COMPLETE, Event.DEADLINE): _EXPIRED,
    },
    Role.PUSH_SOURCE: {
        **_open(State.OFFERED, State.SENDING),
        (State.OFFERED, Event.GOT_ACCEPT): _stay(State.SENDING, Action.TELL_ACCEPTED),
        (State.OFFERED, Event.GOT_REFUSE): _end(),
        **_SENDING,
        # No CANCEL in DELIVERED or DOUBT: the destination may have taken it a moment ago.
        (State.DELIVERED, Event.GOT_TAKEN): _TAKEN,
        (State.DELIVERED, Event.GOT_CANCEL): _end(),
        (State.DELIVERED, Event.BROKEN): _stay(State.DOUBT, Action.ASK),
        (State.DELIVERED, Event.DEADLINE): _stay(State.DOUBT, Action.ASK),
        (State.DOUBT, Event.GOT_YES): _TAKEN,
        (State.DOUBT, Event.GOT_NO): _end(reason=Reason.LOST),
        (State.DOUBT, Event.GOT_TAKEN): _TAKEN,
        (State.DOUBT, Event.GOT_CANCEL): _end(),
        (State.DOUBT, Event.GONE): _end(reason=Reason.LOST),
        (State.DOUBT, Event.BROKEN): _stay(State.DOUBT),
        (State.DOUBT, Event.DEADLINE): _end(reason=Reason.UNKNOWN, outcome=Outcome.UNKNOWN),
    },
    Role.PUSH_DESTINATION: {
        **_open(State.CONSIDERED, State.RECEIVING, State.COMPLETE),
        (State.CONSIDERED, Event.ACCEPT): _stay(State.RECEIVING, Action.SEND_ACCEPT),
        (State.CONSIDERED, Event.REFUSE): _end(Action.SEND_REFUSE),
        **_RECEIVING,
        (State.COMPLETE, Event.TAKE): _end(Action.REMEMBER, Action.SEND_TAKEN, outcome=Outcome.TAKEN),
        # The question comes on a new connection before this side has seen that the old one broke, or after the source's lease.
        (State.RECEIVING, Event.GOT_QUERY): _end(Action.SEND_NO, reason=Reason.LOST),
        (State.COMPLETE, Event.GOT_QUERY): _end(Action.SEND_NO, reason=Reason.LOST),
    },
}
FIRST: Final = {
    Role.PULL_SOURCE: State.ASKED,
    Role.PULL_DESTINATION: State.WANTED,
    Role.PUSH_SOURCE: State.OFFERED,
    Role.PUSH_DESTINATION: State.CONSIDERED,
}
assert all((State.COMPLETE, Event.GOT_CANCEL) in rules for role, rules in TABLE.items() if "destination" in role)


class Transfer:
    """One side of one transfer. Not thread-safe: whoever holds it calls one method at a time.

    Attributes:
        state, deadline: of now; no deadline once it has ended.
        outcome, reason, message: how and why it ended; the reason is None for a transfer that was taken.
    """

    __slots__ = ("deadline", "message", "outcome", "reason", "role", "state", "timings")

    def __init__(self, role: Role, timings: Timings, now: float) -> None:
        self.role = role
        self.timings = timings
        self.state = FIRST[role]
        self.deadline: float | None = now + timings.of(self.state)
        self.outcome: Outcome | None = None
        self.reason: Reason | None = None
        self.message = ""

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    @property
    def owner(self) -> bool:
        """Whether this side owns the request: it may go on with it, or will when it hears that the other side did not."""
        if self.role is Role.PUSH_SOURCE:
            return self.outcome in (None, Outcome.NOT_TAKEN)
        if self.role is Role.PUSH_DESTINATION:
            return self.outcome is Outcome.TAKEN
        return self.role is Role.PULL_DESTINATION

    def handle(self, event: Event, now: float, reason: Reason | None = None, message: str = "") -> tuple[Action, ...]:
        """What follows from an event. `reason` and `message` say why, where the event ends the transfer.

        Messages that arrive after the end crossed it on the way and mean nothing; so do cancels.
        Raises ProtocolViolation for a message that the peer may not send now; TransferError for a command that cannot be
        followed now, with the transfer's reason if it has ended.
        """
        rule = TABLE[self.role].get((self.state, event))
        if rule is None:
            return self._no_rule(event)
        if rule.state is State.ENDED:
            self.outcome = rule.outcome
            self.reason = None if rule.outcome is Outcome.TAKEN else rule.reason or reason or Reason.CANCELLED
            self.message = message or str(event)
            self.deadline = None
        elif rule.state is not self.state or event not in _NO_PROGRESS:
            self.deadline = now + self.timings.of(rule.state)
        self.state = rule.state
        return rule.actions

    def _no_rule(self, event: Event) -> tuple[Action, ...]:
        if event in WORLD or (self.ended and event not in COMMANDS) or event is Event.CANCEL:
            return ()
        if event in COMMANDS:
            why = f" ({self.reason}: {self.message})" if self.reason else ""
            text = f"cannot {event}: this {self.role}'s transfer is {self.state}{why}"
            raise TransferError(text, reason=str(self.reason or Reason.FAILED))
        raise ProtocolViolation(f"the peer of a {self.role} sent what it may not: {event} while {self.state}")

    def tick(self, now: float) -> tuple[Action, ...]:
        """To be called when `deadline` may have passed."""
        if self.deadline is None or now < self.deadline:
            return ()
        limit = LIMITS[self.state]
        text = f"{self.state} for longer than {self.timings.of(self.state):g} s ({limit})"
        return self.handle(Event.DEADLINE, now, Reason.DEADLINE, text)

    def progress(self, now: float) -> None:
        """The service is at work on it: the state's time starts anew."""
        if self.deadline is not None:
            self.deadline = now + self.timings.of(self.state)


def diagram(role: Role) -> str:
    """The table of one role as a Mermaid state diagram."""
    return "\n".join(["stateDiagram-v2", f"    [*] --> {FIRST[role]}", *_arrows(role), "    ended --> [*]"])


def _arrows(role: Role) -> Iterator[str]:
    """One arrow per pair of states, with every event that leads along it."""
    labels: dict[tuple[State, State], list[str]] = {}
    for (state, event), rule in TABLE[role].items():
        done = ", ".join(action for action in rule.actions if action.startswith(("send", "tell p", "remember")))
        how = f" → {done}" if done else ""
        labels.setdefault((state, rule.state), []).append(f"{event}{how}")
    for (before, after), events in labels.items():
        yield f"    {before} --> {after}: {'<br/>'.join(events)}"


if __name__ == "__main__":
    for one in Role:
        print(f"### {one}\n\n```mermaid\n{diagram(one)}\n```\n")
