"""Decide between loading blocks from a store and recomputing them, from measured speeds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Share of the compute time that a lookup in remote tiers may take, and the first bytes from a store of unknown speed.
PATIENCE: Final = 0.1
# Times `lookup_timeout`: what lookups in local tiers may take at least, and those of a process that has not computed yet.
_LOCAL: Final = 8
_LOCAL_FIRST: Final = 40
_REMOTE_FIRST: Final = 4


def search_seconds(configured: float, compute_seconds: float | None) -> tuple[float, float]:
    """Seconds that a lookup may take in local tiers, and in remote ones.

    Args:
        configured: `store.lookup_timeout`, in seconds.
        compute_seconds: time to compute what is looked up; None while the prefill speed is not known.
    """
    if compute_seconds is None:
        return _LOCAL_FIRST * configured, _REMOTE_FIRST * configured
    return max(_LOCAL * configured, compute_seconds), max(configured, PATIENCE * compute_seconds)


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
