"""An engine among other instances: what it does for them and asks of them, over the package `transfer`.

Calls of the service come on a connection's thread and are quick: they write KV, or post work to the engine's thread. Everything
that touches blocks or queues happens on the engine's thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from foreword.disaggregation.context import EngineContext, EngineThread
from foreword.disaggregation.kv_transfer import KVSend, KVSender
from foreword.disaggregation.live_migration import Migrations, OutgoingMigration
from foreword.disaggregation.remote_prefill import PrefillService, RemotePrefill
from foreword.disaggregation.request_messages import MigrationOffer, PrefillTask, decode, pack
from foreword.engine.loop import EngineCore
from foreword.engine.request import Request
from foreword.engine.sequence import SequenceState, Step
from foreword.errors import BadRequest, ForewordError
from foreword.store.background_jobs import BackgroundJobs
from foreword.tokens.token_logprob import TokenLogprob
from foreword.transfer.link import Payload
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import KVDestination, KVSource, TransferService, TransferSide
from foreword.transfer.wire_format import Buffer, KVPart, Reason
from foreword.transfer_config import TransferConfig

if TYPE_CHECKING:
    from foreword.disaggregation.block_server import BlockServer
    from foreword.disaggregation.kv_view import KVView

log = logging.getLogger(__name__)

_DIALERS: Final = 16
# Seconds between two messages to the receivers of prompts that take long to compute.
_KEEP_ALIVE: Final = 1.0

MessageT = TypeVar("MessageT")


class Instance(TransferService):
    """The service of an engine's transfer endpoint, and the loop's `KVTransferHooks`.

    Args:
        role: `prefill`, `decode` or `both`.
        served: blocks that others may read.

    Attributes:
        draining: this instance is about to stop: it takes no prompts and no requests.
    """

    def __init__(
        self,
        core: EngineCore,
        view: KVView,
        config: TransferConfig,
        role: str,
        thread: EngineThread,
        served: BlockServer,
    ) -> None:
        super().__init__(view.layout)
        self.role = role
        self.draining = False
        self.view = view
        self.endpoint = TransferEndpoint(config, self)
        self._core = core
        self._thread = thread
        self._served = served
        self._min_tokens = config.min_tokens
        self._dialers = BackgroundJobs("dial", most=None, threads=_DIALERS)
        self._kept_alive = 0.0
        self._sender = KVSender(core, view, thread.post)
        self._context = EngineContext(core, view, thread, self.endpoint.connect, self._background)
        self._prefills = PrefillService(self._context, self._sender)
        self.migrations = Migrations(self._context, self._sender, lambda: self.draining)
        self.layer_written = self._prefills.layer_written
        core.transfers = self

    @property
    def address(self) -> str:
        """Where other instances reach it; "" before `listen`."""
        return self.endpoint.address

    @property
    def busy(self) -> bool:
        """Prompts of others are computed here, or KV is held for others."""
        return self._sender.holds_blocks or self._prefills.busy

    def listen(self) -> str:
        """Start to serve others; returns the address. Raises ConfigError."""
        return self.endpoint.listen()

    def close(self) -> None:
        """End all transfers. After the engine's thread has ended."""
        self.endpoint.close()
        self._dialers.stop()

    def _background(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the instance is closed
            self._dialers.submit(work)

    # The service, on connections' threads

    def pull_requested(self, source: KVSource) -> None:
        why = "this instance decodes; it computes no prompts for others"
        task = self._read(source, PrefillTask, "decode", why)
        if task is not None:
            source.accept()

            def refuse(error: ForewordError) -> None:
                source.cancel(Reason.REQUEST, error.message)

            self._context.compile(
                task.params, task.salt, lambda compiled: self._prefills.begin(source, task, compiled), refuse
            )

    def push_requested(self, destination: KVDestination) -> None:
        why = "this instance computes prompts; it takes no requests over"
        offer = self._read(destination, MigrationOffer, "prefill", why)
        if offer is not None:
            self.migrations.push_requested(destination, offer)

    def _read(self, transfer: TransferSide, kind: type[MessageT], unsuited: str, why: str) -> MessageT | None:
        """The description with which a transfer begins. None if it was refused, `why` for the role `unsuited`."""
        if self.role == unsuited:
            transfer.refuse(Reason.ROLE, why)
        elif self.draining:
            transfer.refuse(Reason.DRAINING, "this instance is about to stop")
        else:
            try:
                return decode(kind, transfer.request)
            except BadRequest as error:
                transfer.refuse(Reason.REQUEST, error.message)
        return None

    def accepted(self, transfer: TransferSide) -> None:
        if isinstance(transfer, KVSource):
            self.migrations.accepted(transfer)

    def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
        destination.context.part(part, payload)

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
        destination.context.finished(destination, result, tokens)

    def ended(self, transfer: TransferSide) -> None:
        context = transfer.context
        if isinstance(context, KVSend):
            self._thread.post(lambda: self._prefills.dropped(context))
            context.end()
        elif isinstance(context, OutgoingMigration):
            assert isinstance(transfer, KVSource)
            self.migrations.source_ended(context, transfer)
        elif context is not None:
            context.ended(transfer)

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        return self._served.locate(names, deadline)

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        return self._served.get(names, longest, deadline)

    # The loop's `KVTransferHooks`, on the engine's thread

    @property
    def holds_blocks(self) -> bool:
        return self._sender.holds_blocks

    def remote_prefill(self, request: Request, sequence: SequenceState) -> RemotePrefill | None:
        if request.prefill == self.address:
            return None
        index, tokens = sequence.request.index, pack(request.tokens)
        # The first token of a structured text depends on how many may follow: that instance may have other limits.
        params = replace(request.params, max_tokens=sequence.left)
        task = PrefillTask(request.id, tokens, params, sequence.seed, index, request.salt)
        return RemotePrefill(self._context, request.prefill, task, self._min_tokens)

    def remote_prefill_ended(self, sequence: SequenceState) -> None:
        remote = sequence.remote
        assert isinstance(remote, RemotePrefill)
        if remote.result is None:
            name, message = sequence.request.id, remote.message
            log.warning("request %s: computed here, not by %s: %s", name, remote.origin, message)
        self._core.notify(remote.ended_event())

    def before_step(self, step: Step) -> None:
        now = time.monotonic()
        if now - self._kept_alive >= _KEEP_ALIVE:
            self._kept_alive = now
            self._prefills.keep_alive()
        self._prefills.preempted(step.preempted)
        self.migrations.preempted(step.preempted)
        self._prefills.before_step(step)

    def prompt_computed(self, sequence: SequenceState, token: int, logprob: TokenLogprob | None) -> bool:
        return self._prefills.prompt_computed(sequence, token, logprob)

    def sequence_ended(self, sequence: SequenceState, error: str | None) -> None:
        self._prefills.sequence_ended(sequence, error)
        self.migrations.sequence_ended(sequence)
        remote = sequence.remote
        if isinstance(remote, RemotePrefill) and remote.begun and not remote.closed:  # it ends while its prompt travels
            remote.close()
            self._core.notify(remote.ended_event())

    def wait(self, seconds: float) -> None:
        self._thread.wait(seconds)
