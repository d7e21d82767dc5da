"""The states of one routed request, without I/O: a table from (state, event) to the next state and actions.

`response_proxy` performs the actions. The last of them tells the next event. Who has the request, and what the client has of
its response, follows from the state alone; what is in the response is `response_stream`'s.

    PLACING ─ placed ─▶ ASKED ─ head ─▶ OPEN ─ output ─▶ STREAMING ─ finish ─▶ FINISHED ─ complete ─▶ ENDED
       ▲                  │ breaks        │ breaks            │ breaks                │ breaks
       └────── LOST ◀─────┴───────────────┘                BROKEN ─▶ PLANNING     LOST_LATE ─ the rest is known ─▶ ENDED
                                                                        │ continues
                                     STREAMING ◀─ head ─ ASKED_REST ◀─ PLACING_REST
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class StreamState(StrEnum):
    PLACING = "placing"  # no replica has it; no output came so far
    ASKED = "asked"  # a replica has it and has not begun to answer
    OPEN = "open"  # a replica's stream is open, without output
    STREAMING = "streaming"  # output came, and was sent
    FINISHED = "finished"  # the finish reasons were sent; the end of the stream was not
    LOST = "lost"  # the replica was lost before any output
    BROKEN = "broken"  # the replica was lost behind output
    LOST_LATE = "lost late"  # the replica was lost behind the finish reasons
    PLANNING = "planning"  # looks for a way to continue on another replica
    PLACING_REST = "placing the rest"  # waits for a replica that continues
    ASKED_REST = "asked for the rest"  # a replica was asked to continue
    ENDED = "ended"


class StreamEvent(StrEnum):
    PLACED = "placed"
    UNPLACED = "no replica takes it"
    HEAD = "head of a stream"
    ANSWERED = "whole answer"  # an error that is the client's, too
    ELSEWHERE = "another replica is asked"  # this one refused or was overloaded, and is not at fault
    OUTPUT = "first output of this replica"
    FINISH = "last finish reason"
    COMPLETE = "end of the stream"
    MOVED = "migrated"
    BREAKS = "replica lost"
    AGAIN = "another attempt is allowed"
    NO_MORE = "no other attempt is allowed"
    CONTINUES = "another replica can continue"
    WHOLE = "nothing is missing"  # what the client did not have was sent
    STUCK = "no other replica can continue"
    FATAL = "the request ends with an error"
    LEFT = "client left"  # or the deadline passed


class StreamAction(StrEnum):
    """An action of the caller. The last one of a transition tells the next event, unless the request has ended."""

    PLACE = "place"
    ASK = "send the request to the replica"
    RELAY = "forward the replica's events"
    FOLLOW = "open the stream where it migrated to"
    NOTE_OUTPUT = "note the replica's first output"
    JUDGE = "note the loss; find out whether another attempt is allowed"
    RESTART = "forget what the lost replica has begun"
    PLAN = "find out how another replica can continue"
    NOTE_CONTINUED = "count the continuation"
    SUCCEED = "note the replica's success"
    RELEASE = "end the attempt"
    LEAVE = "end the attempt, whose client has left"
    SEND_REST = "send the end that is missing"
    CLOSE = "end the client's stream"
    # The next state depends on whether the client has a head.
    GIVE_ANSWER = "give the client the whole answer"
    GIVE_ERROR = "give the client the error"
    SEND_ANSWER = "send the answer's error as an event"
    SEND_ERROR = "send the error as an event"


# Behind a head there is no status any more: answers and errors are events.
BEHIND_HEAD: Final[Mapping[StreamAction, StreamAction]] = {
    StreamAction.GIVE_ANSWER: StreamAction.SEND_ANSWER,
    StreamAction.GIVE_ERROR: StreamAction.SEND_ERROR,
}


@dataclass(frozen=True, slots=True)
class StreamTransition:
    """The next state, and the actions in their order: `headed`, where the client has a head."""

    state: StreamState
    actions: tuple[StreamAction, ...] = ()
    headed: tuple[StreamAction, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "headed", tuple(BEHIND_HEAD.get(action, action) for action in self.actions))


_S, _E, _A = StreamState, StreamEvent, StreamAction
_FAIL: Final = StreamTransition(_S.ENDED, (_A.GIVE_ERROR,))
_PLACE_AGAIN: Final = StreamTransition(_S.PLACING, (_A.RESTART, _A.PLACE))
_WELL: Final = StreamTransition(_S.ENDED, (_A.SUCCEED, _A.CLOSE))
_REST_SENT: Final = StreamTransition(_S.ENDED, (_A.SEND_REST, _A.CLOSE))


def _at_replica(*states: StreamState) -> dict[tuple[StreamState, StreamEvent], StreamTransition]:
    """A replica has the request: it can be over at any time."""
    found: dict[tuple[StreamState, StreamEvent], StreamTransition] = {}
    for state in states:
        found[state, _E.FATAL] = StreamTransition(_S.ENDED, (_A.RELEASE, _A.GIVE_ERROR))
        found[state, _E.LEFT] = StreamTransition(_S.ENDED, (_A.LEAVE,))
    return found


def _elsewhere(*states: StreamState) -> dict[tuple[StreamState, StreamEvent], StreamTransition]:
    """No replica has the request."""
    return {(state, _E.LEFT): StreamTransition(_S.ENDED) for state in states}


def _relayed(*states: StreamState) -> dict[tuple[StreamState, StreamEvent], StreamTransition]:
    """Events of a replica are forwarded. A whole stream may lack output, a finish reason in a dialect that is passed on, or
    both."""
    found: dict[tuple[StreamState, StreamEvent], StreamTransition] = {}
    for state in states:
        found[state, _E.COMPLETE] = _WELL
        found[state, _E.MOVED] = StreamTransition(state, (_A.FOLLOW, _A.RELAY))
    return found


TABLE: Final[Mapping[tuple[StreamState, StreamEvent], StreamTransition]] = {
    **_elsewhere(_S.PLACING, _S.LOST, _S.BROKEN, _S.LOST_LATE, _S.PLANNING, _S.PLACING_REST),
    **_at_replica(_S.ASKED, _S.OPEN, _S.STREAMING, _S.FINISHED, _S.ASKED_REST),
    **_relayed(_S.OPEN, _S.STREAMING, _S.FINISHED),
    (_S.PLACING, _E.PLACED): StreamTransition(_S.ASKED, (_A.ASK,)),
    (_S.PLACING, _E.UNPLACED): _FAIL,
    (_S.ASKED, _E.HEAD): StreamTransition(_S.OPEN, (_A.RELAY,)),
    (_S.ASKED, _E.ANSWERED): StreamTransition(_S.ENDED, (_A.GIVE_ANSWER,)),
    (_S.ASKED, _E.ELSEWHERE): StreamTransition(_S.PLACING, (_A.PLACE,)),
    (_S.ASKED, _E.BREAKS): StreamTransition(_S.LOST, (_A.JUDGE,)),
    (_S.OPEN, _E.OUTPUT): StreamTransition(_S.STREAMING, (_A.NOTE_OUTPUT,)),
    (_S.OPEN, _E.FINISH): StreamTransition(_S.FINISHED),
    (_S.OPEN, _E.BREAKS): StreamTransition(_S.LOST, (_A.JUDGE,)),
    (_S.LOST, _E.AGAIN): _PLACE_AGAIN,
    (_S.LOST, _E.NO_MORE): _FAIL,
    (_S.STREAMING, _E.OUTPUT): StreamTransition(_S.STREAMING, (_A.NOTE_OUTPUT,)),
    (_S.STREAMING, _E.FINISH): StreamTransition(_S.FINISHED),
    (_S.STREAMING, _E.BREAKS): StreamTransition(_S.BROKEN, (_A.JUDGE,)),
    (_S.BROKEN, _E.AGAIN): StreamTransition(_S.PLANNING, (_A.PLAN,)),
    (_S.BROKEN, _E.NO_MORE): _FAIL,
    # A replica may send output behind a finish reason.
    (_S.FINISHED, _E.OUTPUT): StreamTransition(_S.FINISHED, (_A.NOTE_OUTPUT,)),
    (_S.FINISHED, _E.FINISH): StreamTransition(_S.FINISHED),
    (_S.FINISHED, _E.BREAKS): StreamTransition(_S.LOST_LATE, (_A.JUDGE,)),
    # The client has all but the end, which needs no replica.
    (_S.LOST_LATE, _E.AGAIN): _REST_SENT,
    (_S.LOST_LATE, _E.NO_MORE): _REST_SENT,
    (_S.PLANNING, _E.CONTINUES): StreamTransition(_S.PLACING_REST, (_A.PLACE,)),
    (_S.PLANNING, _E.WHOLE): StreamTransition(_S.ENDED, (_A.CLOSE,)),
    (_S.PLANNING, _E.STUCK): _FAIL,
    (_S.PLACING_REST, _E.PLACED): StreamTransition(_S.ASKED_REST, (_A.ASK,)),
    (_S.PLACING_REST, _E.UNPLACED): _FAIL,
    (_S.ASKED_REST, _E.HEAD): StreamTransition(_S.STREAMING, (_A.NOTE_CONTINUED, _A.RELAY)),
    # A refusal of the rest is no answer for the client, who has the first part.
    (_S.ASKED_REST, _E.ANSWERED): StreamTransition(_S.BROKEN, (_A.JUDGE,)),
    (_S.ASKED_REST, _E.ELSEWHERE): StreamTransition(_S.PLACING_REST, (_A.PLACE,)),
    (_S.ASKED_REST, _E.BREAKS): StreamTransition(_S.BROKEN, (_A.JUDGE,)),
}
FIRST: Final = StreamTransition(_S.PLACING, (_A.PLACE,))
# The events that an action can tell. Output and finish reasons come while events are forwarded.
TELLS: Final[Mapping[StreamAction, frozenset[StreamEvent]]] = {
    _A.PLACE: frozenset((_E.PLACED, _E.UNPLACED, _E.LEFT)),
    _A.ASK: frozenset((_E.HEAD, _E.ANSWERED, _E.ELSEWHERE, _E.BREAKS, _E.FATAL, _E.LEFT)),
    _A.RELAY: frozenset((_E.OUTPUT, _E.FINISH, _E.COMPLETE, _E.MOVED, _E.BREAKS, _E.FATAL, _E.LEFT)),
    _A.FOLLOW: frozenset((_E.BREAKS, _E.LEFT)),
    _A.JUDGE: frozenset((_E.AGAIN, _E.NO_MORE, _E.LEFT)),
    _A.PLAN: frozenset((_E.CONTINUES, _E.WHOLE, _E.STUCK, _E.LEFT)),
}


class StreamMachine:
    """The state of one request, on one event loop."""

    def __init__(self) -> None:
        self.state = FIRST.state

    @property
    def ended(self) -> bool:
        return self.state is StreamState.ENDED

    def handle(self, event: StreamEvent, *, headed: bool) -> tuple[StreamAction, ...]:
        """The actions after an event. `headed`: the client has a head, so no status can follow. Raises KeyError for an event
        that cannot come in this state."""
        transition = TABLE[self.state, event]
        self.state = transition.state
        return transition.headed if headed else transition.actions
