"""Chunks that are read are written again when they are old, so that a lifecycle rule by age removes only what is not used."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Final

import obstore
from obstore.exceptions import BaseError

from foreword.errors import StoreError
from foreword.store.object.chunks import ObjectChunk
from foreword.store.object.client import ClientLoop
from foreword.store.object.sections import RecentlyUsed

_WAITING: Final = 1024  # chunks
_WITHIN: Final = 120.0  # seconds for one chunk


class Renewals:
    """Writes chunks again, one at a time, in the background.

    A chunk is written only if it is still the one that was read (`If-Match`): one that was erased meanwhile stays erased.

    Args:
        client: of obstore.
        prefix: of all paths.
        after: age in seconds from which chunks are written again; 0: never.

    Attributes:
        count: chunks that were written again.
    """

    def __init__(self, client: Any, prefix: str, loop: ClientLoop, after: float) -> None:
        self.count = 0
        self._client = client
        self._prefix = prefix
        self._loop = loop
        self._after = after
        self._lock = threading.Lock()
        self._waiting: dict[str, ObjectChunk] = {}
        self._working = False
        self._renewed: RecentlyUsed[float] = RecentlyUsed()

    def used(self, chunks: Iterable[ObjectChunk]) -> None:
        """Note that these chunks were read."""
        if not self._after:
            return
        limit = time.time() - self._after
        old = {chunk.path: chunk for chunk in chunks if max(chunk.written, self._last(chunk)) < limit}
        with self._lock:
            self._waiting.update(list(old.items())[: _WAITING - len(self._waiting)])
            start, self._working = bool(self._waiting) and not self._working, bool(self._waiting) or self._working
        if start:
            self._start(self._work())

    def _last(self, chunk: ObjectChunk) -> float:
        return self._renewed.get(chunk.path.encode()) or 0.0

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self._loop.start(work, time.monotonic() + _WITHIN)
        except StoreError:
            self._working = False

    async def _work(self) -> None:
        while True:
            with self._lock:
                path = next(iter(self._waiting), None)
                chunk = None if path is None else self._waiting.pop(path)
                if chunk is None:
                    self._working = False
                    return
            self._renewed.set(chunk.path.encode(), time.time())  # also if it fails: it is tried again later
            # Gone, changed, or the service has no conditional writes.
            with contextlib.suppress(BaseError, OSError, NotImplementedError):
                self.count += await self._renew(chunk)

    async def _renew(self, chunk: ObjectChunk) -> bool:
        path = self._prefix + chunk.path
        found = await obstore.get_async(self._client, path)
        data, tag = bytes(await found.bytes_async()), found.meta["e_tag"]
        if tag is None or len(data) != chunk.size:
            return False
        await obstore.put_async(self._client, path, data, mode={"e_tag": tag}, use_multipart=False)
        return True
