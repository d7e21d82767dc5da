"""Disaggregated prefill, both sides.

On the decode side another instance computes a prompt, and its KV arrives here. On the prefill side prompts of other instances
are computed here, and sent layer by layer. Such a prompt is a sequence like any other (chunks, batches, prefix hits) with one
token to generate. Before a step is computed, the blocks that it will fill are reserved. After each layer the runner reports
that the layer's K and V are written; then that layer of the reserved blocks is queued, and travels while the next layers are
computed. Cached blocks are sent with the first step, not before it: another sequence of the same step may be the one that
fills them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foreword.disaggregation.context import EngineContext
from foreword.disaggregation.kv_transfer import KVRange, KVReceive, KVSend, KVSender
from foreword.disaggregation.request_messages import PrefillResult, PrefillTask, decode, encode, unpack
from foreword.engine.external_kv import KVArrival
from foreword.engine.request import Request
from foreword.engine.sequence import SequenceState, Step
from foreword.errors import ForewordError
from foreword.events import TransferEnded
from foreword.tokens.token_logprob import TokenLogprob
from foreword.transfer.errors import TransferError
from foreword.transfer.transfers import KVDestination, KVSource
from foreword.transfer.wire_format import Reason

if TYPE_CHECKING:
    from foreword.engine.structured.compiler import CompiledOutput


class RemotePrefill(KVReceive):
    """A prompt that another instance computes (`engine.external_kv.RemoteKV`).

    Args:
        address: transfer address of that instance.
        task: the request as that instance gets it.
        min_tokens: fewer tokens are computed here.

    Attributes:
        origin: that instance, in cache reports.
        result: the token after the prompt; None if the prompt did not come whole.
        reason, message: why it did not.
    """

    def __init__(self, context: EngineContext, address: str, task: PrefillTask, min_tokens: int) -> None:
        super().__init__(context.view, lambda: context.thread.post(lambda: None))
        self.min_tokens = min_tokens
        self.origin = f"prefill {address}"
        self.result: PrefillResult | None = None
        self.reason = str(Reason.CANCELLED)
        self.message = ""
        self._context = context
        self._address = address
        self._task = task
        self._length = len(task.tokens) // 4
        self._destination: KVDestination | None = None

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        super().begin(keys, held, blocks)
        self._context.background(lambda: self._ask(list(keys)))

    def _ask(self, keys: list[bytes]) -> None:
        """Ask for the prompt. On a thread that may wait."""
        try:
            connection = self._context.dial(self._address)
            if not self._wanted():
                return
            destination = connection.pull(encode(self._task), keys, have=self._held, context=self)
            # `close` either finds the transfer, or is seen here: the engine's thread does not wait for a message to a peer.
            with self._lock:
                self._destination, wanted = destination, self._wanted()
            if not wanted:
                destination.cancel()
        except ForewordError as error:
            self.message = error.message
            self.reason = error.reason if isinstance(error, TransferError) else str(Reason.FAILED)
            self._finish()

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
        if tokens != self._length:
            destination.cancel(Reason.CONTENT, f"KV of {tokens} tokens instead of {self._length}")
            return
        # The result is set first: the engine looks at it as soon as the transfer has ended.
        self.result = decode(PrefillResult, result)
        destination.take()

    def ended(self, destination: KVDestination) -> None:
        if destination.reason is not None:
            self.reason, self.message = str(destination.reason), destination.message
        self._finish()

    def _finish(self) -> None:
        self.end()
        self._context.thread.post(lambda: None)  # wakes the engine, which collects it

    def close(self) -> KVArrival:
        """Begin no part any more. Full blocks that came whole are kept, also if the rest did not come."""
        self.stop()
        if self._destination is not None:
            self._destination.cancel()
        size = self._view.layout.block_size
        start, result = self._held * size, self.result
        if result is None:
            return KVArrival(start, self._whole_blocks() * size, 0, origin=self.origin)
        cached = min(result.cached_tokens, self._length)
        token, logprob = result.token, result.logprob
        return KVArrival(start, self._length, cached, origin=self.origin, token=token, logprob=logprob)

    def ended_event(self) -> TransferEnded:
        return self.event("prefill", "taken" if self.result is not None else self.reason)


@dataclass(slots=True)
class _StepSend:
    """Blocks of one prompt that the running step writes. `kv` is None if the receiver has all of it; `last`: the prompt
    ends."""

    send: KVSend
    kv: KVRange | None
    last: bool


class PrefillService:
    """All prompts that are computed for other instances. Everything runs on the engine's thread."""

    def __init__(self, context: EngineContext, sender: KVSender) -> None:
        self._core = context.core
        self._view = context.view
        self._sender = sender
        self._sends: dict[SequenceState, KVSend] = {}
        self._step: list[_StepSend] = []

    @property
    def busy(self) -> bool:
        """Prompts wait or are being computed."""
        return bool(self._sends)

    def begin(self, source: KVSource, task: PrefillTask, compiled: CompiledOutput | None) -> None:
        """Queue a prompt. If it is invalid, the transfer ends with the reason."""
        params = replace(task.params, n=1, max_tokens=max(task.params.max_tokens or 1, 1))
        only_first = replace(params, max_tokens=1)
        try:
            request = Request(f"prefill-{source.id.hex()}", unpack(task.tokens), only_first, task.salt, task.index)
            sequence = self._core.open(request, task.seed, compiled)
        except ForewordError as error:
            source.cancel(Reason.REQUEST, error.message)
            return
        # One token is generated here, but it is drawn with the request's own parameters.
        sequence.request = replace(request, params=params)
        self._core.scheduler.add(sequence)
        send = KVSend(self._sender, source, "prefill", sequence)
        self._sends[sequence] = send
        source.context = send
        if source.outcome is not None:  # it ended before `context` was set
            self.dropped(send)
            send.end()

    def dropped(self, send: KVSend) -> None:
        """The receiver cancelled the transfer, or its connection is lost."""
        if self._sends.get(send.sequence) is send:
            self._core.abort(send.sequence.request.id)

    def preempted(self, sequences: Iterable[SequenceState]) -> None:
        """End prompts that lost their blocks: holding the part that was sent would take the memory that is short."""
        for sequence in sequences:
            send = self._sends.get(sequence)
            if send is not None:
                send.source.cancel(Reason.FULL, "memory ran short where the prompt was computed")
                self._core.abort(sequence.request.id)

    def before_step(self, step: Step) -> None:
        """Reserve what the step will write. Full blocks are sent; a partial one when it is the prompt's last."""
        self._step = []
        for chunk in step.chunks if self._sends else ():
            send = self._sends.get(chunk.sequence)
            if send is not None and not send.over:
                size, end = self._view.layout.block_size, chunk.start + chunk.count
                kv = send.reserve(end if chunk.samples else end // size * size)
                self._step.append(_StepSend(send, kv, chunk.samples))

    def layer_written(self, layer: int) -> None:
        """The running step has written K and V of a layer."""
        for one in self._step:
            number = self._view.position[layer]
            if one.kv is not None:
                one.send.put(one.kv, number, number + 1)
            if one.last and number == self._view.last_layer:
                one.send.computed = True

    def keep_alive(self) -> None:
        """Tell the receivers of prompts that wait or are being computed that this instance is alive."""
        for send in self._sends.values():
            send.source.keep_alive()

    def prompt_computed(self, sequence: SequenceState, token: int, logprob: TokenLogprob | None) -> bool:
        """Send the token after a computed prompt behind its KV. False if the prompt is not for another instance."""
        send = self._sends.get(sequence)
        if send is None:
            return False
        result = PrefillResult(token, logprob, max(sequence.cached_tokens, 0))
        send.finish(encode(result), sequence.num_prompt)
        return True

    def sequence_ended(self, sequence: SequenceState, error: str | None) -> None:
        send = self._sends.pop(sequence, None)
        if send is not None and not send.finishing:
            send.source.cancel(Reason.FAILED, error or "the prompt was ended where it was computed")
