"""Base classes for stores that keep records in the memory of their process: one of them only reads blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foreword.store.base import (
    MISSING,
    Name,
    Store,
    StoredBlock,
    StoreStatus,
    check_record,
    check_record_key,
    time_left,
)
from foreword.store.frame import Frame


class LocalRecords(Store):
    """Keeps records in the memory of this process. Subclasses implement the calls for blocks."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._records: dict[str, bytes] = {}

    def check_open(self, deadline: float) -> None:
        """Raise StoreTimeout if the deadline has passed. Subclasses also raise StoreUnavailable if they are closed."""
        time_left(deadline)

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self.check_open(deadline)
        self._records[check_record_key(key)] = bytes(check_record(data))

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        self.check_open(deadline)
        return self._records.get(key)

    def delete_record(self, key: str, *, deadline: float) -> bool:
        self.check_open(deadline)
        return self._records.pop(key, None) is not None

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        self.check_open(deadline)
        return sorted(key for key in list(self._records) if key.startswith(prefix))


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
