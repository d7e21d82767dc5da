"""A base class for stores that keep records in the memory of their process."""

from __future__ import annotations

from foreword.store.base import (
    Store,
    check_record,
    check_record_key,
    time_left,
)


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
