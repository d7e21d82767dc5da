"""Consecutive runs: they cover the sequence, each is maximal, and a slice of the sequence can be asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foreword.blocks.runs import consecutive_runs


def test_runs_by_hand() -> None:
    """Ascending and descending runs, and the part of a list that was asked for."""
    blocks = [4, 5, 6, 9, 8, 7, 2]
    assert consecutive_runs(blocks) == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert consecutive_runs(blocks, step=-1) == [(0, 1), (1, 2), (2, 3), (3, 6), (6, 7)]
    assert consecutive_runs(blocks, 1, 4) == [(1, 3), (3, 4)]
    assert consecutive_runs(blocks, 2, 2) == consecutive_runs([]) == []


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(0, 12), st.integers(0, 12), st.sampled_from([1, -1]))
def test_runs_cover_and_are_maximal(numbers: list[int], start: int, stop: int, step: int) -> None:
    """Runs follow each other without a gap; within one the step holds, between two it does not."""
    stop = min(stop, len(numbers))
    start = min(start, stop)
    runs = consecutive_runs(numbers, start, stop, step=step)
    assert [position for low, high in runs for position in range(low, high)] == list(range(start, stop))
    edges = {low for low, _ in runs} - {start}
    for position in range(start + 1, stop):
        assert (numbers[position] != numbers[position - 1] + step) == (position in edges)
