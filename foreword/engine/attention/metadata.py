"""Where the tokens of a step lie, and which of its sequences read the same keys: from block tables, before any arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.blocks.runs import consecutive_runs
from foreword.engine.sequence import Chunk

MAX_RUNS = 3
LONG_RUN = 256
MIN_SHARED_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Keys:
    """Slots that hold consecutive tokens of one sequence: runs to be viewed, and blocks to be gathered.

    Attributes:
        runs: intervals `[low, high)` of slots.
        blocks: block numbers, in the order of the tokens; their first `skip` slots do not count, nor does what follows
            the `gathered` slots after them. None if the runs are all.
        count: tokens in runs and blocks together.
    """

    runs: tuple[tuple[int, int], ...]
    blocks: Tensor | None
    skip: int
    gathered: int
    count: int


def locate(
    table: Sequence[int], start: int, stop: int, block_size: int, device: torch.device, *, ordered: bool = False
) -> Keys:
    """Where tokens `[start, stop)` of a block table lie.

    One run is a view. Of several, the longest are views, MAX_RUNS of at least LONG_RUN tokens; the rest is gathered, whole
    blocks at a time. `ordered` keys are one run, or gathered as a whole: attention over parts forgets their order.
    """
    first, last = start // block_size, (stop - 1) // block_size
    spans = consecutive_runs(table, first, last + 1)
    if len(spans) == 1:
        low = table[first] * block_size + start - first * block_size
        return Keys(((low, low + stop - start),), None, 0, 0, stop - start)
    by_length = sorted(spans, key=lambda span: span[0] - span[1])[:MAX_RUNS]
    viewed = {span for span in by_length if (span[1] - span[0]) * block_size >= LONG_RUN and not ordered}
    # Only the first and the last block can be there in part: cut what precedes `start` and what follows `stop`.
    before, after = start - first * block_size, (last + 1) * block_size - stop
    runs = tuple(
        (
            table[low] * block_size + (before if low == first else 0),
            (table[low] + high - low) * block_size - (after if high == last + 1 else 0),
        )
        for low, high in spans
        if (low, high) in viewed
    )
    rest = [block for low, high in spans if (low, high) not in viewed for block in table[low:high]]
    if not rest:
        return Keys(runs, None, 0, 0, stop - start)
    skip = 0 if spans[0] in viewed else before
    gathered = stop - start - sum(high - low for low, high in runs)
    return Keys(runs, torch.tensor(rest, dtype=torch.long, device=device), skip, gathered, stop - start)


@dataclass(slots=True)
class DecodeGroup:
    """Decoding sequences (rows of the step) with `shared` leading tokens in common; 0 for no shared part."""

    rows: list[int]
    chunks: list[Chunk]
    shared: int


def group_decodes(
    decodes: Sequence[tuple[int, Chunk]], window: int | None, block_size: int, *, share: bool
) -> list[DecodeGroup]:
    """Sequences that begin with the same block, and how far their tables agree. A sequence that slid past its beginning
    shares nothing. `decodes` are rows of the step and their chunks."""
    alone = DecodeGroup([], [], 0)
    together: dict[int, DecodeGroup] = {}
    for row, chunk in decodes:
        slid = window is not None and chunk.start + 1 > window
        first = chunk.sequence.table.blocks[0]
        group = alone if not share or slid else together.setdefault(first, DecodeGroup([], [], 0))
        group.rows.append(row)
        group.chunks.append(chunk)
    groups = []
    for group in together.values():
        group.shared = shared_tokens(group.chunks, block_size) if len(group.chunks) > 1 else 0
        if group.shared * (len(group.chunks) - 1) >= MIN_SHARED_TOKENS:
            groups.append(group)
        else:
            alone.rows += group.rows
            alone.chunks += group.chunks
    if alone.rows:
        order = sorted(range(len(alone.rows)), key=alone.rows.__getitem__)
        alone.chunks = [alone.chunks[i] for i in order]
        alone.rows = [alone.rows[i] for i in order]
        groups.append(alone)
    return groups


def shared_tokens(chunks: Sequence[Chunk], block_size: int) -> int:
    """Leading tokens whose blocks all tables have in common; every sequence keeps at least its newest token for itself."""
    tables = [chunk.sequence.table.blocks for chunk in chunks]
    limit = min(chunk.start for chunk in chunks) // block_size
    first = tables[0][:limit]
    agreed = limit
    for table in tables[1:]:
        if table[:agreed] != first[:agreed]:
            agreed = next(i for i, (a, b) in enumerate(zip(first, table, strict=False)) if a != b)
    return agreed * block_size
