"""Erasures and listings of one tier, in steps: calls that may be long, on a thread of the tier. A tier that hangs
delays no other one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Final, TypeVar

from foreword.errors import StoreError, StoreHung
from foreword.store.base import STEP_SECONDS, Erased, Name, has_prefix, step_deadline
from foreword.store.tier import StoreTier

Result = TypeVar("Result")


class _End:
    """Follows the last result of a stream."""


_END: Final = _End()


def stream(tier: StoreTier, start: Callable[[], Iterator[Result]], within: float = 0.0) -> Iterator[Result]:
    """The results of a call of the tier's store that may be long, such as a listing. Raises what it raises, and StoreHung if
    the next result takes longer than `within` seconds and than two steps."""
    if not tier.blocking:
        yield from start()
        return
    results: queue.SimpleQueue[Result | _End] = queue.SimpleQueue()
    left = threading.Event()

    def work() -> None:
        try:
            for result in start():
                if left.is_set():
                    return
                results.put(result)
        finally:
            results.put(_END)

    call = tier.start(work)
    try:
        while True:
            try:
                result = results.get(timeout=max(within, 2 * STEP_SECONDS))
            except queue.Empty:
                call.result(time.monotonic())
                raise StoreHung("a store does not go on") from None
            if isinstance(result, _End):
                call.result(time.monotonic() + STEP_SECONDS)
                return
            yield result
    finally:
        left.set()


def erase_tier(
    tier: StoreTier, layout: bytes, root: bytes, chosen: Collection[Name] | None, deadline: float
) -> Iterator[Erased]:
    """Delete all blocks with this layout and root (b"": any) from a tier, or those of them that are chosen, even if its circuit
    breaker is open: what it defers first, then what its store has. Yields what `Store.erase_steps` does. Raises
    StoreError."""

    def erase() -> Iterator[Erased]:
        tier.drop_deferred(
            lambda name: has_prefix(name, layout, root) and (chosen is None or name in chosen), step_deadline(deadline)
        )
        if tier.listener is not None:
            with contextlib.suppress(StoreError):
                for names in tier.store.list_names(layout, root, deadline=deadline):
                    tier.notify(False, names if chosen is None else [name for name in names if name in chosen])
                    yield Erased()
        yield from tier.store.erase_steps(layout, root, chosen=chosen, deadline=deadline)

    return stream(tier, erase)
