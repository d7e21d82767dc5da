"""Live migration: a request's KV is copied while it still decodes; then it pauses for a few steps and continues elsewhere.

The source offers a request with all its tokens, and the destination takes blocks for it. Rounds follow: the KV computed so far
is sent while the request keeps decoding, then what was computed meanwhile, until little is left. Then the request is paused,
and the rest of its KV and its final state are sent. The protocol of `transfer` decides which instance owns it: the
destination once it has taken it, otherwise the source, which resumes it. A request that has no KV yet migrates without any.

Everything runs on the engine's thread except where a docstring names another one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from foreword.disaggregation.context import EngineContext
from foreword.disaggregation.kv_transfer import KVReceive, KVSend, KVSender
from foreword.disaggregation.request_messages import MigrationOffer, MigrationState, decode, encode, pack, unpack
from foreword.engine.external_kv import KVArrival
from foreword.engine.request import MigratedTo, Request
from foreword.engine.sequence import SequenceState
from foreword.errors import BadRequest, ForewordError
from foreword.events import TransferEnded
from foreword.transfer.errors import CannotMigrate, TransferError, TransferUnavailable
from foreword.transfer.protocol import TransferOutcome
from foreword.transfer.transfers import KVDestination, KVSource
from foreword.transfer.wire_format import PushRequest, Reason

if TYPE_CHECKING:
    from foreword.engine.structured.compiler import CompiledOutput

log = logging.getLogger(__name__)

# Tokens that a request may generate while its KV is copied; then it is paused, however much is left.
GROWTH: Final = 64
# It is paused when no more than so many blocks are left to send, and at the latest after so many rounds.
_LAST_BLOCKS: Final = 1
_ROUNDS: Final = 8
# The destination cannot take the request, now or ever; the request itself and the connection are fine.
_WRONG_KEYS: Final = "the keys of its blocks are not those of its tokens"
_REFUSALS: Final = (Reason.FULL, Reason.ROLE, Reason.DRAINING, Reason.REQUEST, Reason.LAYOUT)


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """How a request migrated. Seconds; `pause` is how long it was not decoded, as the source saw it.

    Attributes:
        tokens: generated before it migrated.
        kv_tokens: whose KV the new instance has.
        rounds: in which its KV was sent, the last one while it was paused.
    """

    request_id: str
    tokens: int
    kv_tokens: int
    bytes: int
    rounds: int
    seconds: float
    pause: float


@dataclass(slots=True, eq=False)
class OutgoingMigration:
    """A request that migrates from here.

    Attributes:
        address, to: of the destination, for transfers and for clients.
        future: gets the result, or the error.
        send: its KV; None until the destination has accepted.
        ended: the request has ended here.
    """

    sequence: SequenceState
    address: str
    to: str
    offer: MigrationOffer
    future: Future[MigrationResult]
    started: float
    send: KVSend | None = None
    rounds: int = 0
    paused_at: float = 0.0
    kv_tokens: int = 0
    ended: bool = False


class IncomingMigration(KVReceive):
    """A request that migrates here: the `engine.external_kv.ExternalKV` of its sequence, until it is taken.

    Attributes:
        sequence: None until it was opened.
        kv_tokens: tokens whose KV has come; 0 until it is taken.
    """

    def __init__(
        self, migrations: Migrations, context: EngineContext, destination: KVDestination, offer: MigrationOffer
    ) -> None:
        super().__init__(context.view, lambda: context.thread.post(lambda: None))
        self.destination = destination
        self.offer = offer
        self.sequence: SequenceState | None = None
        self.kv_tokens = 0
        self._migrations = migrations
        self._post = context.thread.post

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        super().begin(keys, held, blocks)
        with contextlib.suppress(TransferError):  # it ended before; `ended` discards the sequence
            self.destination.accept(held)

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
        state = decode(MigrationState, result)
        self._post(lambda: self._migrations.take(self, state, tokens))

    def ended(self, destination: KVDestination) -> None:
        outcome = "taken" if destination.outcome is TransferOutcome.TAKEN else str(destination.reason)
        self._post(lambda: self._migrations.settle(self, outcome))

    def close(self) -> KVArrival:
        self.stop()
        if not self.over:
            self.destination.cancel(Reason.CANCELLED, "the request was ended")
        return KVArrival(self._held * self._view.layout.block_size, self.kv_tokens, 0)


class Migrations:
    """Both sides of migration.

    Args:
        is_draining: this instance is about to stop, and takes no requests.
    """

    def __init__(self, context: EngineContext, sender: KVSender, is_draining: Callable[[], bool]) -> None:
        self._context = context
        self._core = context.core
        self._block_size = context.view.layout.block_size
        self._sender = sender
        self._is_draining = is_draining
        self._outgoing: dict[SequenceState, OutgoingMigration] = {}

    # The source

    def begin(
        self, request_id: str, address: str, to: str, new_id: str, envelope: bytes, future: Future[MigrationResult]
    ) -> None:
        """Migrate a running request to the instance at `address`, known to clients as `to`, where its id is `new_id`."""
        try:
            sequence = self._movable(request_id)
        except ForewordError as error:
            future.set_exception(error)
            return
        kv = self._kv_tokens(sequence)
        # No more tokens than this have KV when it arrives.
        room = min(kv + GROWTH, sequence.max_total) if self._decodes(sequence) else kv
        request, tokens = sequence.request, pack(sequence.table.chain.tokens)
        limits = (request.params, sequence.seed, sequence.max_total, room)
        rest = (request.index, request.salt, request.want_cache_report, envelope)
        offer = MigrationOffer(new_id, tokens, sequence.num_prompt, *limits, *rest, retain=request.retain)
        migration = OutgoingMigration(sequence, address, to, offer, future, time.monotonic())
        self._outgoing[sequence] = migration
        full = kv // self._block_size
        keys = sequence.table.chain.keys_to(full)[:full]
        self._context.background(lambda: self._offer(migration, keys, kv))

    def _movable(self, request_id: str) -> SequenceState:
        """The sequence of a request. Raises CannotMigrate."""
        scheduler, sequence = self._core.scheduler, self._core.sequence_of(request_id)
        if sequence is None:
            raise CannotMigrate("the request has just ended, or has more than one sequence")
        if sequence in self._outgoing or sequence in scheduler.paused:
            raise CannotMigrate("the request is migrating already")
        if sequence.request.params.max_tokens == 0:
            raise CannotMigrate("a request that generates nothing is not worth migrating")
        if sequence.needs_logits:
            raise CannotMigrate("the log-probabilities of its prompt are being computed; try again", reason="busy")
        if sequence not in scheduler.running and sequence not in scheduler.waiting:
            raise CannotMigrate("the request waits for KV of its prompt; try again in a moment", reason="busy")
        return sequence

    def _decodes(self, sequence: SequenceState) -> bool:
        return sequence in self._core.scheduler.running and len(sequence.table) - sequence.computed == 1

    def _kv_tokens(self, sequence: SequenceState) -> int:
        """Tokens whose KV can be sent: of a prompt that is being computed, full blocks only."""
        partial = 0 if self._decodes(sequence) else sequence.computed % self._block_size
        return sequence.computed - partial

    def _offer(self, migration: OutgoingMigration, keys: list[bytes], kv: int) -> None:
        """On a thread that may wait."""
        try:
            connection = self._context.dial(migration.address)
            connection.push(encode(migration.offer), keys, kv, context=migration)
        except ForewordError as error:
            failed = error
            self._context.thread.post(lambda: self._fail(migration, failed))

    def accepted(self, source: KVSource) -> None:
        """The destination has blocks for it. On the connection's thread."""
        migration: OutgoingMigration = source.context
        send = migration.send = KVSend(self._sender, source, "move", migration.sequence)
        self._context.thread.post(lambda: self._round(migration, send))

    def _round(self, migration: OutgoingMigration, send: KVSend) -> None:
        """Send what has KV by now; the last time with the request paused."""
        sequence, scheduler = migration.sequence, self._core.scheduler
        if migration.ended or send.over:
            send.source.cancel(Reason.CANCELLED, "the request has ended")
            return
        if sequence not in scheduler.running and sequence not in scheduler.waiting:
            send.source.cancel(Reason.CANCELLED, "KV of its prompt is being loaded")
            return
        full = sequence.computed // self._block_size
        migration.rounds += 1
        grown = len(sequence.table) + 1 >= migration.offer.room
        last = full - send.next_block <= _LAST_BLOCKS or grown or migration.rounds >= _ROUNDS
        if last or not self._decodes(sequence):
            self._last_round(migration, send)
            return
        self._queue(send, full * self._block_size)
        self._sender.put(send, lambda: self._next_round(migration, send))

    def _next_round(self, migration: OutgoingMigration, send: KVSend) -> None:
        """When everything queued is sent. On the queue's thread."""
        send.wait_sent()
        self._context.thread.post(lambda: self._round(migration, send))

    def _last_round(self, migration: OutgoingMigration, send: KVSend) -> None:
        sequence, offer, now = migration.sequence, migration.offer, time.monotonic()
        decodes = self._decodes(sequence)
        self._core.scheduler.pause(sequence)
        migration.paused_at = now
        kv = min(sequence.computed, offer.room)
        migration.kv_tokens = kv if decodes else kv // self._block_size * self._block_size
        self._queue(send, migration.kv_tokens)
        state = MigrationState(
            pack(sequence.table.chain.tokens[len(offer.tokens) // 4 :]),
            sequence.cached_tokens,
            sequence.shared_tokens,
            now - sequence.arrived,
            now - sequence.last_token_at if sequence.last_token_at >= 0 else -1.0,
            sequence.preemptions,
            sequence.report,
            sequence.table.hidden,
        )
        send.finish(encode(state), migration.kv_tokens)

    def _queue(self, send: KVSend, tokens: int) -> None:
        """Send KV up to `tokens` tokens, all layers."""
        kv = send.reserve(tokens)
        if kv is not None:
            send.put(kv, 0, self._context.view.last_layer + 1)

    def source_ended(self, migration: OutgoingMigration, source: KVSource) -> None:
        """From any thread."""
        self._context.thread.post(lambda: self._settle_source(migration, source))
        if migration.send is not None:
            migration.send.end()

    def _settle_source(self, migration: OutgoingMigration, source: KVSource) -> None:
        if source.outcome is TransferOutcome.TAKEN and migration.send is not None:
            self._end_taken(migration, migration.send)
        elif source.outcome is TransferOutcome.UNKNOWN:
            error = TransferUnavailable("it is unknown whether the request has migrated", reason=str(Reason.UNKNOWN))
            if not migration.ended:
                self._context.thread.deliver([self._core.end_failed(migration.sequence, error.message)])
            self._fail(migration, error)
        else:
            reason, text = str(source.reason), source.message
            final = migration.ended or source.reason in _REFUSALS
            kind = CannotMigrate if final else TransferUnavailable
            self._fail(migration, kind(f"{migration.to} did not take the request ({reason}): {text}", reason=reason))

    def _end_taken(self, migration: OutgoingMigration, send: KVSend) -> None:
        """The destination owns the request."""
        sequence, to, name = migration.sequence, migration.to, migration.offer.id
        self._outgoing.pop(sequence, None)
        now = time.monotonic()
        seconds, send.pause = now - migration.started, now - migration.paused_at
        if not migration.ended:
            migration.ended = True
            delta = self._core.end_migrated(sequence, MigratedTo(to, name, sequence.num_output))
            self._context.thread.deliver([delta])
        log.info("request %s migrated to %s in %.3f s, paused for %.3f s", name, to, seconds, send.pause)
        counts = (sequence.num_output, migration.kv_tokens, send.bytes, migration.rounds, seconds, send.pause)
        migration.future.set_result(MigrationResult(name, *counts))

    def _fail(self, migration: OutgoingMigration, error: ForewordError) -> None:
        """The request continues here."""
        self._outgoing.pop(migration.sequence, None)
        if migration.sequence in self._core.scheduler.paused and not migration.ended:
            self._core.scheduler.resume(migration.sequence)
        if migration.send is None:
            seconds = time.monotonic() - migration.started
            outcome = error.reason if isinstance(error, TransferError) else str(Reason.FAILED)
            self._core.notify(TransferEnded("move", "source", outcome, 0, 0, seconds))
        log.warning("request %s did not migrate: %s", migration.offer.id, error.message)
        if not migration.future.done():
            migration.future.set_exception(error)

    def preempted(self, sequences: Iterable[SequenceState]) -> None:
        """A request that lost its blocks stays; it can be migrated again."""
        for sequence in sequences:
            migration = self._outgoing.get(sequence)
            if migration is not None and migration.send is not None:
                migration.send.source.cancel(Reason.CANCELLED, "memory ran short and it lost its blocks")

    def sequence_ended(self, sequence: SequenceState) -> None:
        """The sequence has generated its last token, or its client has left."""
        migration = self._outgoing.get(sequence)
        if migration is not None and not migration.ended:
            migration.ended = True
            if migration.send is not None:
                migration.send.source.cancel(Reason.CANCELLED, "the request has ended")

    # The destination

    def push_requested(self, destination: KVDestination, offer: MigrationOffer) -> None:
        """On the connection's thread."""
        destination.context = incoming = IncomingMigration(self, self._context, destination, offer)
        self._context.compile(
            offer.params,
            offer.salt,
            lambda compiled: self._consider(incoming, compiled),
            lambda error: _refuse(destination, Reason.REQUEST, error.message),
        )

    def _consider(self, incoming: IncomingMigration, compiled: CompiledOutput | None) -> None:
        """Take blocks for an offered request, or refuse it."""
        destination, offer = incoming.destination, incoming.offer
        opening = destination.opening
        assert isinstance(opening, PushRequest)
        try:
            sequence = incoming.sequence = self._open(offer, opening.tokens, compiled)
        except ForewordError as error:
            _refuse(destination, Reason.REQUEST, error.message)
            return
        full = opening.tokens // self._block_size
        if _keys_differ(destination, sequence, full):
            self._core.discard(sequence)
            _refuse(destination, Reason.CONTENT, _WRONG_KEYS)
            return
        if not self._core.scheduler.admit_migrated(sequence, incoming, offer.room, full):
            self._core.discard(sequence)
            _refuse(destination, Reason.FULL, "no blocks, or no place in the batch, are free for it")

    def _open(self, offer: MigrationOffer, kv_tokens: int, compiled: CompiledOutput | None) -> SequenceState:
        """The sequence of an offered request, not in any queue yet. Raises BadRequest if it cannot continue here."""
        tokens, limits = unpack(offer.tokens), self._core.limits
        if offer.max_total > limits.max_model_len:
            raise BadRequest(f"it may become {offer.max_total} tokens long; {limits.max_model_len} fit here")
        fits = kv_tokens <= offer.room <= offer.max_total and kv_tokens < len(tokens) <= offer.max_total
        if not fits or not all(token < limits.vocab_size for token in tokens):
            raise BadRequest("its description contradicts itself")
        prompt, output = tokens[: offer.prompt], tokens[offer.prompt :]
        given = (offer.id, prompt, offer.params, offer.salt, offer.index, offer.want_cache_report)
        request = Request(*given, retain=offer.retain)
        sequence = self._core.open(request, offer.seed, compiled)
        sequence.table.chain.tokens.extend(output)
        sequence.max_total = offer.max_total
        return sequence

    def take(self, incoming: IncomingMigration, state: MigrationState, tokens: int) -> None:
        """All of it is here: continue it, unless this instance cannot."""
        sequence, destination, output = incoming.sequence, incoming.destination, unpack(state.tokens)
        if sequence is None or self._core.sequence_of(sequence.request.id) is not sequence:
            destination.cancel(Reason.CANCELLED, "the request was ended")
            return
        length = len(sequence.table) + len(output)
        if not (tokens <= incoming.offer.room and tokens < length < sequence.max_total):
            destination.cancel(Reason.CONTENT, f"KV of {tokens} tokens does not belong to a text of {length}")
            return
        sequence.table.chain.tokens.extend(output)
        if _keys_differ(destination, sequence, tokens // self._block_size):
            destination.cancel(Reason.CONTENT, _WRONG_KEYS)
            return
        if self._is_draining():  # the drain has listed the requests here already, and would miss this one
            destination.cancel(Reason.DRAINING, "this instance is about to stop")
            return
        if not destination.take():
            return
        now = time.monotonic()
        sequence.arrived, sequence.admitted_at = now - state.age, now
        sequence.last_token_at = now - state.token_age if state.token_age >= 0 else -1.0
        sequence.cached_tokens, sequence.shared_tokens = state.cached_tokens, state.shared_tokens
        sequence.preemptions, sequence.report = state.preemptions, state.report
        self._core.replay_output(sequence)
        if state.hidden:
            self._core.cache.hide(sequence.table)
        if sequence.leases is not None and sequence.cached_tokens >= 0:  # otherwise it is admitted here
            self._core.leases.admitted(sequence.leases, sequence.table, sequence.num_prompt)
        self._context.thread.add_migrated(sequence.request, sequence.output, incoming.offer.envelope)
        incoming.kv_tokens = tokens
        incoming.end()
        self._core.scheduler.collect_one(sequence)

    def settle(self, incoming: IncomingMigration, outcome: str) -> None:
        """The transfer is over. A request that was not taken is forgotten."""
        sequence = incoming.sequence
        known = sequence is not None and self._core.sequence_of(sequence.request.id) is sequence
        if outcome != "taken" and known and sequence is not None:
            self._core.discard(sequence)
        self._core.notify(incoming.event("move", outcome))


def _keys_differ(destination: KVDestination, sequence: SequenceState, full: int) -> bool:
    """Whether the source names one of the first `full` blocks otherwise than its tokens do. Its KV must not be published."""
    return destination.differing_key(sequence.table.chain.keys_to(full)[:full]) is not None


def _refuse(destination: KVDestination, reason: Reason, message: str) -> None:
    with contextlib.suppress(TransferError):  # it ended before it was looked at
        destination.refuse(reason, message)
