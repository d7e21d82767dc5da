"""All calls of a store, for tests of deadlines and of concurrency."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from foreword.conformance.frames import names_of, put_all, read, soon
from foreword.store.background import at_once
from foreword.store.base import Name, Store
from foreword.store.frame import Frame


def calls_of(store: Store, frames: Sequence[Frame], deadline: float) -> dict[str, Callable[[], object]]:
    """Every call that has a deadline, by name."""
    names = names_of(frames)
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    return {
        "lookup": lambda: store.lookup(names, deadline=deadline),
        "get": lambda: store.get(names, buffers, deadline=deadline),
        "put": lambda: store.put(frames, deadline=deadline),
        "delete": lambda: store.delete(names, deadline=deadline),
        "pin": lambda: store.pin(names, deadline=deadline),
        "unpin": lambda: store.pin(names, pinned=False, deadline=deadline),
        "scan": lambda: list(store.scan(deadline=deadline)),
        "put_record": lambda: store.put_record("key", b"other", deadline=deadline),
        "get_record": lambda: store.get_record("key", deadline=deadline),
        "delete_record": lambda: store.delete_record("key", deadline=deadline),
        "records": lambda: store.records("", deadline=deadline),
    }


def call_from_threads(store: Store, chains: Sequence[Sequence[Frame]], seed: int, *, threads: int, steps: int) -> None:
    """Call a store at random from several threads, and check each result. Raises the first failure."""
    known = {one.name for chain in chains for one in chain}

    def work(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        for _ in range(steps):
            _step(store, draw, draw.choice(chains), known)

    at_once([partial(work, number) for number in range(threads)])


def _step(store: Store, draw: random.Random, chain: Sequence[Frame], known: set[Name]) -> None:
    first = draw.randrange(len(chain))
    part = chain[first : draw.randint(first + 1, len(chain))]
    action = draw.random()
    if action < 0.35:
        assert 0 <= put_all(store, part) <= len(part)
    elif action < 0.45:
        with store.lend(names_of(part), deadline=soon()) as lent:
            for _ in range(20):
                wrong = [one for one, data in zip(part, lent.frames, strict=False) if data not in (b"", one.data)]
                assert not wrong, "a lent frame is another, or has changed"
    elif action < 0.7:
        for one, data in zip(part, read(store, part), strict=True):
            assert data in (None, one.data), "get returned the wrong bytes"
    elif action < 0.8:
        assert 0 <= store.lookup(names_of(part), deadline=soon()) <= len(part)
    elif action < 0.9:
        assert 0 <= store.delete(names_of(part), deadline=soon()) <= len(part)
    elif action < 0.97:
        assert 0 <= store.pin(names_of(part), pinned=draw.random() < 0.5, deadline=soon()) <= len(part)
    else:
        assert {entry.name for entry in store.scan(deadline=soon())} <= known
