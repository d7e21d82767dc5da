"""Consecutive runs of block numbers: what lies in a row can be copied, read or attended to in one piece."""

from __future__ import annotations

from collections.abc import Sequence


def consecutive_runs(
    numbers: Sequence[int], start: int = 0, stop: int | None = None, *, step: int = 1
) -> list[tuple[int, int]]:
    """Intervals `[low, high)` of positions that cover `[start, stop)`, each a maximal run in which every number is the
    previous one plus `step`."""
    if stop is None:
        stop = len(numbers)
    if start >= stop:
        return []
    runs = []
    low, expected = start, numbers[start] + step
    for position in range(start + 1, stop):
        number = numbers[position]
        if number != expected:
            runs.append((low, position))
            low = position
        expected = number + step
    runs.append((low, stop))
    return runs
