"""Estimates of what a replica holds, against a list in order of use."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import ConfigError
from foreword.routing.estimated_directory import Accuracy, Estimate, InFlight

Path = tuple[int, ...]
paths = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


def keys_of(path: Path) -> list[bytes]:
    return [sha256(bytes(path[: i + 1])).digest() for i in range(len(path))]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20), st.lists(paths, max_size=30), paths)
def test_a_replica_keeps_what_was_used_last(capacity: int, sent: list[Path], asked: Path) -> None:
    """An estimate is a list of blocks in order of use, of which the last `capacity` stay; a prompt's head is used last."""
    estimate = Estimate(capacity)
    order: list[Path] = []
    for path in sent:
        estimate.sent(keys_of(path))
        for end in range(len(path), 0, -1):
            if path[:end] in order:
                order.remove(path[:end])
            order.append(path[:end])
        order = order[-capacity:]
    assert len(estimate) == len(order) <= capacity
    expected = next((i for i in range(len(asked)) if asked[: i + 1] not in order), len(asked))
    assert estimate.leading(keys_of(asked)) == expected


def test_an_answer_that_found_less_shrinks_the_belief() -> None:
    """If answers keep finding less than was expected, fewer blocks are believed to stay; if they find it, more again."""
    estimate = Estimate(1000)
    keys = [sha256(i.to_bytes(2, "big")).digest() for i in range(1000)]
    estimate.sent(keys)
    assert estimate.leading(keys) == 1000
    for _ in range(20):
        estimate.answered(keys[:10], expected=10, actual=2)
    assert 300 < estimate.limit < 400
    assert len(estimate) == estimate.limit
    assert estimate.leading(keys[:10]) == 10, "the prompt itself was computed there just now"
    shrunk = estimate.limit
    for _ in range(200):
        estimate.answered(keys[:10], expected=10, actual=10)
    assert estimate.limit == 1000 > shrunk


def test_a_replica_that_finds_more_has_more_room() -> None:
    """Whose answers find what should have left the device long ago has tiers below it: more is believed to stay, within bounds,
    and what is sent from then on is remembered as long."""
    estimate = Estimate(100)
    keys = [sha256(i.to_bytes(2, "big")).digest() for i in range(1000)]
    for _ in range(30):
        estimate.answered(keys[:10], expected=0, actual=10)
    assert 1000 < estimate.limit < 2000
    estimate.sent(keys)
    assert estimate.leading(keys) == 1000
    for _ in range(300):
        estimate.answered([], expected=0, actual=10)
    assert estimate.limit == 1 << 19
    before = estimate.limit
    estimate.answered(keys[:10], expected=10, actual=10)
    assert estimate.limit == before, "what was learned is not forgotten because it was right"


def test_the_next_turn_is_expected_to_find_the_answer() -> None:
    """A prompt of ten blocks whose answer filled three: the next turn is expected to find 13 of its blocks; another prompt that
    is shorter or ends elsewhere only what it shares."""
    estimate = Estimate(1000)
    keys = [sha256(i.to_bytes(2, "big")).digest() for i in range(20)]
    others = [sha256(b"other" + bytes([i])).digest() for i in range(20)]
    estimate.sent(keys[:10])
    estimate.ended(keys[:10], 3)
    assert (estimate.leading(keys), estimate.known(keys)) == (13, 10)
    assert estimate.leading(keys[:11]) == 11
    assert estimate.leading([*keys[:9], *others]) == 9
    estimate.sent(keys)
    assert estimate.leading([*keys[:10], *others]) == 10, "what stands behind the prompt is known now"


def test_a_wrong_guess_about_an_answer_is_not_held_against_the_capacity() -> None:
    """The next turn has something else than the answer: nothing is concluded about how much the replica keeps."""
    estimate = Estimate(1000)
    keys = [sha256(i.to_bytes(2, "big")).digest() for i in range(20)]
    estimate.answered(keys, expected=13, actual=10, known=10)
    assert estimate.limit == 1000
    estimate.answered(keys, expected=13, actual=9, known=10)
    assert estimate.limit < 1000


def test_the_belief_has_a_floor() -> None:
    """However wrong it was, an estimate never gives up altogether."""
    estimate = Estimate(160)
    for _ in range(1000):
        estimate.answered([], expected=5, actual=0)
    assert estimate.limit == 10


def test_cleared_is_empty() -> None:
    """A replica that was restarted is believed to hold nothing."""
    estimate = Estimate(10)
    estimate.sent(keys_of((1, 2)))
    estimate.cleared()
    assert len(estimate) == estimate.leading(keys_of((1, 2))) == 0


@given(st.lists(paths, max_size=20), st.integers(0, 20), paths)
def test_in_flight_is_what_is_in_flight(sent: list[Path], landed: int, asked: Path) -> None:
    """A block counts as coming while at least one prompt with it is in flight, and nothing is left when none is."""
    in_flight = InFlight()
    for path in sent:
        in_flight.add(keys_of(path))
    for path in sent[:landed]:
        in_flight.remove(keys_of(path))
    coming = {path[: i + 1] for path in sent[landed:] for i in range(len(path))}
    assert len(in_flight) == len(coming)
    expected = next((i for i in range(len(asked)) if asked[: i + 1] not in coming), len(asked))
    assert in_flight.leading(keys_of(asked)) == expected


def test_expected_and_actual_are_kept_apart() -> None:
    """Too much and too little expected do not cancel out."""
    accuracy = Accuracy()
    accuracy.note(100, 60)
    accuracy.note(0, 40)
    assert (accuracy.expected_tokens, accuracy.actual_tokens) == (100, 100)
    assert (accuracy.overestimated_tokens, accuracy.underestimated_tokens) == (40, 40)


def test_no_capacity_is_an_error() -> None:
    """A replica without memory is refused in words."""
    with pytest.raises(ConfigError, match="at least one block"):
        Estimate(0)
