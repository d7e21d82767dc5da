"""The file in which a router keeps what it has learned of the costs of replicas, over its restarts.

It is a hint, and no more: what is missing, broken, old or impossible in it is ignored, with a line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from foreword.decoders import decode_json
from foreword.errors import reason_of
from foreword.routing.cost_kinds import CostKinds
from foreword.routing.cost_records import MOST_RECORDS, CostRecord, CostRecords

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
_WRITE_SECONDS: Final = 60.0
# More than `MOST_RECORDS` of the longest names take.
_MOST_BYTES: Final = 1 << 20


class _File(msgspec.Struct):
    format: int
    kinds: list[CostRecord]


async def keep_costs(kinds: CostKinds, path: str) -> None:
    """Begin with what the file at `path` has, and write it every minute and when this is cancelled."""
    file, records = CostFile(path), CostRecords(kinds)
    records.restore(file.read(), time.time())
    try:
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            await asyncio.to_thread(file.write, records.records(time.time()))
    finally:
        await asyncio.to_thread(file.write, records.records(time.time()))


class CostFile:
    """The file at `path`."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def read(self) -> Sequence[CostRecord]:
        """Its records, of which some may be implausible."""
        if not self._path.exists():
            return ()
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")
            found = decode_json(data, _File)
            if found.format != _FORMAT:
                raise ValueError(f"its format is {found.format}, not {_FORMAT}")
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            logger.warning("the learned costs in %s are ignored: %s", self._path, reason_of(error))
            return ()
        return found.kinds[:MOST_RECORDS]

    def write(self, records: Sequence[CostRecord]) -> None:
        """Replace the file. A failure is logged: the router works without it. Takes time; runs on any thread."""
        if not records:
            return
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            temporary.write_bytes(msgspec.json.encode(_File(_FORMAT, list(records[:MOST_RECORDS]))))
            os.replace(temporary, self._path)
        except OSError as error:
            logger.warning("the learned costs cannot be written to %s: %s", self._path, reason_of(error))
