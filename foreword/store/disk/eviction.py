"""What of a batch a disk store writes, and what it evicts for that: decided within one transaction of the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from foreword.store.base import Name
from foreword.store.disk.files import Files, is_name
from foreword.store.disk.index_rows import Pending, Row, Transaction, block_id, parent_id
from foreword.store.disk.recovery import bury
from foreword.store.frame import Frame

_GROUP_FRAMES: Final = 64  # what one transaction admits: others wait while it unlinks
_GROUP_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Group:
    """Frames admitted by one transaction, by number, and their rows. `kept`: how many others were there already."""

    frames: dict[int, Frame] = field(default_factory=dict)
    rows: list[Pending] = field(default_factory=list)
    kept: int = 0
    full: bool = False


def in_groups(frames: Sequence[Frame]) -> Iterator[list[Frame]]:
    """Runs of frames, none longer than one transaction should admit."""
    group: list[Frame] = []
    size = 0
    for one in frames:
        if group and (len(group) == _GROUP_FRAMES or size + len(one.data) > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(one)
        size += len(one.data)
    if group:
        yield group


class Room:
    """The budget of a disk store.

    Args:
        size: bytes of blocks.
        notes: what is counted: `missing`, `buried`.

    Attributes:
        evictions: blocks that this process removed to make room; `on_evicted` is called with each.
    """

    def __init__(self, files: Files, size: int, notes: Counter[str]) -> None:
        self.size = size
        self.evictions = 0
        self.on_evicted: Callable[[Name], None] | None = None
        self._files = files
        self._notes = notes

    def choose(self, transaction: Transaction, frames: Sequence[Frame], now: int, writer: int) -> Group:
        """Which of `frames` are to be written, with room made for them: as many of the first as find room. Nothing that was
        used since `now` is evicted."""
        group = Group()
        need = 0
        for number, one in self._sort_out(transaction, frames, group, now, writer).items():
            if not self._make_room(transaction, need + len(one.data), now, writer):
                group.full = True
                break
            need += len(one.data)
            group.frames[number] = one
        return group

    def bury(self, transaction: Transaction, writer: int) -> None:
        """Finish or take back what dead processes were writing."""
        self._notes["buried"] += bury(transaction, self._files, writer)

    def discard(self, transaction: Transaction, row: Row) -> None:
        """A row whose file is gone, or not as long as it was."""
        self._files.remove(row.name)
        transaction.remove(row)
        self._notes["missing"] += 1

    def _sort_out(
        self, transaction: Transaction, frames: Sequence[Frame], group: Group, now: int, writer: int
    ) -> dict[int, Frame]:
        """The frames that have to be written, by number. What is there is counted and noted as used, and so is what the others
        hang on."""
        numbers = [block_id(one.name) for one in frames]
        pending = transaction.find_pending(numbers)
        if any(row.writer != writer for row in pending.values()):
            self.bury(transaction, writer)
            pending = transaction.find_pending(numbers)
        rows = transaction.find(numbers)
        new: dict[int, Frame] = {}
        for number, one in zip(numbers, frames, strict=True):
            row = rows.get(number)
            if row is not None and self._files.size(row.name) == row.size:
                group.kept += row.name == one.name
                continue
            if row is not None:
                self.discard(transaction, row)
                del rows[number]
            if number in new:
                group.kept += new[number].name == one.name
            elif number not in pending and len(one.data) <= self.size and is_name(one.name):
                new[number] = one
        transaction.touch(rows.keys() | {parent_id(one) for one in new.values()} - new.keys(), now)
        return new

    def _make_room(self, transaction: Transaction, need: int, now: int, writer: int) -> bool:
        """Evict until `need` more bytes keep to the budget; False if that cannot be."""
        searched = False
        while transaction.bytes + need > self.size:
            row = transaction.victim(now)
            if row is not None:
                self._files.remove(row.name)
                transaction.remove(row)
                self.evictions += 1
                if self.on_evicted is not None:
                    self.on_evicted(row.name)
            elif searched:
                return False
            else:
                self.bury(transaction, writer)
                searched = True
        return True
