"""KV receive: KV from another instance arrives in blocks that a sequence holds already.

The engine's thread begins and closes it, the connection's reader thread writes what comes. No part is being written any more
once `KVDestination.cancel` has returned (`transfer.transfers`), so `close` ends the writing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foreword.errors import TransferError
from foreword.events import TransferEnded
from foreword.transfer.link import Payload
from foreword.transfer.transfers import KVDestination
from foreword.transfer.wire_format import KVPart, Reason

if TYPE_CHECKING:
    from foreword.disaggregation.kv_view import KVView


class KVReceive:
    """What a remote prefill and an incoming migration have in common. With `close`, subclasses are an
    `engine.external_kv.ExternalKV`.

    Attributes:
        done, closed: nothing more will come; `close` was called.
    """

    from_store = False

    def __init__(self, view: KVView) -> None:
        self.done = self.closed = False
        self._view = view
        self._started = time.monotonic()
        self._bytes = self._parts = 0
        self._held = 0
        self._blocks: list[int] = []
        self._layers: list[int] = []  # per block, a bit for each layer that has come
        self._mark: Any = None

    @property
    def begun(self) -> bool:
        """It has blocks."""
        return bool(self._blocks)

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        """Write what comes into `blocks`, which follow the first `held` blocks. On the engine's thread."""
        self._started = time.monotonic()
        self._held, self._blocks, self._layers = held, list(blocks), [0] * len(blocks)
        # The engine may still compute with the former content of these blocks.
        self._mark = self._view.mark()

    def part(self, part: KVPart, payload: Payload) -> None:
        """Write a part. On the connection's thread, never after `close`."""
        first = part.first_block - self._held
        with payload as kv:
            if first < 0 or first + part.blocks > len(self._blocks):
                raise TransferError("a part for blocks that were not asked for", reason=str(Reason.CONTENT))
            self._view.write(part, self._blocks[first : first + part.blocks], kv, self._mark)
            self._bytes += len(kv)
        self._parts += 1
        layers = (1 << part.layers) - 1 << part.first_layer
        for block in range(first, first + part.tokens // self._view.layout.block_size):
            self._layers[block] |= layers

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
        """Everything has come. On the connection's thread; the KV may be taken now or later."""
        raise NotImplementedError

    def ended(self, destination: KVDestination) -> None:
        """The transfer is over. From any thread."""
        raise NotImplementedError

    def event(self, kind: str, outcome: str) -> TransferEnded:
        """How it went. After the end."""
        return TransferEnded(kind, "destination", outcome, self._bytes, self._parts, time.monotonic() - self._started)

    def _whole_blocks(self) -> int:
        """Blocks with KV in all layers, from the sequence's first one on."""
        whole = (1 << self._view.last_layer + 1) - 1
        came = next((number for number, layers in enumerate(self._layers) if layers != whole), len(self._layers))
        return self._held + came
