"""Decide between loading blocks from a store and recomputing them, from measured speeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Share of the compute time that a search may take, and the first bytes from a store of unknown speed.
PATIENCE: Final = 0.1


def search_timeout(configured: float, compute_seconds: float) -> float:
    """Seconds that a request waits for a search: as configured, or longer if computing the blocks takes much longer."""
    return max(configured, PATIENCE * compute_seconds)


def blocks_worth_loading(load_seconds: Iterable[float], compute_seconds: float) -> int:
    """How many leading blocks to load so that the most time is saved; 0 if loading saves none.

    `load_seconds` has the load time of each block, `compute_seconds` is the time to compute one block.
    """
    best, most_saved, loading = 0, 0.0, 0.0
    for count, seconds in enumerate(load_seconds, start=1):
        loading += seconds
        saved = count * compute_seconds - loading
        if saved > most_saved:
            best, most_saved = count, saved
    return best
