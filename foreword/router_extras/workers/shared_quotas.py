"""The accounts of tenants with quotas, and the counts of ended workers, in memory that all workers of a router share.

A file lock guards it: the system releases that of a process that dies, at any place. A change is a few numbers of one tenant,
written within microseconds; one that a death interrupts is that request's own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

from foreword.api.quotas import Account, Admitted, Bucket, Quotas
from foreword.request_errors import RateLimited

MOST_WORKERS: Final = 64
_SLOTS: Final = 16_384
# Slots in which a tenant may be.
_WINDOW: Final = 64
# A digest of the tenant's name, the levels of both buckets with their times, and the requests that run in each worker.
_SLOT: Final = struct.Struct(f"<16s4d{MOST_WORKERS}i")
_NOBODY: Final = bytes(16)
# Counts of workers that were started again: killed by a signal, ended with a status.
_HEAD: Final = struct.Struct("<2q")
# Whether all workers end; then how often each has said that it runs.
_ENDING_AT: Final = _HEAD.size
_BEAT: Final = struct.Struct("<q")
_BEATS_AT: Final = 64
_HEAD_BYTES: Final = _BEATS_AT + MOST_WORKERS * _BEAT.size


class SharedMemory:
    """Made once, before the workers are forked; each of them then sets its `worker`."""

    def __init__(self) -> None:
        self.worker = 0
        self._memory = mmap.mmap(-1, _HEAD_BYTES + _SLOTS * _SLOT.size)
        descriptor, path = tempfile.mkstemp(prefix="foreword-quotas-")
        os.unlink(path)
        self._lock = descriptor

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other worker reads or writes in this block."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def find(self, tenant: str) -> tuple[int, bytes]:
        """The place of a tenant: its own, a free one, or that of a tenant without running requests; and its digest. Raises
        RateLimited if there is none."""
        name = blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first, idle = int.from_bytes(name[:8], "little"), -1
        for step in range(_WINDOW):
            at = _HEAD_BYTES + (first + step) % _SLOTS * _SLOT.size
            found, *numbers = _SLOT.unpack_from(self._memory, at)
            if found in (name, _NOBODY):
                return at, name
            if idle < 0 and not any(numbers[4:]):
                idle = at
        if idle < 0:
            raise RateLimited("too many tenants have requests at once", 1.0)
        return idle, name

    def load(self, at: int, name: bytes) -> tuple[list[float], list[int]] | None:
        """Levels and times of both buckets, and the running requests of each worker; None if the place is not the tenant's."""
        found, *numbers = _SLOT.unpack_from(self._memory, at)
        return (numbers[:4], numbers[4:]) if found == name else None

    def save(self, at: int, name: bytes, levels: list[float], running: list[int]) -> None:
        """Write what `load` reads."""
        _SLOT.pack_into(self._memory, at, name, *levels, *running)

    def ended(self, worker: int, *, by_signal: bool) -> None:
        """A worker has ended and is started again: none of its requests runs any more."""
        with self.locked():
            for at in range(_HEAD_BYTES, _HEAD_BYTES + _SLOTS * _SLOT.size, _SLOT.size):
                name, *numbers = _SLOT.unpack_from(self._memory, at)
                if name != _NOBODY and numbers[4 + worker]:
                    numbers[4 + worker] = 0
                    _SLOT.pack_into(self._memory, at, name, *numbers)
            killed, failed = _HEAD.unpack_from(self._memory, 0)
            _HEAD.pack_into(self._memory, 0, killed + by_signal, failed + (not by_signal))

    @property
    def ending(self) -> bool:
        """Whether the supervisor ends all workers."""
        return self._memory[_ENDING_AT] != 0

    def end_all(self) -> None:
        self._memory[_ENDING_AT] = 1

    def beat(self) -> None:
        """This worker runs: called at least once a second from when it begins to."""
        self._set_beats(self.worker, self.beats(self.worker) + 1)

    def beats(self, worker: int) -> int:
        """How often a worker has said that it runs; 0 if it has not begun to."""
        found: int = _BEAT.unpack_from(self._memory, _BEATS_AT + worker * _BEAT.size)[0]
        return found

    def begins(self, worker: int) -> None:
        self._set_beats(worker, 0)

    def _set_beats(self, worker: int, count: int) -> None:
        _BEAT.pack_into(self._memory, _BEATS_AT + worker * _BEAT.size, count)

    def restarts(self) -> dict[str, int]:
        """Workers that were started again, by why the one before had ended."""
        killed, failed = _HEAD.unpack_from(self._memory, 0)
        return {"signal": killed, "status": failed}


class SharedQuotas(Quotas):
    """Quotas whose accounts all workers share: each change reads one, and writes it again, behind a lock."""

    memory: SharedMemory

    @classmethod
    def shared(cls, entries: Iterable[str], memory: SharedMemory) -> SharedQuotas:
        """Parse quotas, as `parse`. Raises ConfigError."""
        found = cls.parse(entries)
        assert isinstance(found, SharedQuotas)
        found.memory = memory
        return found

    def admit(self, tenant: str, now: float, *, continued: bool = False) -> Admitted:
        with self._opened(tenant):
            return super().admit(tenant, now, continued=continued)

    def charge(self, admitted: Admitted, tokens: int, now: float) -> None:
        with self._opened(admitted.tenant):
            super().charge(admitted, tokens, now)

    def finish(self, admitted: Admitted) -> None:
        with self._opened(admitted.tenant):
            super().finish(admitted)

    @contextmanager
    def _opened(self, tenant: str) -> Iterator[None]:
        """The tenant's account is that of all workers in this block."""
        quota = self._quotas.get(tenant, self._default)
        if quota is None:
            yield
            return
        memory = self.memory
        with memory.locked():
            at, name = memory.find(tenant)
            loaded = memory.load(at, name)
            levels, running = loaded or ([], [0] * MOST_WORKERS)
            before = sum(running)
            if loaded is not None:
                self._accounts[tenant] = Account(
                    _bucket(quota.requests, *levels[:2]), _bucket(quota.tokens, *levels[2:]), before
                )
            try:
                yield
            finally:
                account = self._accounts.pop(tenant, None)
                if account is not None:
                    running[memory.worker] += account.running - before
                    buckets = (account.requests, account.tokens)
                    levels = [
                        x for one in buckets for x in ((one.level_then, one.at) if one is not None else (0.0, 0.0))
                    ]
                    memory.save(at, name, levels, running)


def _bucket(size: float | None, level: float, at: float) -> Bucket | None:
    if size is None:
        return None
    bucket = Bucket(size, at)
    bucket.level_then = level
    return bucket
