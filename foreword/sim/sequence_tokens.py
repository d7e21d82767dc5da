"""The tokens of a simulated sequence, and what became of its request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from foreword.blocks.keys import KEY_BYTES, TokenChain, chain_keys
from foreword.engine.sequence import SequenceState
from foreword.sim.prefill import SimulatedPrefill
from foreword.sim.trace import TraceRequest

# Output tokens that the trace does not contain: a distinct token per request, above all tokens of a trace.
_UNKNOWN_OUTPUT = 1 << 31
_REQUEST_BITS = _UNKNOWN_OUTPUT - 1


@dataclass(slots=True)
class RequestOutcome:
    """The result of one request. Times are seconds of virtual time, -1 if not known yet.

    Attributes:
        cached_tokens: prompt tokens that were cached.
        loaded: those of them that were loaded from host memory, disk and the shared store.
        failovers: how often it was placed again because its replica failed.
        recomputed: tokens whose KV a failed replica had, and that the next one computed.
    """

    request: TraceRequest
    replica: str = ""
    expected_cached: int = 0
    first_token: float = -1.0
    finished: float = -1.0
    cached_tokens: int = 0
    loaded: tuple[int, int, int] = (0, 0, 0)
    failovers: int = 0
    recomputed: int = 0

    @property
    def loaded_tokens(self) -> int:
        return sum(self.loaded)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first_token - self.request.arrival

    @property
    def seconds_per_token(self) -> float:
        """Mean inter-token latency; 0 for an output of one token."""
        more = self.request.output_tokens - 1
        return (self.finished - self.first_token) / more if more else 0.0


class SequenceTokens:
    """The tokens of one sequence, in place of an array. Most of them are only counted, so they are expanded on demand.

    Unknown ones become a token that no other request has.

    Attributes:
        lost: tokens whose KV the replica had that failed before.
        answered: this replica has computed a token of the output.
        computed_for: set if only the prompt is computed here, for a decode replica that waits for its KV.
    """

    __slots__ = ("answered", "computed_for", "length", "lost", "number", "outcome")

    def __init__(self, number: int, outcome: RequestOutcome) -> None:
        self.number = number
        self.outcome = outcome
        self.length = outcome.request.prompt_tokens
        self.lost = 0
        self.answered = False
        self.computed_for: SimulatedPrefill | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, where: slice) -> array[int]:
        start, end, _ = where.indices(self.length)
        known = self.outcome.request.tokens(start, end)
        missing = end - start - len(known)
        if missing > 0:
            known.extend(array("I", (self._unknown(),)) * missing)
        return known

    def keys(self, root: bytes, block_size: int) -> list[bytes]:
        """Keys of the full blocks."""
        return self.block_keys(root, 0, self.length // block_size, block_size)

    def block_keys(self, parent: bytes, start: int, end: int, block_size: int) -> list[bytes]:
        """Keys of blocks `start` to before `end`; `parent` is the key before them.

        Where a block is one number in the trace, that number is hashed in place of the block's tokens.
        """
        request = self.outcome.request
        if request.ids_tokens != block_size:
            return chain_keys(parent, self[start * block_size : end * block_size], block_size)
        keys, ids, known = [], request.ids, len(request.ids)
        for block in range(start, end):
            one = ids[block] if block < known else self._unknown()
            parent = blake2b(parent + one.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()
            keys.append(parent)
        return keys

    def _unknown(self) -> int:
        return _UNKNOWN_OUTPUT | self.number & _REQUEST_BITS


class SimulatedChain(TokenChain):
    """The chain of a simulated sequence, of which some keys are known."""

    __slots__ = ("_sequence",)

    def __init__(self, root: bytes, block_size: int, sequence: SequenceTokens, keys: Sequence[bytes]) -> None:
        super().__init__(root, block_size)
        tokens: Any = sequence
        self.tokens, self.keys = tokens, list(keys)
        self._sequence = sequence

    def keys_to(self, num_blocks: int) -> list[bytes]:
        """See `TokenChain.keys_to`."""
        known = len(self.keys)
        if known < num_blocks:
            parent = self.keys[-1] if known else self.root
            self.keys += self._sequence.block_keys(parent, known, num_blocks, self.block_size)
        return self.keys


def tokens_of(sequence: SequenceState) -> SequenceTokens:
    """The tokens of a simulated sequence."""
    tokens: Any = sequence.table.chain.tokens
    found: SequenceTokens = tokens
    return found
