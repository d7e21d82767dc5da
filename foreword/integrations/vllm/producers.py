"""Other instances that computed a prompt and keep its blocks, as one tier under the stores of a worker that decodes.

For every request that comes with such a lender a transfer is open while it loads: the lender's lease lives as long as that, and
ends with it, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from foreword.errors import ConfigError, TransferError, TransferTimeout
from foreword.integrations.vllm.step_messages import Lender
from foreword.store.background import use_background_cores
from foreword.store.base import Name
from foreword.store.bases import ReadOnlyStore
from foreword.store.tiered import StoreTier
from foreword.transfer.connection import Connection
from foreword.transfer.endpoint import TransferEndpoint
from foreword.transfer.messages import Reason
from foreword.transfer.transfers import KVDestination

log = logging.getLogger("foreword.integrations.vllm")

_OPENERS = 4
_KNOWN = 256


class Loan:
    """One request's open transfer with its lender. `names`: what is read from there."""

    def __init__(self, address: str, lease: bytes, names: Sequence[Name]) -> None:
        self.address = address
        self.lease = lease
        self.names = names
        self.connection: Connection | None = None
        self.transfer: KVDestination | None = None
        self.accepted = False
        self.closed = False
        self._answered = threading.Event()

    def answer(self, yes: bool) -> None:
        """The lender has said yes or no, or is gone."""
        if not self._answered.is_set():
            self.accepted = yes
            self._answered.set()

    def wait(self, timeout: float) -> bool:
        return self._answered.wait(max(timeout, 0))


class Lenders(ReadOnlyStore):
    """Implements `Store` over whoever lends what is being loaded now. Every lender has a circuit breaker of its own.

    Args:
        endpoint: whose service tells a loan (the context of its transfer) the answer.
        rank: of this worker; it reads from the same rank.
    """

    def __init__(self, endpoint: TransferEndpoint, rank: int, label: str) -> None:
        super().__init__(label)
        self._endpoint = endpoint
        self._rank = rank
        self._lock = threading.Lock()
        self._loans: dict[Name, list[Loan]] = {}
        self._tiers: OrderedDict[str, StoreTier] = OrderedDict()
        self._pool = ThreadPoolExecutor(_OPENERS, "foreword-lenders", use_background_cores)

    def open(self, lender: Lender, names: Sequence[Name], then: Callable[[], None]) -> Loan:
        """Begin to borrow; `then` is called, from another thread, when what can be read can be read, be it nothing."""
        loan = Loan(lender.addresses[self._rank], lender.lease, names)
        self._submit(loan, then)
        return loan

    def give_back(self, loan: Loan) -> None:
        """Nothing more is read."""
        with self._lock:
            loan.closed = True
            self._forget(loan)
        if loan.accepted and loan.transfer is not None:
            loan.transfer.cancel(Reason.CANCELLED, "all that was needed is here")

    def forsake(self, lender: Lender) -> None:
        """Tell a lender that nothing of what it keeps is needed."""
        loan = Loan(lender.addresses[self._rank], lender.lease, ())
        loan.closed = True
        self._submit(loan, lambda: None)

    def _submit(self, loan: Loan, then: Callable[[], None]) -> None:
        try:
            self._pool.submit(self._open, loan, then)
        except RuntimeError:  # closed
            then()

    def _open(self, loan: Loan, then: Callable[[], None]) -> None:
        try:
            if self._tier(loan.address).attempt(lambda: self._ask(loan), False):
                self._read_from(loan)
        finally:
            then()

    def _ask(self, loan: Loan) -> bool:
        """Whether the lender has it. Raises TransferError, ConfigError."""
        seconds = self._endpoint.config.connect_timeout
        try:
            loan.connection = self._endpoint.connect(loan.address, deadline=time.monotonic() + seconds)
            loan.transfer = loan.connection.pull(loan.lease, context=loan)
            if not loan.wait(seconds):
                loan.transfer.cancel(Reason.DEADLINE, "no answer in time")
                raise TransferTimeout("it does not answer")
        except (TransferError, ConfigError) as error:
            log.warning("blocks are not taken over from %s: %s", loan.address, error.message)
            raise
        if not loan.accepted:
            log.warning("blocks are not taken over from %s: %s", loan.address, loan.transfer.message or "it refuses")
        return loan.accepted

    def _read_from(self, loan: Loan) -> None:
        with self._lock:
            closed = loan.closed
            if not closed:
                for name in loan.names:
                    self._loans.setdefault(name, []).append(loan)
        if closed:  # meanwhile, or from the beginning
            self.give_back(loan)

    def _forget(self, loan: Loan) -> None:
        for name in loan.names:
            others = [one for one in self._loans.pop(name, ()) if one is not loan]
            if others:
                self._loans[name] = others

    def _tier(self, address: str) -> StoreTier:
        with self._lock:
            tier = self._tiers.pop(address, None) or StoreTier(ReadOnlyStore(address), writable=False)
            self._tiers[address] = tier
            if len(self._tiers) > _KNOWN:
                self._tiers.popitem(last=False)
            return tier

    # What TieredStore calls

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        lengths = [0] * len(names)
        for loan, which in self._by_loan(names):
            connection = loan.connection
            assert connection is not None
            asked, into = [names[i] for i in which], [buffers[i] for i in which]
            found = self._tier(loan.address).attempt(
                lambda connection=connection, asked=asked, into=into: connection.get(asked, into, deadline=deadline),  # type: ignore[misc]
                [0] * len(which),
            )
            for i, length in zip(which, found, strict=True):
                lengths[i] = length
        return lengths

    def _by_loan(self, names: Sequence[Name]) -> list[tuple[Loan, list[int]]]:
        found: dict[int, tuple[Loan, list[int]]] = {}
        with self._lock:
            for i, name in enumerate(names):
                loans = self._loans.get(name)
                if loans:
                    found.setdefault(id(loans[0]), (loans[0], []))[1].append(i)
        return list(found.values())

    def close(self) -> None:
        """No loan is opened any more."""
        with contextlib.suppress(RuntimeError):
            self._pool.shutdown(wait=False, cancel_futures=True)
