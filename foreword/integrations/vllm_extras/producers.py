"""KV producers as a store tier: other instances that computed a prompt and keep its blocks for this worker.

While a request loads from its producer a transfer is open. The lease at the producer lives as long as the transfer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from foreword.errors import ConfigError
from foreword.integrations.vllm_extras.step_parts import KVProducer
from foreword.newest import Newest
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.base import Name
from foreword.store.read_only import ReadOnlyStore
from foreword.store.tier_threads import StoreGuard
from foreword.transfer.connection import Connection
from foreword.transfer.errors import TransferError, TransferTimeout
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import KVDestination
from foreword.transfer.wire_format import Reason

logger = logging.getLogger(__name__)

_OPENERS = 4
_MAX_PRODUCERS = 256


class LeaseReader:
    """A request's open transfer with its producer. `names`: the blocks that are read there."""

    def __init__(self, address: str, lease: bytes, names: Sequence[Name]) -> None:
        self.address = address
        self.lease = lease
        self.names = names
        self.connection: Connection | None = None
        self.transfer: KVDestination | None = None
        self.accepted = False
        self.closed = False
        self._answered = threading.Event()

    def answer(self, accepted: bool) -> None:
        """The producer accepts or refuses, or has gone."""
        if not self._answered.is_set():
            self.accepted = accepted
            self._answered.set()

    def wait(self, timeout: float) -> bool:
        return self._answered.wait(max(timeout, 0))


class KVProducers(ReadOnlyStore):
    """Implements `Store` over the producers of all requests that load now. Each producer has its own circuit breaker.

    Args:
        endpoint: whose service passes a producer's answer to the `LeaseReader` (the context of its transfer).
        rank: of this worker; it reads from the same rank.
    """

    def __init__(self, endpoint: TransferEndpoint, rank: int, label: str) -> None:
        super().__init__(label)
        self._endpoint = endpoint
        self._rank = rank
        self._lock = threading.Lock()
        self._readers: dict[Name, list[LeaseReader]] = {}
        self._guards: Newest[str, StoreGuard] = Newest(_MAX_PRODUCERS)
        self._pool = BackgroundJobs("producers", most=None, threads=_OPENERS)

    def open(self, producer: KVProducer, names: Sequence[Name], then: Callable[[], None]) -> LeaseReader:
        """Open a lease. `then` is called on another thread once its blocks can be read, or cannot."""
        reader = LeaseReader(producer.addresses[self._rank], producer.lease, names)
        self._submit(reader, then)
        return reader

    def close_reader(self, reader: LeaseReader) -> None:
        """Nothing more is read; the lease ends."""
        with self._lock:
            reader.closed = True
            self._forget(reader)
        if reader.accepted and reader.transfer is not None:
            reader.transfer.cancel(Reason.CANCELLED, "all that was needed has been read")

    def release(self, producer: KVProducer) -> None:
        """End a lease without reading."""
        reader = LeaseReader(producer.addresses[self._rank], producer.lease, ())
        reader.closed = True
        self._submit(reader, lambda: None)

    def _submit(self, reader: LeaseReader, then: Callable[[], None]) -> None:
        try:
            self._pool.submit(self._open, reader, then)
        except RuntimeError:  # closed
            then()

    def _open(self, reader: LeaseReader, then: Callable[[], None]) -> None:
        try:
            if self._guard(reader.address).attempt(lambda: self._connect(reader), False):
                self._read_from(reader)
        finally:
            then()

    def _connect(self, reader: LeaseReader) -> bool:
        """Whether the producer has the lease. Raises TransferError, ConfigError."""
        seconds = self._endpoint.config.connect_timeout
        try:
            reader.connection = self._endpoint.connect(reader.address, deadline=time.monotonic() + seconds)
            reader.transfer = reader.connection.pull(reader.lease, context=reader)
            if not reader.wait(seconds):
                reader.transfer.cancel(Reason.DEADLINE, "no answer in time")
                raise TransferTimeout("it does not answer")
        except (TransferError, ConfigError) as error:
            logger.warning("Foreword: no blocks are loaded from producer %s: %s", reader.address, error.message)
            raise
        if not reader.accepted:
            reason = reader.transfer.message or "it refuses"
            logger.warning("Foreword: no blocks are loaded from producer %s: %s", reader.address, reason)
        return reader.accepted

    def _read_from(self, reader: LeaseReader) -> None:
        with self._lock:
            closed = reader.closed
            if not closed:
                for name in reader.names:
                    self._readers.setdefault(name, []).append(reader)
        if closed:
            self.close_reader(reader)

    def _forget(self, reader: LeaseReader) -> None:
        for name in reader.names:
            others = [one for one in self._readers.pop(name, ()) if one is not reader]
            if others:
                self._readers[name] = others

    def _guard(self, address: str) -> StoreGuard:
        """Counts a producer's failures."""
        with self._lock:
            guard = self._guards.get(address) or StoreGuard(ReadOnlyStore(address))
            self._guards[address] = guard
            return guard

    # Called by TieredStore

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        lengths = [0] * len(names)
        for reader, which in self._by_reader(names):
            connection = reader.connection
            assert connection is not None
            wanted, into = [names[i] for i in which], [buffers[i] for i in which]
            found = self._guard(reader.address).attempt(
                lambda connection=connection, wanted=wanted, into=into: connection.get(wanted, into, deadline=deadline),  # type: ignore[misc]
                [0] * len(which),
            )
            for i, length in zip(which, found, strict=True):
                lengths[i] = length
        return lengths

    def _by_reader(self, names: Sequence[Name]) -> list[tuple[LeaseReader, list[int]]]:
        found: dict[int, tuple[LeaseReader, list[int]]] = {}
        with self._lock:
            for i, name in enumerate(names):
                readers = self._readers.get(name)
                if readers:
                    found.setdefault(id(readers[0]), (readers[0], []))[1].append(i)
        return list(found.values())

    def close(self) -> None:
        """No lease is opened any more."""
        self._pool.stop()
