"""The estimated directory, against an ordered list."""

from __future__ import annotations

from hashlib import sha256

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import ConfigError
from foreword.routing.directory import EstimateAccuracy, EstimatedBlocks, InFlightPrefixes

Path = tuple[int, ...]
paths = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


def keys_of(path: Path) -> list[bytes]:
    return [sha256(bytes(path[: i + 1])).digest() for i in range(len(path))]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 20), st.lists(paths, max_size=30), paths)
def test_the_estimate_is_an_lru(capacity: int, sent: list[Path], asked: Path) -> None:
    """The estimate is an LRU of `capacity` blocks; the first block of a prompt counts as used last."""
    estimate = EstimatedBlocks(capacity)
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


def test_fewer_cached_tokens_than_expected_shrink_the_limit() -> None:
    """If responses keep reporting fewer cached tokens than expected, the limit shrinks; if they report as many, it
    grows again."""
    estimate = EstimatedBlocks(1000)
    keys = [sha256(i.to_bytes(2, "big")).digest() for i in range(1000)]
    estimate.sent(keys)
    assert estimate.leading(keys) == 1000
    for _ in range(20):
        estimate.correct(keys[:10], expected=10, actual=2)
    assert 300 < estimate.limit < 400
    assert len(estimate) == estimate.limit
    assert estimate.leading(keys[:10]) == 10, "the prompt itself was computed there just now"
    shrunk = estimate.limit
    for _ in range(200):
        estimate.correct(keys[:10], expected=10, actual=10)
    assert estimate.limit == 1000 > shrunk


def test_more_cached_tokens_than_expected_raise_the_limit() -> None:
    """A replica that finds blocks which should have left its device has lower tiers: the limit grows beyond the
    device's capacity."""
    estimate = EstimatedBlocks(100)
    keys = [sha256(i.to_bytes(2, "big")).digest() for i in range(1000)]
    for _ in range(30):
        estimate.correct(keys[:10], expected=0, actual=10)
    assert 1000 < estimate.limit < 2000
    estimate.sent(keys)
    assert estimate.leading(keys) == 1000
    for _ in range(300):
        estimate.correct([], expected=0, actual=10)
    assert estimate.limit == 1 << 19
    before = estimate.limit
    estimate.correct(keys[:10], expected=10, actual=10)
    assert estimate.limit == before, "what was learned is not forgotten because it was right"


def test_the_next_turn_is_expected_to_find_the_output() -> None:
    """After a prompt of ten blocks with an output of three, the next turn is expected to find 13 blocks, and a
    prompt that differs only what it shares."""
    estimate = EstimatedBlocks(1000)
    keys = [sha256(i.to_bytes(2, "big")).digest() for i in range(20)]
    others = [sha256(b"other" + bytes([i])).digest() for i in range(20)]
    estimate.sent(keys[:10])
    estimate.output(keys[:10], 3)
    assert (estimate.leading(keys), estimate.known(keys)) == (13, 10)
    assert estimate.leading(keys[:11]) == 11
    assert estimate.leading([*keys[:9], *others]) == 9
    estimate.sent(keys)
    assert estimate.leading([*keys[:10], *others]) == 10, "what stands behind the prompt is known now"


def test_a_wrong_guess_about_an_output_does_not_shrink_the_limit() -> None:
    """If the next turn does not repeat the output, nothing is concluded about the capacity."""
    estimate = EstimatedBlocks(1000)
    keys = [sha256(i.to_bytes(2, "big")).digest() for i in range(20)]
    estimate.correct(keys, expected=13, actual=10, known=10)
    assert estimate.limit == 1000
    estimate.correct(keys, expected=13, actual=9, known=10)
    assert estimate.limit < 1000


def test_the_limit_has_a_floor() -> None:
    """The limit never falls below a sixteenth of the capacity."""
    estimate = EstimatedBlocks(160)
    for _ in range(1000):
        estimate.correct([], expected=5, actual=0)
    assert estimate.limit == 10


@given(st.lists(paths, max_size=20), st.integers(0, 20), paths)
def test_in_flight_prefixes_are_counted(sent: list[Path], landed: int, asked: Path) -> None:
    """A block counts while at least one prompt with it is in flight, and nothing remains when none is."""
    in_flight = InFlightPrefixes()
    for path in sent:
        in_flight.add(keys_of(path))
    for path in sent[:landed]:
        in_flight.remove(keys_of(path))
    coming = {path[: i + 1] for path in sent[landed:] for i in range(len(path))}
    assert len(in_flight) == len(coming)
    expected = next((i for i in range(len(asked)) if asked[: i + 1] not in coming), len(asked))
    assert in_flight.leading(keys_of(asked)) == expected


def test_over_and_underestimates_do_not_cancel() -> None:
    """Overestimated and underestimated tokens are counted separately."""
    accuracy = EstimateAccuracy()
    accuracy.record(100, 60)
    accuracy.record(0, 40)
    assert (accuracy.expected_tokens, accuracy.actual_tokens) == (100, 100)
    assert (accuracy.overestimated_tokens, accuracy.underestimated_tokens) == (40, 40)


def test_no_capacity_is_an_error() -> None:
    """A capacity of zero is refused with a message."""
    with pytest.raises(ConfigError, match="at least one block"):
        EstimatedBlocks(0)
