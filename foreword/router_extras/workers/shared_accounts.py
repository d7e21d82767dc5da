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
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

from foreword.api.quotas import Account, Accounts, Bucket, Quota, new_account
from foreword.errors import RateLimited

MOST_WORKERS: Final = 64
_SLOTS: Final = 16_384
# Slots in which a tenant may be.
_WINDOW: Final = 64
# A digest of the tenant's name, the levels of both buckets with their times, and the requests that run in each worker.
_SLOT: Final = struct.Struct(f"<16s4d{MOST_WORKERS}i")
_NOBODY: Final = bytes(16)
# Counts of workers that were started again: killed by a signal, ended with a status.
_HEAD: Final = struct.Struct("<2q")
_HEAD_BYTES: Final = 64


class SharedAccounts(Accounts):
    """Made once, before the workers are forked; each of them then sets its `worker`."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = 0
        self._memory = mmap.mmap(-1, _HEAD_BYTES + _SLOTS * _SLOT.size)
        descriptor, path = tempfile.mkstemp(prefix="foreword-quotas-")
        os.unlink(path)
        self._lock = descriptor

    def __len__(self) -> int:
        with self._locked():
            return sum(_SLOT.unpack_from(self._memory, self._at(slot))[0] != _NOBODY for slot in range(_SLOTS))

    @contextmanager
    def open(self, tenant: str, quota: Quota, now: float) -> Iterator[Account]:
        """As in one process: the account has the requests of all workers. Raises RateLimited if there is no room for more
        tenants with running requests."""
        name = blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._locked():
            at = self._find(name)
            found, level, since, tokens, tokens_since, *running = _SLOT.unpack_from(self._memory, at)
            if found == name:
                account = Account(
                    None if quota.requests is None else Bucket(quota.requests, now, (level, since)),
                    None if quota.tokens is None else Bucket(quota.tokens, now, (tokens, tokens_since)),
                    sum(running),
                )
            else:
                account, running = new_account(quota, now), [0] * MOST_WORKERS
            before = account.running
            yield account
            running[self.worker] += account.running - before
            states = [(0.0, 0.0) if one is None else one.state for one in (account.requests, account.tokens)]
            _SLOT.pack_into(self._memory, at, name, *states[0], *states[1], *running)

    def ended(self, worker: int, *, by_signal: bool) -> None:
        """A worker has ended and is started again: none of its requests runs any more."""
        with self._locked():
            for slot in range(_SLOTS):
                at = self._at(slot)
                name, *numbers = _SLOT.unpack_from(self._memory, at)
                if name != _NOBODY and numbers[4 + worker]:
                    numbers[4 + worker] = 0
                    _SLOT.pack_into(self._memory, at, name, *numbers)
            killed, failed = _HEAD.unpack_from(self._memory, 0)
            _HEAD.pack_into(self._memory, 0, killed + by_signal, failed + (not by_signal))

    def restarts(self) -> dict[str, int]:
        """Workers that were started again, by why the one before had ended."""
        killed, failed = _HEAD.unpack_from(self._memory, 0)
        return {"signal": killed, "status": failed}

    def _find(self, name: bytes) -> int:
        """The tenant's slot, or one for it: a free one, or that of a tenant without running requests."""
        first, idle = int.from_bytes(name[:8], "little"), -1
        for step in range(_WINDOW):
            at = self._at((first + step) % _SLOTS)
            found, *numbers = _SLOT.unpack_from(self._memory, at)
            if found in (name, _NOBODY):
                return at
            if idle < 0 and not any(numbers[4:]):
                idle = at
        if idle < 0:
            raise RateLimited("too many tenants have requests at once", 1.0)
        return idle

    @staticmethod
    def _at(slot: int) -> int:
        return _HEAD_BYTES + slot * _SLOT.size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)
