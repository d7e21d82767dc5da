"""The table of a routed request's states: each event that can come in a state is decided, and no other."""

from __future__ import annotations

import json
from itertools import product

import pytest

from foreword.api.dialects.answer_reader import EventParser, ServerSentEvent
from foreword.api.dialects.decode import Limits
from foreword.router.replica_body import parse_request
from foreword.router.response_stream import NotReproduced, ResponseStream
from foreword.router.stream_states import (
    BEHIND_HEAD,
    FIRST,
    TABLE,
    TELLS,
    StreamAction,
    StreamEvent,
    StreamMachine,
    StreamState,
)

# Events come until the state is left, while the action that tells them is performed.
_CONTINUE = frozenset((StreamEvent.OUTPUT, StreamEvent.FINISH))


def reached() -> dict[tuple[StreamState, StreamEvent], set[tuple[StreamAction, ...]]]:
    """Each pair of a state and an event that can come there, with the actions that may be performed then: found by following
    all events that the performed actions can tell."""
    found: dict[tuple[StreamState, StreamEvent], set[tuple[StreamAction, ...]]] = {}
    waiting = [(FIRST.state, FIRST.actions)]
    seen = set(waiting)
    while waiting:
        state, actions = waiting.pop()
        for told in {event for action in actions for event in TELLS.get(action, ())}:
            found.setdefault((state, told), set()).add(actions)
            transition = TABLE.get((state, told))
            if transition is None:
                continue
            # Output and finish reasons do not end what is performed.
            entered = (transition.state, actions if told in _CONTINUE else transition.actions)
            if entered not in seen:
                seen.add(entered)
                waiting.append(entered)
    return found


def test_every_event_is_decided() -> None:
    """A transition exists for exactly those pairs of a state and an event that can come; the others are unreachable."""
    pairs = reached()
    for state, event in product(StreamState, StreamEvent):
        assert ((state, event) in TABLE) == ((state, event) in pairs), (state, event)
    assert {state for state, _ in pairs} == set(StreamState) - {StreamState.ENDED}
    assert {event for _, event in pairs} == set(StreamEvent)


@pytest.mark.parametrize("headed", [False, True])
def test_every_action_tells_what_is_next_or_the_request_has_ended(headed: bool) -> None:
    """A transition that does not end the request has exactly one action that tells the next event, as its last one; only output
    and finish reasons, which come while events are forwarded, have none. One that ends it has none that waits for more."""
    used = set(FIRST.actions)
    for (state, event), transition in TABLE.items():
        machine = StreamMachine()
        machine.state = state
        actions = machine.handle(event, headed=headed)
        used |= set(actions)
        telling = [action for action in actions if action in TELLS]
        if transition.state is StreamState.ENDED:
            assert not telling, (state, event)
        elif event in _CONTINUE:
            assert not telling and set(actions) <= {StreamAction.NOTE_OUTPUT}
        else:
            assert telling[-1:] == [actions[-1]] and set(telling[:-1]) <= {StreamAction.FOLLOW}, (state, event)
        # A status is for clients without a head, an event for the others.
        assert not set(actions) & set(BEHIND_HEAD if headed else BEHIND_HEAD.values())
    assert used | (set(BEHIND_HEAD) if headed else set(BEHIND_HEAD.values())) == set(StreamAction)


def test_a_client_gets_one_end() -> None:
    """Every way through the table ends, and gives its client one thing: an answer, an error, an end, or nothing if it left."""
    ends = (StreamAction.GIVE_ANSWER, StreamAction.GIVE_ERROR, StreamAction.CLOSE)
    for (state, event), transition in TABLE.items():
        given = [action for action in transition.actions if action in ends]
        expected = transition.state is StreamState.ENDED and event is not StreamEvent.LEFT
        assert len(given) == expected and given == list(transition.actions[-1:] if given else ()), (state, event)
    # From each state the end can be reached.
    alive = {StreamState.ENDED}
    while more := {state for (state, _), one in TABLE.items() if one.state in alive} - alive:
        alive |= more
    assert alive == set(StreamState)


def test_output_is_never_computed_anew() -> None:
    """Once a replica's output was noted, no way leads to a state in which another replica begins again, or in which a refusal
    is an answer."""
    after = {TABLE[StreamState.OPEN, StreamEvent.OUTPUT].state}
    while more := {one.state for (state, _), one in TABLE.items() if state in after} - after:
        after |= more
    assert not after & {StreamState.PLACING, StreamState.ASKED, StreamState.OPEN, StreamState.LOST}
    for (state, _), transition in TABLE.items():
        if state in after:
            assert not {StreamAction.RESTART, StreamAction.GIVE_ANSWER} & set(transition.actions), state


def test_each_attempt_is_ended_once() -> None:
    """A way from the request at one replica to the next one, or to the end, ends the attempt there with one action."""
    at_replica = {
        StreamState.ASKED,
        StreamState.OPEN,
        StreamState.STREAMING,
        StreamState.FINISHED,
        StreamState.ASKED_REST,
    }
    # A whole answer, and a replica that is passed over, end it themselves.
    ended_by_asking = {StreamEvent.ANSWERED, StreamEvent.ELSEWHERE}
    ending = {StreamAction.JUDGE, StreamAction.SUCCEED, StreamAction.RELEASE, StreamAction.LEAVE}
    for (state, event), transition in TABLE.items():
        leaves = state in at_replica and transition.state not in at_replica
        done = [action for action in transition.actions if action in ending]
        if event in ended_by_asking:
            assert done in ([], [StreamAction.JUDGE])
        else:
            assert len(done) == leaves, (state, event)


def test_other_tokens_end_what_is_repeated() -> None:
    """A replica that repeats choices and draws another token than the client has raises; one that draws the same does not, and
    the client gets what it does not have."""
    asked = {"prompt": "a", "n": 2, "seed": 3, "stream": True}
    request = parse_request("completions", json.dumps(asked).encode(), Limits())
    for drawn, differs in ((7, False), (8, True)):
        stream = ResponseStream(request)
        stream.next_response("vllm")
        first = [stream.take(chunk(index, [6 + index, 7], "xy", [1, 2])) for index in (0, 1)]
        assert all(first) and stream.can_repeat
        stream.repeat()
        stream.next_response("vllm")
        assert stream.take(chunk(0, [6], "x")) is None
        if differs:
            with pytest.raises(NotReproduced):
                stream.take(chunk(0, [drawn, 9], "yz"))
            continue
        sent = stream.take(chunk(0, [drawn, 9], "yz"))
        assert sent is not None and json.loads(sent[6:])["choices"][0]["text"] == "z"
        assert stream.take(chunk(0, [10], "w")) is not None and stream.choices[0].tokens == [6, 7, 9, 10]


def chunk(index: int, ids: list[int], text: str, prompt: list[int] | None = None) -> ServerSentEvent:
    choice = {"index": index, "text": text, "token_ids": ids, "finish_reason": None, "prompt_token_ids": prompt}
    data = json.dumps({"id": "c", "object": "text_completion", "choices": [choice]}).encode()
    return EventParser().feed(b"data: " + data + b"\n\n")[0]
