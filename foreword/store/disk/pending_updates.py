"""What a process has done in a disk store and the index does not know yet: uses of blocks, and writes that have ended.

Each transaction begins with it (`Untold.take`, `Told.tell`); if one fails, the next begins with what it was to tell of writes.
Uses may be lost: they only decide what goes first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from foreword.store.base import Name
from foreword.store.disk.files import Files
from foreword.store.disk.index_rows import Pending, Transaction, block_id


class Told(NamedTuple):
    """What one transaction is told.

    Attributes:
        uses: by number of the block: their order, how many, seconds since the epoch of the last.
        written, dropped: files that are whole, and files that were given up.
    """

    uses: dict[int, tuple[int, int, float]]
    written: list[Pending]
    dropped: list[Pending]

    def tell(self, transaction: Transaction, files: Files, registered: Callable[[], bool]) -> None:
        """`registered` says whether the index still knows this process."""
        if self.uses:
            clock = transaction.clock
            transaction.note((clock + order, hits, at, number) for number, (order, hits, at) in self.uses.items())
            transaction.clock += max(order for order, _, _ in self.uses.values())
        if not self.written and not self.dropped:
            return
        if registered():
            if self.written:
                transaction.finish(self.written)
            if self.dropped:
                transaction.drop(self.dropped)
            return
        # The index was made anew meanwhile. It found what was whole by then; other files it does not count, and they must go.
        numbers = [row.id for row in self.written]
        there = transaction.find(numbers).keys() | transaction.find_pending(numbers).keys()
        for row in self.written:
            if row.id not in there:
                files.remove(row.name)


class Untold:
    """Threads may call at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[int, tuple[int, int, float]] = {}
        self._order = 0
        self._written: list[Pending] = []
        self._dropped: list[Pending] = []

    def note(self, names: Sequence[Name]) -> None:
        """These blocks were read, at once."""
        if not names:
            return
        clock = time.time()
        with self._lock:
            self._order += 1
            for name in names:
                number = block_id(name)
                _, hits, _ = self._uses.get(number, (0, 0, 0.0))
                self._uses[number] = (self._order, hits + 1, clock)

    def ended(self, written: Sequence[Pending], dropped: Sequence[Pending]) -> None:
        """Files are whole, or were given up."""
        with self._lock:
            self._written += written
            self._dropped += dropped

    def take(self) -> Told:
        """All of it, which is forgotten here."""
        with self._lock:
            told = Told(self._uses, self._written, self._dropped)
            self._uses, self._written, self._dropped, self._order = {}, [], [], 0
        return told
