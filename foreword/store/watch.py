"""Whoever wants to know what the tiers of a store take and lose: `watch`.

A wrapper around each store notes what is put and deleted through it, and stores that evict by themselves tell it (memory and
disk do). What others do to a store that is shared, and what a server such as Redis evicts, nobody here sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

from foreword.errors import StoreError
from foreword.store.base import Name, Store
from foreword.store.frame import Frame
from foreword.store.tiered import TieredStore

Note = Callable[[bool, Sequence[Name]], None]


def watch(store: TieredStore, note: Callable[[int, bool, Sequence[Name]], None]) -> None:
    """From now on `note` is called with the number of a tier, whether it has them now or has them no more, and the names of
    blocks. Called on whatever thread it happens, for evictions under a store's lock: it must be quick and must not raise."""
    for number, tier in enumerate(store.tiers):
        if not tier.written:
            continue

        def noted(stored: bool, names: Sequence[Name], number: int = number) -> None:
            if names:
                note(number, stored, names)

        _listen(tier.store, noted)
        tier.store = cast(Store, _Watched(tier.store, noted))


def _listen(store: Store, note: Note) -> None:
    """Be told of evictions, behind a codec too."""
    inner: Any = store
    while inner is not None:
        if hasattr(inner, "on_evicted"):
            inner.on_evicted = lambda name: note(False, [name])
        inner = getattr(inner, "_store", None)


class _Watched:
    """A store that says which blocks it took and lost. Everything else is the inner store's."""

    def __init__(self, store: Store, note: Note) -> None:
        self._store = store
        self._note = note

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        kept = self._store.put(frames, deadline=deadline)
        names = [frame.name for frame in frames]
        if kept < len(names):
            names = self._those_there(names, deadline)
        self._note(True, names)
        return kept

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        gone = self._store.delete(names, deadline=deadline)
        self._note(False, names)
        return gone

    def _those_there(self, names: Sequence[Name], deadline: float) -> list[Name]:
        """Which of them a store has that does not say which it kept. Of what it cannot say nothing is told."""
        found: list[Name] = []
        with contextlib.suppress(StoreError):
            found += [name for name in names if self._store.lookup([name], deadline=deadline)]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
