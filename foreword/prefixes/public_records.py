"""Public blocks, read from the records that instances share."""

from __future__ import annotations

import contextlib
import math
from typing import Final

from foreword.blocks.keys import PUBLIC_ROOT
from foreword.blocks.public_blocks import PublicBlocks
from foreword.errors import StoreError
from foreword.prefixes.lease_records import PREFIXES, READ_SECONDS
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.shared_records import SharedRecords
from foreword.store.tiered import TieredStore

_SCAN_SECONDS: Final = 2.0


class PublicRecords:
    """Public blocks, for a process that reads them from the records of its stores: when this is made, for two seconds per store
    at most, and then every two seconds.

    Attributes:
        blocks: what is known so far.
    """

    def __init__(self, store: TieredStore, model: str) -> None:
        self.blocks = PublicBlocks()
        self._records = SharedRecords(store, PREFIXES, READ_SECONDS)
        self._prefix = PREFIXES.key(model[:32], PUBLIC_ROOT.hex(), "")
        # Before the first request: one that begins with a public text would be named as its tenant's own, and find nothing.
        self._scan(READ_SECONDS)
        self._jobs = BackgroundJobs("public", most=1, tick=self._scan, every=_SCAN_SECONDS)

    def _scan(self, within: float = math.inf) -> None:
        with contextlib.suppress(StoreError):  # then it is as it was
            found = self._records.scan(self._prefix, within=within)
            self.blocks.set(record.chain for record in found.values.values())

    def close(self) -> None:
        self._jobs.close(READ_SECONDS)
