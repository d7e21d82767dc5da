"""Reads from a tier straight into slots of a faster one, which keeps the blocks: nothing is copied between the two.

The faster tier reserves slots (`Store.reserve`), the slower one reads into them (`Store.get`), the frames are verified where
they lie, a load copies them from there, and then the tier has them (`Store.publish`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat, takewhile
from typing import TYPE_CHECKING, Any, Final

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.store.base import Loan, ReservedSlots
from foreword.store.frame import HEADER_BYTES, Frame, Header, UnreadBlock

if TYPE_CHECKING:
    from foreword.store.base import Name
    from foreword.store.tier import StoreTier
    from foreword.store.tier_threads import TierCall
    from foreword.store.tiered import TieredStore

# The share of a tier's memory that reads at once fill, or one block. A store that hangs keeps no more from other blocks.
_SHARE: Final = 0.25


@dataclass(slots=True, eq=False)
class SlotRead:
    """Blocks that were read from a tier into slots reserved in a faster one, `tier`, where they are not found yet.

    `end` must be called. Until a hung call has returned, which may still write into a slot, none of the slots is given back.

    Attributes:
        frames: those of the first blocks, verified, in their slots; None for one that was not read.
        slot: bytes of a slot, as `begin` has counted them.
    """

    tier: StoreTier
    reserved: ReservedSlots
    frames: Sequence[Frame | None] = ()
    slot: int = 0
    _bytes: int = 0
    _is_late: bool = False
    _late: list[TierCall[Any]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def loan(self) -> Loan:
        """The slots of the first blocks that were read."""
        frames = [one.data for one in takewhile(lambda one: one is not None, self.frames) if one is not None]
        return Loan(self.reserved.memory, self.reserved.stride, self.reserved.slots[: len(frames)], frames)

    def note_late(self, positions: Sequence[int], call: TierCall[Any]) -> None:
        """A call has not returned that may write into slots."""
        with self.tier.lock:
            self.tier.filling.late += not self._is_late
            self._is_late = True
        self._late.append(call)

    def end(self, keeps: Callable[[Sequence[Header], Callable[[], object]], bool]) -> None:
        """The caller does not read the slots any more. What was read is found from now on, if `keeps` makes the call that it
        is given, with the headers, and returns True; else the slots are given back."""
        if self._late:  # the calls refer to what they do afterwards, and so to the slots
            self._late.pop().when_returned(partial(self.end, keeps))
            return
        with self.tier.lock:
            self.tier.filling.bytes -= self._bytes
            self.tier.filling.late -= self._is_late
            self._bytes, self._is_late = 0, False
        read = {index: one.header for index, one in enumerate(self.frames) if one is not None}
        headers, seconds = [*read.values()], time.monotonic() - self._began
        if not read or not keeps(headers, partial(self.tier.publish, self.reserved, headers, seconds, [*read])):
            self.tier.abandon(self.reserved)

    def begin(self, name: Name, sizes: Sequence[int], deadline: float) -> int:
        """For how many of the first blocks, given the name of one and the bytes of their payloads, slots may be read into, and
        count these; 0 if too many are read into already, or one of the reads is late."""
        filling, share = self.tier.filling, int(_SHARE * len(self.tier.store.memory or b""))
        slot, frame = self.tier.store.slot_bytes, HEADER_BYTES + max(sizes)
        if slot < frame:
            with self.tier.lend_unverified([], deadline) as loan:
                slot = loan.stride
        if slot < frame and not filling.late:  # a store that can makes its slots longer, by as much as it likes
            longer = self.tier.reserve([UnreadBlock(name, name, max(sizes))], deadline, unread=True)
            self.tier.abandon(longer)
            slot = longer.stride
        count, slot = min(len(sizes), max(share // slot, 1) if slot >= frame else 1), max(slot, frame)
        with self.tier.lock:
            if filling.late or (filling.bytes and filling.bytes + count * slot > share):
                return 0
            self.slot, self._bytes = slot, count * slot
            filling.bytes += self._bytes
            return count


def read_into(
    store: TieredStore,
    tier: int,
    names: Sequence[Name],
    sizes: Sequence[int],
    *,
    deadline: float,
    before: Sequence[Name],
    again: bool = True,
) -> SlotRead | None:
    """Read blocks, given the bytes of their payloads, from one tier straight into reserved slots of a faster one, up to the
    first that has no slot, or as many as may be read at once, and verify them there. The caller ends the read. `before`: the
    blocks before these in the chain, which are not evicted for them.

    None unless there is such a tier (`TieredStore.read_through`), few other reads into it are under way, and the slower one
    answers.
    """
    faster = store.read_through(tier)
    if faster is None:
        return None
    until = next((until for index, until in store.turns(deadline) if index == tier), 0.0)
    read = SlotRead(faster, ReservedSlots())
    if not until or not store.tiers[tier].answers or not (most := read.begin(names[0], sizes, deadline)):
        return None
    last = {name[:FINGERPRINT_BYTES]: name for name in before}  # of each layout
    parents = list[bytes]()
    for name in names[:most]:
        layout = name[:FINGERPRINT_BYTES]
        parents.append(last.get(layout, name))
        last[layout] = name
    fields = zip(names[:most], parents, sizes, repeat(0), strict=False)
    read.reserved = faster.reserve([*map(UnreadBlock._make, fields)], deadline, unread=True)
    if read.reserved.stride > read.slot:  # a write has just made slots longer: fewer are the share
        read.end(lambda *_: False)
        return read_into(store, tier, names, sizes, deadline=deadline, before=before, again=False) if again else None
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], enumerate(read.reserved.positions)))
    if not count:
        return read
    buffers = read.reserved.frames()[:count]
    try:
        found = zip(store.tiers[tier].get(names[:count], buffers, until, read.note_late), buffers, strict=True)
        read.frames = [one if one is not None and len(one.data) == len(buffer) else None for one, buffer in found]
    except BaseException:
        read.end(lambda *_: False)
        raise
    return read
