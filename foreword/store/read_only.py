"""A base class for stores that only read blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foreword.store.base import MISSING, Name, StoredBlock, StoreStatus
from foreword.store.frame import Frame
from foreword.store.local_records import LocalRecords


class ReadOnlyStore(LocalRecords):
    """A store that ignores writes of blocks. It has no blocks; subclasses override `lookup` and `get`."""

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        return 0

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        return [MISSING] * len(names)

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self.check_open(deadline)
        return 0

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        self.check_open(deadline)
        return 0

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        self.check_open(deadline)
        return 0

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        self.check_open(deadline)
        return iter(())

    def status(self) -> StoreStatus:
        return StoreStatus()

    def close(self) -> None:
        """Nothing to release."""
