"""The decode side of disaggregated prefill: another instance computes a prompt, and its KV arrives here."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from foreword.disaggregation.context import EngineContext
from foreword.disaggregation.kv_receive import KVReceive
from foreword.disaggregation.request_messages import PrefillResult, PrefillTask, decode, encode
from foreword.engine.external_kv import KVArrival
from foreword.errors import ForewordError, TransferError
from foreword.events import TransferEnded
from foreword.transfer.transfers import KVDestination
from foreword.transfer.wire_format import Reason


class RemotePrefill(KVReceive):
    """One prompt that another instance computes (`engine.external_kv.RemoteKV`).

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
        super().__init__(context.view)
        self.min_tokens = min_tokens
        self.origin = f"prefill {address}"
        self.result: PrefillResult | None = None
        self.reason = str(Reason.CANCELLED)
        self.message = ""
        self._context = context
        self._address = address
        self._task = task
        self._length = len(task.tokens) // 4
        self._lock = threading.Lock()
        self._destination: KVDestination | None = None

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        super().begin(keys, held, blocks)
        self._context.background(lambda: self._ask(list(keys)))

    def _ask(self, keys: list[bytes]) -> None:
        """Ask for the prompt. On a thread that may wait."""
        try:
            connection = self._context.dial(self._address)
            with self._lock:
                if not self.closed:
                    task = encode(self._task)
                    self._destination = connection.pull(task, keys, have=self._held, context=self)
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
        self.done = True
        self._context.thread.post(lambda: None)  # wakes the engine, which collects it

    def close(self) -> KVArrival:
        """Stop writing. Full blocks that came whole are kept, also if the rest did not come."""
        with self._lock:
            self.closed = True
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
