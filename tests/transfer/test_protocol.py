"""The table of states: its properties, and two sides over a channel that breaks, with crashes."""

from collections import deque
from pathlib import Path

import pytest
from diagrams import diagram
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foreword.transfer.errors import ProtocolViolation, TransferError
from foreword.transfer.protocol import (
    COMMANDS,
    EXTERNAL,
    FIRST,
    TABLE,
    Action,
    Role,
    State,
    Timings,
    Transfer,
    TransferEvent,
    TransferOutcome,
)
from foreword.transfer.wire_format import Reason

DOCS = Path(__file__).parents[2] / "dev" / "concepts" / "transfer.md"
TIMES = Timings(answer=10, progress=30, lease=60)
# More than any path of deadlines takes, in steps of two seconds.
LONGEST = 10 + 30 + 4 * 60
SENT = {
    Action.SEND_ACCEPT: TransferEvent.GOT_ACCEPT,
    Action.SEND_REFUSE: TransferEvent.GOT_REFUSE,
    Action.SEND_PART: TransferEvent.GOT_PART,
    Action.SEND_FINISHED: TransferEvent.GOT_FINISHED,
    Action.SEND_TAKEN: TransferEvent.GOT_TAKEN,
    Action.SEND_CANCEL: TransferEvent.GOT_CANCEL,
    Action.SEND_NO: TransferEvent.GOT_NO,
}


def owns(side: Transfer) -> bool:
    """Whether this side owns the request, or will own it when it learns that the other side did not take it."""
    if side.role is Role.PUSH_SOURCE:
        return side.outcome in (None, TransferOutcome.NOT_TAKEN)
    if side.role is Role.PUSH_DESTINATION:
        return side.outcome is TransferOutcome.TAKEN
    return side.role is Role.PULL_DESTINATION


@pytest.mark.parametrize("role", Role)
def test_every_state_has_a_way_out(role: Role) -> None:
    """Every reachable state has a deadline with a transition, and deadlines alone lead to the end."""
    reached, todo = set(), [FIRST[role]]
    while todo:
        state = todo.pop()
        reached.add(state)
        todo += [
            rule.state for (before, _), rule in TABLE[role].items() if before is state and rule.state not in reached
        ]
    assert reached == {state for state, _ in TABLE[role]} | {State.ENDED}
    for state in reached - {State.ENDED}:
        seen = {state}
        while state is not State.ENDED:
            state = TABLE[role][state, TransferEvent.DEADLINE].state
            assert state not in seen, "deadlines lead to the end"
            seen.add(state)


@pytest.mark.parametrize("role", Role)
def test_the_end_is_notified_once(role: Role) -> None:
    """Every transition to the end notifies the service and has an outcome; no other transition does."""
    for ways in TABLE[role].values():
        assert (Action.NOTIFY_ENDED in ways.actions) == (ways.state is State.ENDED) == (ways.outcome is not None)
        assert ways.actions.count(Action.NOTIFY_ENDED) <= 1


@pytest.mark.parametrize("role", Role)
def test_messages_that_are_not_allowed(role: Role) -> None:
    """A message without a transition is a ProtocolViolation, or ignored after the end; a command is a TransferError."""
    for state in {state for state, _ in TABLE[role]} | {State.ENDED}:
        for event in TransferEvent:
            side = Transfer(role, TIMES, 0.0)
            side.state = state
            if (state, event) in TABLE[role] or event in EXTERNAL or event is TransferEvent.CANCEL:
                continue
            if event in COMMANDS:
                with pytest.raises(TransferError):
                    side.handle(event, 1.0)
            elif state is State.ENDED:
                assert side.handle(event, 1.0) == ()
            else:
                with pytest.raises(ProtocolViolation):
                    side.handle(event, 1.0)


@pytest.mark.parametrize("role", Role)
def test_the_docs_show_the_table(role: Role) -> None:
    """dev/concepts/transfer.md shows this role's diagram as it is drawn from the table."""
    assert f"```mermaid\n{diagram(role)}\n```" in DOCS.read_text(encoding="utf-8")


def test_reasons_survive() -> None:
    """The reason of the end is kept, and a command after the end raises an error with it."""
    side = Transfer(Role.PUSH_SOURCE, TIMES, 0.0)
    side.handle(TransferEvent.GOT_REFUSE, 1.0, Reason.FULL, "no room for 12 blocks")
    assert (side.outcome, side.reason, side.message) == (
        TransferOutcome.NOT_TAKEN,
        Reason.FULL,
        "no room for 12 blocks",
    )
    with pytest.raises(TransferError, match="no room for 12 blocks") as raised:
        side.handle(TransferEvent.SEND, 2.0)
    assert raised.value.reason == "full"


@pytest.mark.parametrize("state", [State.RECEIVING, State.COMPLETE])
def test_the_answer_no_is_binding(state: State) -> None:
    """A destination that has answered "not taken" cannot take the request any more."""
    side = Transfer(Role.PUSH_DESTINATION, TIMES, 0.0)
    side.state = state
    assert Action.SEND_NO in side.handle(TransferEvent.GOT_QUERY, 1.0)
    with pytest.raises(TransferError):
        side.handle(TransferEvent.TAKE, 2.0)
    assert not owns(side)


class TwoSides(RuleBasedStateMachine):
    """Source and destination, an ordered channel that may break, and clocks.

    A broken channel delivers some of what was on the way, then says so to each side, at its own time. Questions go over a
    channel of their own and may be lost. A side that crashed is gone with all it knew.
    """

    @initialize(
        push=st.sampled_from([True, True, False]),
        ahead=st.sampled_from([6, 5, 4, 0, 1, 2, 3, 7]),
        lost=st.sampled_from([None, 1, 0]),
        noticed=st.booleans(),
        reachable=st.booleans(),
    )
    def begin(self, push: bool, ahead: int, lost: int | None, noticed: bool, reachable: bool) -> None:
        """Start in an advanced state, perhaps with a connection that has just broken: most runs would not get that far."""
        self.push = push
        self.now = 0.0
        self.source = Transfer(Role.PUSH_SOURCE if push else Role.PULL_SOURCE, TIMES, 0.0)
        self.destination = Transfer(Role.PUSH_DESTINATION if push else Role.PULL_DESTINATION, TIMES, 0.0)
        self.to: dict[str, deque[TransferEvent]] = {"source": deque(), "destination": deque()}
        self.questions: deque[str] = deque()
        self.crashed: set[str] = set()
        self.broken = False
        self.reachable = reachable
        self.cut_off = False
        self.remembered = False
        self.told: dict[str, int] = {"source": 0, "destination": 0}
        self.asking = False
        self.opening = "destination" if push else "source"
        way = [
            (self.opening, TransferEvent.ACCEPT),
            None,
            ("source", TransferEvent.SEND),
            ("source", TransferEvent.FINISH),
            None,
            ("destination", TransferEvent.TAKE),
            None,
        ]
        for step in way[:ahead]:
            if step is not None:
                self.command(*step)
            else:
                self.deliver("source", 4)
                self.deliver("destination", 4)
        if lost is not None:
            self.cut(lost=lost, other=0)
            if noticed:
                self.deliver("source", 4)

    def side(self, name: str) -> Transfer:
        return self.source if name == "source" else self.destination

    def handle(self, name: str, event: TransferEvent) -> None:
        if name not in self.crashed:
            self.follow(name, self.side(name).handle(event, self.now))

    def follow(self, name: str, actions: tuple[Action, ...]) -> None:
        other = "destination" if name == "source" else "source"
        for action in actions:
            if action is Action.SEND_NO:
                self.questions.append("no")
            elif action in SENT and not self.broken:
                self.to[other].append(SENT[action])
            self.told[name] += action is Action.NOTIFY_ENDED
            self.asking |= action is Action.ASK
            self.remembered |= action is Action.REMEMBER

    @rule(data=st.data())
    def a_command(self, data: st.DataObject) -> None:
        """The service gives a command that is possible now."""
        able = [
            (name, event)
            for name in ("source", "destination")
            for state, event in TABLE[self.side(name).role]
            if event in COMMANDS and state is self.side(name).state
        ]
        if able:
            self.command(*data.draw(st.sampled_from(able)))

    def command(self, name: str, event: TransferEvent) -> None:
        if (self.side(name).state, event) in TABLE[self.side(name).role]:
            self.handle(name, event)

    @rule(first=st.sampled_from(["source", "destination"]), count=st.integers(1, 4))
    def a_delivery(self, first: str, count: int) -> None:
        """Some messages on the way to one side arrive; to the other side if there are none."""
        other = "destination" if first == "source" else "source"
        self.deliver(first if self.to[first] else other, count)

    def deliver(self, name: str, count: int) -> None:
        for _ in range(min(count, len(self.to[name]))):
            self.handle(name, self.to[name].popleft())

    @rule(spoiled=st.sampled_from([TransferEvent.GOT_BAD_PART, TransferEvent.GOT_GAPS]))
    def spoil(self, spoiled: TransferEvent) -> None:
        """A bad part arrives, or parts are missing at the end."""
        wanted = TransferEvent.GOT_PART if spoiled is TransferEvent.GOT_BAD_PART else TransferEvent.GOT_FINISHED
        queue = self.to["destination"]
        if queue and queue[0] is wanted:
            queue[0] = spoiled

    @precondition(lambda self: not self.broken)
    @rule(lost=st.integers(0, 5), other=st.integers(0, 5))
    def cut(self, lost: int, other: int) -> None:
        """The connection breaks; the last messages of either direction are lost."""
        self.broken = True
        for queue, count in ((self.to["source"], lost), (self.to["destination"], other)):
            for _ in range(min(count, len(queue))):
                queue.pop()
            queue.append(TransferEvent.BROKEN)

    @precondition(lambda self: not self.crashed)
    @rule(name=st.sampled_from(["source", "destination"]), seldom=st.integers(0, 5))
    def crash(self, name: str, seldom: int) -> None:
        """kill -9; the other side's connection breaks."""
        if seldom != 5:
            return
        self.crashed.add(name)
        other = "destination" if name == "source" else "source"
        if not self.broken:
            self.broken = True
            self.to[other].append(TransferEvent.BROKEN)

    @rule(reachable=st.booleans())
    def partition(self, reachable: bool) -> None:
        """Whether new connections are possible."""
        self.reachable = reachable

    @precondition(lambda self: self.asking and self.source.state is State.DOUBT)
    @rule()
    def ask(self) -> None:
        """The source asks, as it does every half second."""
        if not self.reachable or "source" in self.crashed:
            return
        if "destination" in self.crashed:
            self.handle("source", TransferEvent.GONE)
        elif self.remembered:
            self.questions.append("yes")
        elif self.destination.ended:
            self.questions.append("no")
        else:
            self.handle("destination", TransferEvent.GOT_QUERY)

    @rule(lost=st.booleans())
    def answer(self, lost: bool) -> None:
        if self.questions:
            answer = self.questions.popleft()
            if not lost:
                self.handle("source", TransferEvent.GOT_YES if answer == "yes" else TransferEvent.GOT_NO)

    @rule(seconds=st.floats(0.1, 40))
    def pass_time(self, seconds: float) -> None:
        """Time passes; the source asks if it is in doubt and the other side can be reached."""
        if self.asking and self.source.state is State.DOUBT and "source" not in self.crashed:
            self.cut_off |= not self.reachable
            self.ask()
            while self.questions:
                self.answer(False)
        self.now += seconds
        self.ticks()

    def ticks(self) -> None:
        for name in ("source", "destination"):
            if name not in self.crashed:
                self.follow(name, self.side(name).tick(self.now))

    @invariant()
    def at_most_one_goes_on(self) -> None:
        """A pushed request is never decoded on both sides, nor at the source while the other side may own it."""
        if not hasattr(self, "push") or not self.push:
            return
        source_goes_on = "source" not in self.crashed and (
            self.source.outcome is TransferOutcome.NOT_TAKEN or self.source.state in (State.OFFERED, State.SENDING)
        )
        destination_goes_on = "destination" not in self.crashed and self.destination.outcome is TransferOutcome.TAKEN
        assert not (source_goes_on and destination_goes_on)
        if not self.crashed:
            assert owns(self.source) or owns(self.destination) or self.source.outcome is TransferOutcome.UNKNOWN

    @invariant()
    def no_lease_outlives_its_deadline(self) -> None:
        """After each tick a transfer that has not ended has a later deadline."""
        for name in ("source", "destination"):
            if hasattr(self, "push") and name not in self.crashed:
                side = self.side(name)
                assert (side.deadline is None) == side.ended
                assert side.deadline is None or side.deadline > self.now
                assert self.told[name] == side.ended, "the end is told exactly once"

    def teardown(self) -> None:
        """Both sides end without help, and agree on the outcome unless one of them could not be reached."""
        if not hasattr(self, "push"):
            return
        for _ in range(LONGEST):
            while self.questions:
                self.answer(False)
            if all(name in self.crashed or self.side(name).ended for name in self.told):
                break
            for name in ("source", "destination"):
                self.deliver(name, 100)
            self.pass_time(2.0)
            self.at_most_one_goes_on()
        for name in ("source", "destination"):
            assert name in self.crashed or self.side(name).ended
        if self.crashed:
            return
        if self.source.outcome is TransferOutcome.UNKNOWN:
            assert self.push and self.cut_off
        elif self.push:
            assert (self.source.outcome is TransferOutcome.TAKEN) == (self.destination.outcome is TransferOutcome.TAKEN)


TestTwoSides = TwoSides.TestCase
TestTwoSides.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


@pytest.mark.slow
class TestTwoSidesLong(TwoSides.TestCase):  # type: ignore[name-defined]
    """Many more runs of the two sides."""

    settings = settings(max_examples=1000, stateful_step_count=20, deadline=None)
