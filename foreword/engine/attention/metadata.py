"""Attention metadata of one step: its chunks, their block tables and slot mapping, and where their KV is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foreword.blocks.runs import consecutive_runs

# At most this many runs of blocks are read in place, each of at least LONG_RUN tokens; the rest is gathered.
MAX_RUNS = 3
LONG_RUN = 256
# Reading a shared prefix once must save at least this many tokens.
MIN_SHARED_TOKENS = 128


def pinned(numbers: Sequence[Any] | array[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers in host memory from which a copy to the device can be queued without waiting for it. PyTorch does not use
    the memory again before the copy has ended. An array has items of `dtype`, and is not changed afterwards."""
    in_place = isinstance(numbers, array) and len(numbers) > 0
    host = torch.frombuffer(numbers, dtype=dtype) if in_place else torch.tensor(numbers, dtype=dtype)
    return host.pin_memory() if device.type == "cuda" else host


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer attends.

    The scores are `softcap * tanh(scale * q k / softcap)`, over the last `window` keys. `sinks` `[heads]` are the scores of
    one more key per head, whose value is zero.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QueryChunk:
    """Consecutive tokens of one sequence in a step.

    Attributes:
        row: row of its first token in the packed step.
        start: position of its first token in the sequence.
        count: number of tokens.
        block_table: the sequence's blocks.
        write_from: first position whose K and V are written; those before it are in the cache.
    """

    row: int
    start: int
    count: int
    block_table: Sequence[int]
    write_from: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)


class AttentionMetadata:
    """Metadata that all layers of one step share.

    Attributes:
        prefills: chunks of several tokens.
        decodes: chunks of one token.
        slot_mapping: for each token of the step the slot of its K and V; -1 for a token that is in the cache.
        share_prefixes: read a prefix that decoding sequences have in common once for all of them.
        window: the block tables have the blocks of the last `window` tokens; None if they have all.
    """

    def __init__(
        self,
        chunks: Iterable[QueryChunk],
        block_size: int,
        *,
        share_prefixes: bool = True,
        window: int | None = None,
    ) -> None:
        self.window = window
        self.block_size = block_size
        self.share_prefixes = share_prefixes
        self.prefills: list[QueryChunk] = []
        self.decodes: list[QueryChunk] = []
        self.slot_mapping: list[int] = []
        for chunk in chunks:
            (self.decodes if chunk.count == 1 else self.prefills).append(chunk)
            for position in range(chunk.start, chunk.end):
                block, offset = divmod(position, block_size)
                written = position >= chunk.write_from
                self.slot_mapping.append(chunk.block_table[block] * block_size + offset if written else -1)

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)

    @cached_property
    def work(self) -> tuple[bool, int, float]:
        """The part of the step that attends the most: whether it is of prompts, its sequences, and keys per token."""
        rows = sum(chunk.count for chunk in self.prefills)
        of_prompts = sum(chunk.count * (chunk.start + chunk.end) / 2 for chunk in self.prefills)
        of_decodes = sum(chunk.end for chunk in self.decodes)
        if of_prompts > of_decodes:
            return True, len(self.prefills), of_prompts / rows
        return False, len(self.decodes), of_decodes / max(1, len(self.decodes))

    def decode_groups(self, window: int | None, saving: int = MIN_SHARED_TOKENS) -> list[DecodeGroup]:
        """The decoding sequences, grouped by common prefix where reading it once saves `saving` tokens; the last group is of
        all others. A sequence whose window has left its prefix shares nothing."""
        alone: list[int] = []
        by_first_block: dict[int, list[int]] = {}
        for number, chunk in enumerate(self.decodes):
            if not self.share_prefixes or (window is not None and chunk.end > window):
                alone.append(number)
            else:
                by_first_block.setdefault(chunk.block_table[0], []).append(number)
        groups = []
        for numbers in by_first_block.values():
            chunks = [self.decodes[number] for number in numbers]
            # Tables are compared only if a prefix of the shortest sequence's length would save enough.
            most = min(chunk.start for chunk in chunks) * (len(chunks) - 1)
            group = DecodeGroup(chunks, numbers, shared_tokens(chunks, self.block_size) if most >= saving else 0)
            if group.saved >= max(saving, 1):
                groups.append(group)
            else:
                alone += numbers
        if alone:
            groups.append(DecodeGroup([self.decodes[number] for number in sorted(alone)], sorted(alone), 0))
        return groups


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences whose first `shared` tokens are in the same blocks; 0 if they share nothing. `numbers` are their
    places among the step's decoding sequences."""

    chunks: list[QueryChunk]
    numbers: list[int]
    shared: int

    @property
    def saved(self) -> int:
        """Tokens that need not be read if the shared ones are read once."""
        return self.shared * (len(self.chunks) - 1)


def shared_tokens(chunks: Sequence[QueryChunk], block_size: int) -> int:
    """Tokens of the common prefix of several block tables. The newest token of a sequence is never in it."""
    agreed = min(chunk.start for chunk in chunks) // block_size
    first = chunks[0].block_table[:agreed]
    for chunk in chunks[1:]:
        other = chunk.block_table[:agreed]
        if first != other:  # at once, which is faster
            agreed = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
            first = first[:agreed]
    return agreed * block_size


@dataclass(frozen=True, slots=True)
class KVSlots:
    """The slots of consecutive tokens of one sequence: runs of slots, which are views, and blocks to be gathered.

    Attributes:
        runs: intervals `[low, high)` of slots.
        blocks: numbers of the blocks to gather, in the order of the tokens; None if there are none.
        skip: leading slots of `blocks` that do not count.
        gathered: number of slots of `blocks` that count, after `skip`.
        count: tokens in runs and blocks together.
    """

    runs: tuple[tuple[int, int], ...]
    blocks: Tensor | None
    skip: int
    gathered: int
    count: int


def find_kv_slots(
    block_table: Sequence[int], start: int, stop: int, block_size: int, device: torch.device, *, ordered: bool = False
) -> KVSlots:
    """The slots of tokens `[start, stop)` of a block table.

    One run is a view. Of several, the MAX_RUNS longest are views if they have LONG_RUN tokens; the other blocks are
    gathered. With `ordered` the result is one run, or all blocks gathered: several runs lose the order of the tokens.
    """
    first, last = start // block_size, (stop - 1) // block_size
    spans = consecutive_runs(block_table, first, last + 1)
    if len(spans) == 1:
        low = block_table[first] * block_size + start - first * block_size
        return KVSlots(((low, low + stop - start),), None, 0, 0, stop - start)
    longest = sorted(spans, key=lambda span: span[0] - span[1])[:MAX_RUNS]
    viewed = {span for span in longest if (span[1] - span[0]) * block_size >= LONG_RUN and not ordered}
    # Only the first and the last block may be partial: cut what precedes `start` and what follows `stop`.
    before, after = start - first * block_size, (last + 1) * block_size - stop
    runs = tuple(
        (
            block_table[low] * block_size + (before if low == first else 0),
            (block_table[low] + high - low) * block_size - (after if high == last + 1 else 0),
        )
        for low, high in spans
        if (low, high) in viewed
    )
    rest = [block for low, high in spans if (low, high) not in viewed for block in block_table[low:high]]
    if not rest:
        return KVSlots(runs, None, 0, 0, stop - start)
    skip = 0 if spans[0] in viewed else before
    gathered = stop - start - sum(high - low for low, high in runs)
    return KVSlots(runs, torch.tensor(rest, dtype=torch.long, device=device), skip, gathered, stop - start)
