"""The destination's side of prefill elsewhere: a prompt's KV arrives in blocks that its sequence holds already.

Three threads: the engine's begins and closes it, a dialling thread asks the peer, the connection's reader writes what comes.
`close` is the end of writing: the room `transfer` promises that no part is under way once `cancel` has returned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from foreword.disaggregation import messages as wire
from foreword.disaggregation.sender import Port
from foreword.engine.scheduler import Arrival
from foreword.errors import ForewordError, TransferError
from foreword.transfer.link import Payload
from foreword.transfer.messages import Part, Reason
from foreword.transfer.transfers import Destination

if TYPE_CHECKING:
    from foreword.transfer.connection import Connection

Dial = Callable[[str], "Connection"]


class Pull:
    """Implements `scheduler.Pull`.

    Args:
        address: of the instance that computes.
        task: the request as that instance gets it.
        port: where KV is written.
        dial: a connection to an address; may wait. Called through `background`.
        wake: the engine should look again.
        min_tokens: fewer tokens are not worth it.
    """

    def __init__(
        self,
        address: str,
        task: wire.Task,
        port: Port,
        dial: Dial,
        background: Callable[[Callable[[], None]], object],
        wake: Callable[[], object],
        min_tokens: int,
    ) -> None:
        self.min_tokens = min_tokens
        self.origin = f"prefill {address}"
        self.bytes = self.parts = 0
        self.reason = ""
        self.message = ""
        self.started = time.monotonic()
        self.result: wire.Computed | None = None
        self._address = address
        self._task = task
        self._port = port
        self._dial = dial
        self._background = background
        self._wake = wake
        self._lock = threading.Lock()
        self._destination: Destination | None = None
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

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        """Ask for what follows the first `held` blocks; it goes into `blocks`. On the engine's thread; returns at once."""
        self.started = time.monotonic()
        self._held, self._blocks = held, list(blocks)
        self._layers = [0] * len(blocks)
        # The engine may still be at work on what these blocks were before.
        self._mark = self._port.mark()
        self._background(lambda: self._ask(list(keys)))

    def _ask(self, keys: list[bytes]) -> None:
        try:
            connection = self._dial(self._address)
            with self._lock:
                if self._closed:
                    return
                self._destination = connection.want(wire.encode(self._task), keys, have=self._held, context=self)
        except ForewordError as error:
            self.fail(error.reason if isinstance(error, TransferError) else str(Reason.FAILED), error.message)

    # On the connection's thread

    def part(self, part: Part, payload: Payload) -> None:
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

    def finished(self, destination: Destination, result: bytes, tokens: int) -> None:
        """Everything has come. The peer may forget it from here on: it lies in blocks of this engine's."""
        if tokens != self._length:
            destination.cancel(Reason.CONTENT, f"KV of {tokens} tokens instead of {self._length}")
            return
        # Before it is taken: the engine looks as soon as the transfer has ended.
        self.result = wire.decode(wire.Computed, result)
        destination.take()

    def ended(self, destination: Destination) -> None:
        """The transfer is over, for whatever reason."""
        if destination.reason is not None:
            self.reason, self.message = str(destination.reason), destination.message
        self._finish()

    def fail(self, reason: str, message: str) -> None:
        """It never began."""
        self.reason, self.message = reason, message
        self._finish()

    def _finish(self) -> None:
        self._done = True
        self._wake()

    # On the engine's thread

    def close(self) -> Arrival:
        """Nothing is written from now on; returns what has come. More calls do the same."""
        with self._lock:
            self._closed = True
        if self._destination is not None:
            self._destination.cancel()
        result = self.result
        if result is not None:
            length = self._length
            cached = min(result.cached_tokens, length)
            return Arrival(self.origin, length // self._port.layout.block_size, cached, result.token, result.logprob)
        came = next((n for n, layers in enumerate(self._layers) if layers != self._all), len(self._layers))
        return Arrival(self.origin, self._held + came, 0, None, None)
