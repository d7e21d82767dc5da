"""Reads from a tier straight into slots of a faster one, which keeps the blocks: nothing is copied between the two.

The faster tier reserves slots (`Store.reserve`), the slower one reads into them (`Store.get`), the frames are verified where
they lie, a load copies them from there, and then the tier has them (`Store.publish`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.store.base import Loan
from foreword.store.frame import Frame, Header

if TYPE_CHECKING:
    from foreword.store.base import Name, ReservedSlots
    from foreword.store.tier import StoreTier
    from foreword.store.tier_threads import TierCall
    from foreword.store.tiered import TieredStore


@dataclass(slots=True, eq=False)
class SlotRead:
    """Blocks that were read from a tier into slots reserved in a faster one, `tier`, where they are not found yet.

    `end` must be called. Until a hung call has returned, which may still write into a slot, none of the slots is given back.

    Attributes:
        frames: those of the first blocks, verified, in their slots; None for one that was not read.
    """

    tier: StoreTier
    reserved: ReservedSlots
    frames: Sequence[Frame | None] = ()
    _late: list[TierCall[Any]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def loan(self) -> Loan:
        """The slots of the first blocks that were read."""
        frames = [one.data for one in takewhile(lambda one: one is not None, self.frames) if one is not None]
        return Loan(self.reserved.memory, self.reserved.stride, self.reserved.slots[: len(frames)], frames)

    def note_late(self, positions: Sequence[int], call: TierCall[Any]) -> None:
        """A call has not returned that may write into slots."""
        self._late.append(call)

    def end(self, keeps: Callable[[Sequence[Header], Callable[[], object]], bool]) -> None:
        """The caller does not read the slots any more. What was read is found from now on, if `keeps` makes the call that it
        is given, with the headers, and returns True; else the slots are given back."""
        if self._late:  # the calls refer to what they do afterwards, and so to the slots
            self._late.pop().when_returned(partial(self.end, keeps))
            return
        read = {index: one.header for index, one in enumerate(self.frames) if one is not None}
        headers, seconds = [*read.values()], time.monotonic() - self._began
        if not read or not keeps(headers, partial(self.tier.publish, self.reserved, headers, seconds, [*read])):
            self.tier.abandon(self.reserved)


def read_into(
    store: TieredStore,
    tier: int,
    names: Sequence[Name],
    sizes: Sequence[int],
    *,
    deadline: float,
    before: Sequence[Name],
) -> SlotRead | None:
    """Read blocks, given the bytes of their payloads, from one tier straight into reserved slots of a faster one, up to the
    first that has no slot, and verify them there. The caller ends the read. None unless there is one faster tier, which takes
    all that is read, and has slots. `before`: the blocks before these in the chain, which are not evicted for them."""
    faster = [store.tiers[one] for one in store.promotion_targets(tier)]
    if len(faster) != 1 or faster[0].admission is not None or faster[0].store.memory is None:
        return None
    last = {name[:FINGERPRINT_BYTES]: name for name in before}  # of each layout
    headers = list[Header]()
    for name, size in zip(names, sizes, strict=True):
        layout = name[:FINGERPRINT_BYTES]
        headers.append(Header.unread(name, size, last.get(layout, b"")))
        last[layout] = name
    read = SlotRead(faster[0], faster[0].reserve(headers, deadline, unread=True))
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], enumerate(read.reserved.positions)))
    until = next((until for index, until in store.turns(deadline) if index == tier), 0.0)
    if count and until:
        buffers = read.reserved.frames()[:count]
        found = zip(store.tiers[tier].get(names[:count], buffers, until, read.note_late), buffers, strict=True)
        read.frames = [one if one is not None and len(one.data) == len(buffer) else None for one, buffer in found]
    return read
