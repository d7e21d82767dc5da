"""Requests that move: their KV is copied while they still decode, then they rest for a few steps and go on elsewhere.

The source offers a request with all its tokens; the destination takes blocks for it. Rounds follow: what has been computed so
far is sent while the request goes on, then what was computed meanwhile, until little is left. Then it is paused, the rest and
the final state travel, and whoever owns it by the protocol of `transfer` goes on with it: the destination once it has taken it,
the source where that did not come about. A request that has no KV yet is handed over without any.

Everything here runs on the engine's thread but for `Move.accepted`, `Arriving.part`, and the calls that end a transfer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

from foreword.disaggregation import messages as wire
from foreword.disaggregation.remote_prefill import Dial
from foreword.disaggregation.sender import Lanes, Outgoing, Port, Ready
from foreword.engine.loop import EngineCore
from foreword.engine.request import Delta, Departure, Request
from foreword.engine.scheduler import SequenceState
from foreword.errors import BadRequest, CannotMove, ForewordError, TransferError, TransferUnavailable
from foreword.events import Event, TransferEnded
from foreword.transfer.link import Payload
from foreword.transfer.messages import Offer, Part, Reason
from foreword.transfer.protocol import Outcome
from foreword.transfer.transfers import Destination, Source

log = logging.getLogger(__name__)

# Tokens that a request may generate while it is copied; then it is paused, however much is left.
GROWTH: Final = 64
# It is paused when no more than so many blocks are left to send, and at the latest after so many rounds.
_LITTLE: Final = 1
_ROUNDS: Final = 8
_WAIT: Final = 30.0


class Host(Protocol):
    """What moving needs of the engine around it."""

    @property
    def draining(self) -> bool: ...
    def post(self, work: Callable[[], None]) -> bool: ...
    def background(self, work: Callable[[], None]) -> object: ...
    def deliver(self, deltas: Sequence[Delta]) -> None: ...
    def hold(self, outgoing: Outgoing, blocks: Sequence[int]) -> None: ...
    def released(self, outgoing: Outgoing) -> None: ...
    def adopt(self, request: Request, output: Sequence[int], envelope: bytes) -> None: ...
    def notify(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class Moved:
    """How a request moved. Seconds; `pause` is how long it was not decoded, as the source saw it.

    Attributes:
        tokens: generated before it moved.
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


class Move(Outgoing):
    """A request that leaves."""

    def __init__(self, source: Source, port: Port, release: Callable[[Outgoing], None], plan: Plan) -> None:
        super().__init__(source, port, release)
        self.plan = plan
        self.next_block = 0
        self.rounds = 0
        self.paused_at = 0.0
        self.pause = 0.0
        self.kv_tokens = 0


@dataclass(slots=True)
class Plan:
    """What was asked for: `sequence` to `to`, as `moving`. `future` hears how it went."""

    sequence: SequenceState
    address: str
    to: str
    moving: wire.Moving
    future: Future[Moved]
    started: float
    move: Move | None = None
    gone: bool = False


@dataclass(slots=True, eq=False)
class Arriving:
    """A request that comes. `blocks` are its own, as they were when it was accepted; `mark` is of that moment."""

    moving: wire.Moving
    port: Port
    moves: Moves
    sequence: SequenceState | None = None
    blocks: tuple[int, ...] = ()
    mark: Any = None
    size: int = 0
    parts: int = 0
    started: float = 0.0

    def part(self, part: Part, payload: Payload) -> None:
        with payload as view:
            last = part.first_block + part.blocks
            if last > len(self.blocks):
                raise TransferError("a part for blocks that were not promised", reason=str(Reason.CONTENT))
            self.port.write(part, self.blocks[part.first_block : last], view, self.mark)
            self.size += len(view)
        self.parts += 1

    def finished(self, destination: Destination, result: bytes, tokens: int) -> None:
        rest = wire.decode(wire.Rest, result)
        self.moves.host.post(lambda: self.moves.take(self, destination, rest, tokens))

    def ended(self, destination: Destination) -> None:
        taken = destination.outcome is Outcome.TAKEN
        outcome = "taken" if taken else str(destination.reason)
        self.moves.host.post(lambda: self.moves.settle(self, outcome))


class Moves:
    """Both sides of requests that move."""

    def __init__(self, core: EngineCore, port: Port, lanes: Lanes, dial: Dial, host: Host) -> None:
        self.host = host
        self._core = core
        self._port = port
        self._lanes = lanes
        self._dial = dial
        self._leaving: dict[int, Plan] = {}

    # The source

    def begin(
        self, request_id: str, address: str, to: str, new_id: str, envelope: bytes, future: Future[Moved]
    ) -> None:
        """Move a running request to the instance at `address`, known to clients as `to`, where it gets the id `new_id`."""
        try:
            plan = self._plan(request_id, address, to, new_id, envelope, future)
        except ForewordError as error:
            future.set_exception(error)
            return
        self._leaving[id(plan.sequence)] = plan
        size = self._port.layout.block_size
        kv = plan.sequence.computed
        kv = kv if self._decodes(plan.sequence) else kv // size * size
        keys = plan.sequence.table.chain.keys_to(kv // size)[: kv // size]
        self.host.background(lambda: self._offer(plan, keys, kv))

    def _plan(
        self, request_id: str, address: str, to: str, new_id: str, envelope: bytes, future: Future[Moved]
    ) -> Plan:
        core = self._core
        sequence = core.sequence_of(request_id)
        if sequence is None:
            raise CannotMove("the request has just ended, or has more than one sequence")
        if id(sequence) in self._leaving or sequence in core.scheduler.paused:
            raise CannotMove("the request is moving already")
        if sequence.request.params.max_tokens == 0:
            raise CannotMove("a request that generates nothing is not worth moving")
        if sequence not in core.scheduler.running and sequence not in core.scheduler.waiting:
            raise CannotMove("the request waits for KV of its prompt; try again in a moment", reason="busy")
        request, size = sequence.request, self._port.layout.block_size
        kv = sequence.computed
        room = min(kv + GROWTH, sequence.max_total) if self._decodes(sequence) else kv // size * size
        moving = wire.Moving(
            new_id,
            wire.pack(sequence.table.chain.tokens),
            sequence.num_prompt,
            request.params,
            sequence.seed,
            sequence.max_total,
            room,
            request.index,
            request.salt,
            request.want_cache_report,
            envelope,
        )
        return Plan(sequence, address, to, moving, future, time.monotonic())

    def _decodes(self, sequence: SequenceState) -> bool:
        return sequence in self._core.scheduler.running and len(sequence.table) - sequence.computed == 1

    def _offer(self, plan: Plan, keys: list[bytes], kv: int) -> None:
        """On a dialling thread."""
        try:
            connection = self._dial(plan.address)
            connection.offer(wire.encode(plan.moving), keys, kv, context=plan)
        except ForewordError as error:
            failed = error
            self.host.post(lambda: self._fail(plan, failed))

    def accepted(self, source: Source) -> None:
        """The other side has blocks for it. On the connection's thread."""
        plan = source.context
        move = Move(source, self._port, self.host.released, plan)
        move.next_block = source.have
        plan.move = source.context = move
        self.host.post(lambda: self._round(move))

    def _round(self, move: Move) -> None:
        """Send what has KV by now; the last time with the request paused."""
        plan, core, size = move.plan, self._core, self._port.layout.block_size
        sequence = plan.sequence
        if plan.gone or move.over:
            move.source.cancel(Reason.CANCELLED, "the request has ended")
            return
        if sequence not in core.scheduler.running and sequence not in core.scheduler.waiting:
            move.source.cancel(Reason.CANCELLED, "KV of its prompt is being loaded")
            return
        full = sequence.computed // size
        grown = len(sequence.table) + 1 >= plan.moving.room
        little = full - move.next_block <= _LITTLE
        move.rounds += 1
        if little or grown or move.rounds >= _ROUNDS or not self._decodes(sequence):
            self._last_round(move)
            return
        self._queue(move, full * size)
        self._lanes.put(move, lambda: self._after_round(move))

    def _after_round(self, move: Move) -> None:
        """On the lane's thread: go on when everything has left."""
        if move.wait_sent(_WAIT):
            self.host.post(lambda: self._round(move))
        else:
            move.source.cancel(Reason.DEADLINE, f"the peer took nothing for {_WAIT:g} s")

    def _last_round(self, move: Move) -> None:
        sequence, now = move.plan.sequence, time.monotonic()
        scheduler, size = self._core.scheduler, self._port.layout.block_size
        decodes = self._decodes(sequence)
        scheduler.pause(sequence)
        move.paused_at = now
        kv = min(sequence.computed, move.plan.moving.room)
        move.kv_tokens = kv if decodes else kv // size * size
        self._queue(move, move.kv_tokens)
        known = len(move.plan.moving.tokens) // 4
        rest = wire.Rest(
            wire.pack(sequence.table.chain.tokens[known:]),
            sequence.cached_tokens,
            sequence.shared_tokens,
            now - sequence.arrived,
            now - sequence.last_token_at if sequence.last_token_at >= 0 else -1.0,
            sequence.preemptions,
            sequence.report,
        )
        self._lanes.put(move, lambda: move.source.finish(wire.encode(rest), move.kv_tokens))

    def _queue(self, move: Move, tokens: int) -> None:
        """Send KV up to `tokens` tokens, all layers."""
        size, table = self._port.layout.block_size, move.plan.sequence.table
        first, stop = move.next_block, -(-tokens // size)
        if stop <= first:
            return
        blocks = table.blocks[first:stop]
        self.host.hold(move, blocks)
        count = tokens - first * size
        keys = table.chain.keys_to(first + count // size)[first : first + count // size]
        layers = self._port.last_layer + 1
        self._lanes.put(move, Ready(first, blocks, count, keys, 0, layers, self._port.mark()))
        move.next_block = stop

    def source_ended(self, source: Source) -> None:
        """From any thread."""
        kept = source.context
        plan = kept.plan if isinstance(kept, Move) else kept
        self.host.post(lambda: self._departed(plan, source))
        if isinstance(kept, Move):
            kept.end()

    def _departed(self, plan: Plan, source: Source) -> None:
        sequence, move = plan.sequence, plan.move
        if source.outcome is Outcome.TAKEN and move is not None:
            self._leaving.pop(id(sequence), None)
            move.pause = time.monotonic() - move.paused_at
            seconds = time.monotonic() - plan.started
            if not plan.gone:
                plan.gone = True
                departure = Departure(plan.to, plan.moving.id, sequence.num_output)
                self.host.deliver([self._core.depart(sequence, departure)])
            log.info(
                "request %s moved to %s in %.3f s, paused for %.3f s", plan.moving.id, plan.to, seconds, move.pause
            )
            moved = Moved(
                plan.moving.id, sequence.num_output, move.kv_tokens, move.bytes, move.rounds, seconds, move.pause
            )
            plan.future.set_result(moved)
        elif source.outcome is Outcome.UNKNOWN:
            error = TransferUnavailable("nobody can say whether the request has moved", reason=str(Reason.UNKNOWN))
            if not plan.gone:
                self.host.deliver([self._core.end(sequence, error.message)])
            self._fail(plan, error)
        else:
            reason, text = str(source.reason), source.message
            kind = CannotMove if source.reason in _ITS_FAULT else TransferUnavailable
            self._fail(plan, kind(f"{plan.to} did not take the request ({reason}): {text}", reason=reason))

    def _fail(self, plan: Plan, error: ForewordError) -> None:
        """It goes on here."""
        self._leaving.pop(id(plan.sequence), None)
        if plan.sequence in self._core.scheduler.paused and not plan.gone:
            self._core.scheduler.resume(plan.sequence)
        if plan.move is None:
            seconds = time.monotonic() - plan.started
            outcome = error.reason if isinstance(error, TransferError) else str(Reason.FAILED)
            self.host.notify(TransferEnded("move", "source", outcome, 0, 0, seconds))
        log.warning("request %s stays: %s", plan.moving.id, error.message)
        if not plan.future.done():
            plan.future.set_exception(error)

    def preempted(self, sequences: Sequence[SequenceState]) -> None:
        """A request that lost its blocks stays; it can be moved again."""
        for sequence in sequences:
            plan = self._leaving.get(id(sequence))
            if plan is not None and plan.move is not None:
                plan.move.source.cancel(Reason.CANCELLED, "memory ran short and it lost its blocks")

    def sequence_ended(self, sequence: SequenceState) -> None:
        """It has ended, or its client has left."""
        plan = self._leaving.get(id(sequence))
        if plan is not None and not plan.gone:
            plan.gone = True
            if plan.move is not None:
                plan.move.source.cancel(Reason.CANCELLED, "the request has ended")

    # The destination

    def consider(self, destination: Destination, moving: wire.Moving) -> None:
        """Take blocks for a request that is offered, or refuse."""
        arriving: Arriving = destination.context
        opening = destination.opening
        assert isinstance(opening, Offer)
        try:
            sequence = self._sequence(moving, opening.tokens)
        except ForewordError as error:
            _refuse(destination, Reason.REQUEST, error.message)
            return
        have = self._core.scheduler.hold(sequence, moving.room, opening.tokens // self._port.layout.block_size)
        if have is None:
            self._core.discard(sequence)
            _refuse(destination, Reason.FULL, "no blocks, or no place in the batch, are free for it")
            return
        arriving.sequence, arriving.blocks = sequence, tuple(sequence.table.blocks)
        arriving.mark = self._port.mark()
        try:
            destination.accept(have)
        except TransferError:  # it ended before it was looked at
            self._core.discard(sequence)

    def _sequence(self, moving: wire.Moving, kv_tokens: int) -> SequenceState:
        """The request that is offered, not in any queue yet. Raises BadRequest where it cannot go on here."""
        tokens, limits = wire.unpack(moving.tokens), self._core.limits
        if moving.max_total > limits.max_model_len:
            raise BadRequest(f"it may become {moving.max_total} tokens long; {limits.max_model_len} fit here")
        fits = kv_tokens <= moving.room <= moving.max_total and kv_tokens < len(tokens) <= moving.max_total
        if not fits or not all(token < limits.vocab_size for token in tokens):
            raise BadRequest("its description contradicts itself")
        prompt, output = tokens[: moving.prompt], tokens[moving.prompt :]
        report = moving.want_cache_report
        request = Request(moving.id, prompt, moving.params, moving.salt, moving.index, report)
        sequence = self._core.open(request, moving.seed)
        sequence.table.chain.tokens.extend(output)
        sequence.max_total = moving.max_total
        return sequence

    def take(self, arriving: Arriving, destination: Destination, rest: wire.Rest, tokens: int) -> None:
        """All of it is here: go on with it, if it is ours."""
        sequence, core, size = arriving.sequence, self._core, self._port.layout.block_size
        if sequence is None or core.sequence_of(arriving.moving.id) is not sequence:
            destination.cancel(Reason.CANCELLED, "the request was ended")
            return
        now, table, output = time.monotonic(), sequence.table, wire.unpack(rest.tokens)
        length = len(table) + len(output)
        if not (tokens <= arriving.moving.room and tokens < length < arriving.moving.max_total):
            destination.cancel(Reason.CONTENT, f"KV of {tokens} tokens does not belong to a text of {length}")
            return
        if self.host.draining:  # whoever drains has looked at what is here; nobody would see to this one
            destination.cancel(Reason.DRAINING, "this instance is about to stop")
            return
        if not destination.take():
            return
        table.chain.tokens.extend(output)
        sequence.computed = tokens
        core.cache.publish(table, tokens // size)
        sequence.arrived, sequence.admitted_at = now - rest.age, now
        sequence.last_token_at = now - rest.token_age if rest.token_age >= 0 else -1.0
        sequence.cached_tokens, sequence.shared_tokens = rest.cached_tokens, rest.shared_tokens
        sequence.preemptions, sequence.report = rest.preemptions, rest.report
        core.replay(sequence)
        self.host.adopt(sequence.request, sequence.output, arriving.moving.envelope)
        core.scheduler.resume(sequence)

    def settle(self, arriving: Arriving, outcome: str) -> None:
        """The transfer is over. What was not taken is forgotten."""
        sequence = arriving.sequence
        if outcome != "taken" and sequence is not None and self._core.sequence_of(arriving.moving.id) is sequence:
            self._core.discard(sequence)
        seconds = time.monotonic() - arriving.started
        self.host.notify(TransferEnded("move", "destination", outcome, arriving.size, arriving.parts, seconds))


def _refuse(destination: Destination, reason: Reason, message: str) -> None:
    with contextlib.suppress(TransferError):  # it ended before it was looked at
        destination.refuse(reason, message)


# Trying again with the same instance would not help, or not now; the request itself is fine.
_ITS_FAULT: Final = (Reason.FULL, Reason.ROLE, Reason.DRAINING, Reason.REQUEST, Reason.LAYOUT)
