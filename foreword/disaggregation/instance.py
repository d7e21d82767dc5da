"""One engine among others: what it does for them, and what it asks of them, over the room `transfer`.

Calls of the service come on a connection's thread and are quick: they write KV where it belongs, or put work into the engine's
inbox. Everything that touches blocks or queues happens on the engine's thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

from foreword.config import TransferConfig
from foreword.disaggregation import messages as wire
from foreword.disaggregation.migration import Arriving, Move, Moves, Plan
from foreword.disaggregation.prefill_service import Export, Exports
from foreword.disaggregation.remote_prefill import Pull
from foreword.disaggregation.sender import Lanes, Outgoing, Port
from foreword.engine.loop import EngineCore
from foreword.engine.request import Delta, Request, TokenLogprob
from foreword.engine.scheduler import SequenceState, Step
from foreword.errors import BadRequest
from foreword.events import TransferEnded
from foreword.transfer.endpoint import Endpoint
from foreword.transfer.link import Payload
from foreword.transfer.messages import Buffer, Part, Reason
from foreword.transfer.service import Idle
from foreword.transfer.transfers import Destination, Source

log = logging.getLogger(__name__)

_DIALLERS: Final = 16
# Seconds between two looks at which prompts of others need a sign of life.
_WORKING: Final = 1.0


class BlocksServed(Protocol):
    """What other instances may read of this one (`engine.served_blocks.ServedBlocks`)."""

    def locate(self, names: Sequence[bytes], deadline: float) -> int: ...
    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]: ...


class Around(Protocol):
    """What an instance needs of the engine's thread and of those who listen to it."""

    def post(self, work: Callable[[], None]) -> bool:
        """Put work into the engine's inbox; False if the engine has ended."""
        ...

    def rest(self, seconds: float) -> None:
        """On the engine's thread: sleep so long, or until there is something in its inbox."""
        ...

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Hand deltas to whoever listens. On the engine's thread."""
        ...

    def adopt(self, request: Request, output: Sequence[int], envelope: bytes) -> None:
        """A request goes on here that nobody listens to yet. On the engine's thread."""
        ...


class Instance(Idle):
    """The service of an engine's endpoint, and the loop's `Handoff`.

    Args:
        role: `prefill`, `decode` or `both`.
        around: the thread and the listeners of this engine.
        served: blocks that others may read.
    """

    def __init__(
        self,
        core: EngineCore,
        port: Port,
        config: TransferConfig,
        role: str,
        around: Around,
        served: BlocksServed | None = None,
    ) -> None:
        super().__init__(port.layout)
        self.role = role
        self.draining = False
        self.endpoint = Endpoint(config, self)
        self.lanes = Lanes()
        self.port = port
        self._core = core
        self._around = around
        self.post = around.post
        self.deliver, self.adopt = around.deliver, around.adopt
        self.notify = core.notify
        self._served = served
        self._min_tokens = config.min_tokens
        self._diallers = ThreadPoolExecutor(_DIALLERS, "foreword-dial")
        self._looked = 0.0
        self._leases = 0
        self.moves = Moves(core, port, self.lanes, self.endpoint.connect, self)
        self._exports = Exports(port, self.lanes, core.enter, core.abort, self.released, self.hold)
        self.written = self._exports.written
        core.handoff = self

    @property
    def address(self) -> str:
        """Where others reach it; "" before `listen`."""
        return self.endpoint.address

    @property
    def busy(self) -> bool:
        """Whether prompts of others are computed here, or KV is held for others."""
        return self._leases > 0 or self._exports.count > 0

    def listen(self) -> str:
        """Begin to serve others; returns the address. Raises ConfigError."""
        return self.endpoint.listen()

    def close(self) -> None:
        """End all transfers. After the engine's thread has ended."""
        self.endpoint.close()
        self._diallers.shutdown(wait=False, cancel_futures=True)

    # The service, on connections' threads

    def wanted(self, source: Source) -> None:
        if self.role == "decode":
            source.refuse(Reason.ROLE, "this instance decodes; it computes no prompts for others")
        elif self.draining:
            source.refuse(Reason.DRAINING, "this instance is about to stop")
        else:
            try:
                task = wire.decode(wire.Task, source.request)
            except BadRequest as error:
                source.refuse(Reason.REQUEST, error.message)
                return
            source.accept()
            self.post(lambda: self._exports.begin(source, task))

    def offered(self, destination: Destination) -> None:
        if self.role == "prefill":
            destination.refuse(Reason.ROLE, "this instance computes prompts; it takes no requests over")
        elif self.draining:
            destination.refuse(Reason.DRAINING, "this instance is about to stop")
        else:
            try:
                moving = wire.decode(wire.Moving, destination.request)
            except BadRequest as error:
                destination.refuse(Reason.REQUEST, error.message)
                return
            destination.context = Arriving(moving, self.port, self.moves, started=time.monotonic())
            self.post(lambda: self.moves.consider(destination, moving))

    def accepted(self, transfer: Source | Destination) -> None:
        if isinstance(transfer, Source):
            self.moves.accepted(transfer)

    def part(self, destination: Destination, part: Part, payload: Payload) -> None:
        destination.context.part(part, payload)

    def finished(self, destination: Destination, result: bytes, tokens: int) -> None:
        destination.context.finished(destination, result, tokens)

    def ended(self, transfer: Source | Destination) -> None:
        kept = transfer.context
        if isinstance(kept, Export):
            self.post(lambda: self._exports.dropped(kept))
            kept.end()
        elif isinstance(kept, Plan | Move):
            assert isinstance(transfer, Source)
            self.moves.source_ended(transfer)
        elif kept is not None:
            kept.ended(transfer)

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        return 0 if self._served is None else self._served.locate(names, deadline)

    def get(self, names: Sequence[bytes], longest: int, deadline: float) -> Iterator[Sequence[Buffer | None]]:
        return iter(()) if self._served is None else self._served.get(names, longest, deadline)

    # Leases

    def hold(self, outgoing: Outgoing, blocks: Sequence[int]) -> None:
        """Keep blocks for a transfer. On the engine's thread."""
        self._leases += not outgoing.held and bool(blocks)
        outgoing.hold(self._core.cache, blocks)

    def released(self, outgoing: Outgoing) -> None:
        """Nothing of a transfer is needed any more. From any thread."""
        self.post(lambda: self._give_back(outgoing))

    def _give_back(self, outgoing: Outgoing) -> None:
        if outgoing.held:
            self._leases -= 1
            self._core.cache.unpin(outgoing.held)
            outgoing.held = []
        source = outgoing.source
        self.notify(
            TransferEnded(
                "prefill" if isinstance(outgoing, Export) else "move",
                "source",
                _outcome(source),
                outgoing.bytes,
                outgoing.parts,
                time.monotonic() - outgoing.started,
                hidden_bytes=outgoing.hidden_bytes if isinstance(outgoing, Export) else 0,
                pause=outgoing.pause if isinstance(outgoing, Move) else 0.0,
            )
        )

    # The loop's `Handoff`, on the engine's thread

    @property
    def expects(self) -> bool:
        """Whether memory is held for others, that comes back by itself."""
        return self._leases > 0

    def pull(self, request: Request, sequence: SequenceState) -> Pull | None:
        """How the prompt is asked for; None if this is the instance that shall compute it."""
        if request.prefill == self.address:
            return None
        params = request.params
        task = wire.Task(
            request.id, wire.pack(request.tokens), params, sequence.seed, sequence.request.index, request.salt
        )
        dial = self.endpoint.connect
        return Pull(request.prefill, task, self.port, dial, self.background, self._wake, self._min_tokens)

    def background(self, work: Callable[[], None]) -> None:
        """Run what may wait for the network."""
        with contextlib.suppress(RuntimeError):  # the instance is closed
            self._diallers.submit(work)

    def _wake(self) -> None:
        self.post(lambda: None)

    def pulled(self, sequence: SequenceState, pull: Any) -> None:
        """A prompt has come, or not."""
        if pull.result is None:
            log.warning("request %s: computed here, not by %s: %s", sequence.request.id, pull.origin, pull.message)
        self._note_pull(pull)

    def _note_pull(self, pull: Pull) -> None:
        seconds = time.monotonic() - pull.started
        self.notify(TransferEnded("prefill", "destination", pull.outcome, pull.bytes, pull.parts, seconds))

    def prepare(self, step: Step) -> None:
        self._exports.preempted(step.preempted)
        self.moves.preempted(step.preempted)
        self._exports.prepare(step)

    def is_export(self, sequence: SequenceState) -> bool:
        return self._exports.is_export(sequence)

    def computed(self, sequence: SequenceState, token: int, logprob: TokenLogprob | None) -> None:
        self._exports.finish(sequence, token, logprob)

    def sequence_ended(self, sequence: SequenceState, error: str | None) -> None:
        self._exports.ended(sequence, error)
        self.moves.sequence_ended(sequence)
        pull = sequence.pull
        if isinstance(pull, Pull) and pull.begun:  # nobody waits for its prompt any more
            pull.close()
            self._note_pull(pull)

    def look(self) -> None:
        """At every step: what has to be done now and then."""
        now = time.monotonic()
        if now - self._looked >= _WORKING:
            self._looked = now
            self._exports.working()

    def rest(self, seconds: float) -> None:
        self._around.rest(seconds)


def _outcome(transfer: Source | Destination) -> str:
    return "taken" if transfer.reason is None else str(transfer.reason)
