"""Pin the KV of a named prefix in an engine's pool."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.blocks.prefix_cache import PrefixCache
from foreword.blocks.salt import Salt
from foreword.engine.request import Request, SamplingParams
from foreword.engine.sequence import SequenceState
from foreword.prefixes.prefix_service import PinnedKV


class PrefixPin:
    """Computes the KV of a named prefix, by a request without output, and pins its full blocks when that has finished.

    Args:
        block_bytes: bytes of KV in a block.
    """

    def __init__(
        self, cache: PrefixCache, block_bytes: int, request_id: str, tokens: Sequence[int], salt: bytes = b""
    ) -> None:
        self.request = Request(request_id, tuple(tokens), SamplingParams(max_tokens=0), salt=Salt(salt))
        self.pinned: PinnedKV | None = None
        self._cache = cache
        self._block_bytes = block_bytes

    def pin(self, sequence: SequenceState) -> None:
        """The request's `on_finish`. On the engine's thread."""
        blocks = self._cache.pin(sequence.table, len(self.request.tokens) // self._cache.block_size)
        self.pinned = PinnedKV(len(blocks) * self._block_bytes, blocks)

    def undo(self) -> None:
        """Unpin what was pinned. On the engine's thread."""
        if self.pinned is not None:
            self._cache.unpin(self.pinned.blocks)
