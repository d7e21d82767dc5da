"""A prompt that another simulated replica computes than the one that decodes, and its transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from foreword.engine.external_kv import KVArrival

_MIN_TOKENS: Final = 64


class SimulatedPrefill:
    """The counterpart of `disaggregation.remote_prefill.RemotePrefill` for the scheduler of the decode replica.

    Args:
        source: the replica that computes the prompt.
        receiver: the replica that decodes.
        tokens: length of the prompt.
        block_size: tokens per block.
        on_begin: called when the receiver has blocks for the prompt. It is computed from then on.
        on_end: called when the KV has come, or never will.
    """

    from_store = False
    writing = False

    def __init__(
        self,
        source: str,
        receiver: str,
        tokens: int,
        block_size: int,
        *,
        on_begin: Callable[[SimulatedPrefill], None],
        on_end: Callable[[SimulatedPrefill], None],
    ) -> None:
        self.source, self.receiver, self.tokens = source, receiver, tokens
        self.min_tokens = _MIN_TOKENS
        self.done = self.closed = False
        self.held_tokens = 0
        self.blocks: Sequence[int] = ()
        self._block_size = block_size
        self._on_begin, self._on_end = on_begin, on_end
        self._arrival = KVArrival(0, 0, 0)

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        """The receiver has the first `held` blocks of `keys` already."""
        self.held_tokens, self.blocks = held * self._block_size, blocks
        self._arrival = KVArrival(self.held_tokens, self.held_tokens, self.held_tokens)
        self._on_begin(self)

    def arrived(self, cached_tokens: int) -> None:
        """The prompt was transferred; `cached_tokens` of it were cached where it was computed."""
        self._arrival = KVArrival(self.held_tokens, self.tokens, cached_tokens, origin=self.source)
        self.done = True
        self._on_end(self)

    def failed(self) -> None:
        """The prefill replica has failed: the receiver computes the prompt."""
        self.done = True
        self._on_end(self)

    def close(self) -> KVArrival:
        self.closed = True
        return self._arrival
