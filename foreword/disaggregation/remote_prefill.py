"""The decode side of disaggregated prefill: another instance computes a prompt, and its KV arrives here."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from foreword.disaggregation.context import EngineContext
from foreword.disaggregation.kv_receive import KVReceive
from foreword.disaggregation.messages import PrefillResult, PrefillTask, decode, encode
from foreword.engine.kv_source import KVArrival
from foreword.errors import ForewordError, TransferError
<<<<<<< HEAD
from foreword.events import TransferEnded
from foreword.transfer.messages import Reason
from foreword.transfer.transfers import KVDestination
=======
from foreword.transfer.link import Payload
from foreword.transfer.messages import KVPart, Reason
from foreword.transfer.transfers import KVDestination
>>>>>>> 94f4642 (Transfer: no NIXL link; names and seams of connections; the wire stays)


class RemotePrefill(KVReceive):
    """One prompt that another instance computes (`engine.kv_source.RemoteKVSource`).

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
<<<<<<< HEAD
        self._destination: KVDestination | None = None
=======
        self._destination: KVDestination | None = None
        self._closed = self._done = False
        self._length = len(task.tokens) // 4
        self._held = 0
        self._blocks: list[int] = []
        self._mark: Any = None
        self._layers: list[int] = []
        self._all = (1 << port.last_layer + 1) - 1

    @property
    def begun(self) -> bool:
        """It was asked for: it no longer waits for blocks."""
        return bool(self._blocks)

    @property
    def done(self) -> bool:
        """Nothing more will come: `close` says what did."""
        return self._done

    @property
    def outcome(self) -> str:
        """`taken`, or why not. After `close`."""
        return "taken" if self.result is not None else self.reason or str(Reason.CANCELLED)
>>>>>>> 94f4642 (Transfer: no NIXL link; names and seams of connections; the wire stays)

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        super().begin(keys, held, blocks)
        self._context.background(lambda: self._ask(list(keys)))

    def _ask(self, keys: list[bytes]) -> None:
        """Ask for the prompt. On a thread that may wait."""
        try:
            connection = self._context.dial(self._address)
            with self._lock:
<<<<<<< HEAD
                if not self.closed:
                    task = encode(self._task)
                    self._destination = connection.pull(task, keys, have=self._held, context=self)
        except ForewordError as error:
            self.message = error.message
            self.reason = error.reason if isinstance(error, TransferError) else str(Reason.FAILED)
            self._finish()

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
=======
                if self._closed:
                    return
                self._destination = connection.pull(wire.encode(self._task), keys, have=self._held, context=self)
        except ForewordError as error:
            self.fail(error.reason if isinstance(error, TransferError) else str(Reason.FAILED), error.message)

    # On the connection's thread

    def part(self, part: KVPart, payload: Payload) -> None:
        """KV has come. Never after `close`."""
        first = part.first_block - self._held
        with payload as view:
            if first < 0 or first + part.blocks > len(self._blocks):
                raise TransferError("a part for blocks that were not asked for", reason=str(Reason.CONTENT))
            self._port.write(part, self._blocks[first : first + part.blocks], view, self._mark)
            self.bytes += len(view)
        self.parts += 1
        bits = (1 << part.layers) - 1 << part.first_layer
        whole = part.tokens // self._port.layout.block_size
        for block in range(first, first + whole):
            self._layers[block] |= bits

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
        """Everything has come. The peer may forget it from here on: it lies in blocks of this engine's."""
>>>>>>> 94f4642 (Transfer: no NIXL link; names and seams of connections; the wire stays)
        if tokens != self._length:
            destination.cancel(Reason.CONTENT, f"KV of {tokens} tokens instead of {self._length}")
            return
        # The result is set first: the engine looks at it as soon as the transfer has ended.
        self.result = decode(PrefillResult, result)
        destination.take()

<<<<<<< HEAD
    def ended(self, destination: KVDestination) -> None:
=======
    def ended(self, destination: KVDestination) -> None:
        """The transfer is over, for whatever reason."""
>>>>>>> 94f4642 (Transfer: no NIXL link; names and seams of connections; the wire stays)
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
