"""The live audit: recompute one hit in N while the engine has nothing else to do, and compare the KV.

The blocks of a hit are recomputed in segments, from the first on, into blocks that are never published. The KV of a segment
follows from its tokens and the KV before it, which has been compared by then. So an audit needs few blocks, it stops between
two segments when a request arrives, and the first block that differs is the first one that is wrong.

Recomputed KV differs by rounding: sums are taken in an order that depends on the batch. The measure is the distance of the keys
of one block in one layer, or of its values, relative to their norm. KV of other tokens, positions or layers has a distance of
about 1.
"""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch

from foreword.blocks.keys import is_public
from foreword.blocks.prefix_cache import HOLE, BlockTable, Match, PrefixCache, group_key
from foreword.blocks.salt import PUBLIC
from foreword.engine.attention.kv_tensors import block_bytes, block_distances, copy_block, distances
from foreword.engine.audit_counts import AuditCounts
from foreword.engine.request import Request, SamplingParams
from foreword.engine.sequence import Chunk, SequenceState, Step
from foreword.engine.torch_runner import TorchRunner
from foreword.prefixes.mismatch import DEVICE, Mismatch

if TYPE_CHECKING:
    from foreword.engine.loop import Hooks

log = logging.getLogger(__name__)

# Distances that rounding explains, by dtype; lossy codecs add theirs (benchmarks/instances/audit.py measures both).
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
_LOSS_TOLERANCE: Final = {"": 0.0, "int8": 0.1, "int4": 0.35}
# A difference counts if it is also larger than this many times that of two computations here.
_NOISE_FACTOR: Final = 4.0
_SEGMENT_TOKENS: Final = 256
_MAX_PENDING: Final = 64
_MAX_RESTARTS: Final = 8
_MAX_PAUSE: Final = 1.0  # seconds


def tolerance(dtype: torch.dtype, loss: str = "") -> float:
    """The largest distance that counts as equal. `loss`: the lossy codec of the stores (`Layout.loss`)."""
    return _TOLERANCE[dtype] + sum(_LOSS_TOLERANCE[name] for name in loss.split("+"))


class Quarantine(Protocol):
    """Chains that must not be reused, here and at the other instances (`prefixes.quarantine.ChainQuarantine`).

    Attributes:
        keys: of the first bad block of each chain.
        roots: root keys of their tenants.
        device: KV that was computed here was wrong.
    """

    keys: frozenset[bytes]
    roots: frozenset[bytes]
    device: bool


@dataclass(slots=True)
class _Hit:
    """A hit that is to be audited. Its blocks are not held while it waits."""

    tokens: array[int]
    root: bytes
    keys: list[bytes]
    groups: tuple[list[int], ...]
    source: str
    compared: int = 0  # leading blocks that were compared
    restarts: int = 0
    table: BlockTable | None = None
    held: Sequence[int] = ()


class HitAudit:
    """Audits the hits of one engine, on its thread.

    Args:
        on_mismatch: takes a chain into quarantine.
        every: one hit in N is audited, by source; 0: none.
        budget: share of the time since the start that audits may take.
        labels: of the tiers.
        loss: lossy codec of the stores.
        exact: the engine is batch-invariant: no difference is rounding.
    """

    def __init__(
        self,
        runner: TorchRunner,
        cache: PrefixCache,
        quarantine: Quarantine,
        on_mismatch: Callable[[Mismatch], None],
        *,
        every: int = 0,
        budget: float = 0.1,
        labels: Sequence[str] = (),
        loss: str = "",
        exact: bool = False,
    ) -> None:
        self.every = every
        self.counts = AuditCounts()
        self.tolerance = 0.0 if exact else tolerance(runner.kv_dtype, loss)
        self._runner = runner
        self._cache = cache
        self._quarantine = quarantine
        self._on_mismatch = on_mismatch
        self._applied: frozenset[bytes] = frozenset()
        self._budget = budget
        self._labels = labels
        self._started = time.monotonic()
        self._random = random.Random()  # which hits are audited is no secret
        self._chosen: dict[str, int] = {}  # of every N hits of a source, the number of the one that is audited
        self._pending: deque[_Hit] = deque()
        self._origins: OrderedDict[bytes, str] = OrderedDict()  # sources of the loaded blocks on the device
        self._segment = max(_SEGMENT_TOKENS // cache.block_size, 1)

    # Hits

    def attach(self, hooks: Hooks) -> None:
        """Audit from now on."""
        hooks.before_step.append(self.before_step)
        hooks.admitted.append(self.admitted)
        hooks.idle.append(self)

    def admitted(self, sequence: SequenceState) -> None:
        """A sequence was admitted for the first time."""
        size, table = self._cache.block_size, sequence.table
        source, count = DEVICE, min(max(sequence.cached_tokens, 0) // size, table.published)
        for arrival in (sequence.loaded, sequence.transferred):
            if arrival is not None and arrival.tokens > arrival.start:
                count = max(count, min(arrival.tokens // size, table.published))
                keys = table.chain.keys_to(count)[arrival.start // size : count]
                names = [self._labels[tier] for tier in arrival.tiers] or [arrival.origin] * len(keys)
                self._origins.update(zip(keys, names, strict=False))
                source = "instance" if arrival.origin else names[0]
        while len(self._origins) > 2 * self._cache.pool.num_blocks:
            self._origins.popitem(last=False)
        if count:
            self._note_hit(source, table, count)

    def _note_hit(self, source: str, table: BlockTable, count: int) -> None:
        number = self.counts.hits[source] % self.every
        self.counts.hits[source] += 1
        if not number:
            self._chosen[source] = self._random.randrange(self.every)
        if number != self._chosen[source]:
            return
        if len(self._pending) >= _MAX_PENDING:
            self.counts.skipped += 1
            return
        chain = table.chain
        tokens, keys = chain.tokens[: count * self._cache.block_size], chain.keys_to(count)[:count]
        groups = tuple(list(blocks[:count]) for blocks in table.groups)
        self._pending.append(_Hit(tokens, chain.root, keys, groups, source))

    # The engine's loop

    def before_step(self) -> None:
        """Requests are waiting: give back the blocks."""
        if self._pending and self._pending[0].table is not None:
            self._suspend(self._pending[0])

    def pause(self) -> float | None:
        """Seconds until `work` may be called, if the engine stays idle; None if there is nothing to audit."""
        if not self._pending:
            return None
        over = self.counts.seconds - self._budget * (time.monotonic() - self._started)
        return 0.0 if over <= 0 else min(over / self._budget, _MAX_PAUSE) if self._budget else _MAX_PAUSE

    def work(self) -> bool:
        """Audit the next segment of a hit, if the budget allows it. False if there is nothing to do now."""
        if self.pause() != 0.0:
            return False
        started = time.monotonic()
        hit = self._pending[0]
        if (hit.table is None and not self._resume(hit)) or not self._compare_segment(hit):
            self._suspend(hit)
            self._pending.popleft()
        self.counts.seconds += time.monotonic() - started
        return True

    def _resume(self, hit: _Hit) -> bool:
        """Hold the blocks that are still cached, and open a table for the computation. False if too few are left."""
        cache, pool = self._cache, self._cache.pool
        cached = [
            [pool.key(block) == group_key(number, key) for block, key in zip(blocks, hit.keys, strict=True)]
            for number, blocks in enumerate(hit.groups)
        ]
        whole = [cached[number] for number, group in enumerate(cache.groups) if group.whole]
        left = min(([*kept, False].index(False) for kept in whole), default=len(hit.keys))
        hit.keys = hit.keys[:left]
        hit.groups = tuple(
            [block if kept else HOLE for block, kept in zip(blocks[:left], of_group, strict=False)]
            for blocks, of_group in zip(hit.groups, cached, strict=True)
        )
        if len(hit.keys) <= hit.compared or self._is_hopeless(hit):
            self.counts.skipped += not hit.compared
            return False
        hit.held = [block for blocks in hit.groups for block in blocks if block != HOLE]
        pool.share(hit.held)
        hit.table = cache.open(hit.tokens)
        start = [blocks[: hit.compared] for blocks in hit.groups]
        cache.admit(hit.table, Match(start[0], -1, 0, hit.compared * cache.block_size, tuple(start[1:])))
        return True

    def _is_hopeless(self, hit: _Hit) -> bool:
        """The chain is in quarantine, or a model with windows has started again too often."""
        in_quarantine = self._cache.usable(hit.keys) < len(hit.keys)
        return in_quarantine or (bool(self._cache.windows) and hit.restarts > _MAX_RESTARTS)

    def _suspend(self, hit: _Hit) -> None:
        """Give back all blocks. A model with windows starts again later: what it has computed of them is lost."""
        if hit.table is not None:
            self._cache.release(hit.table)
            self._cache.pool.release(hit.held)
            hit.table, hit.held = None, ()
            hit.restarts += 1
            if self._cache.windows:
                hit.compared = 0

    def _compare_segment(self, hit: _Hit) -> bool:
        """Compute the next segment and compare it. False if the audit has ended."""
        first, stop = hit.compared, min(hit.compared + self._segment, len(hit.keys))
        try:
            computed = self._compute(hit, first, stop)
            mismatch = self._compare(hit, first, stop) if computed else None
        except (RuntimeError, MemoryError, LookupError, ValueError) as error:
            log.warning("an audit could not be computed: %s: %s", type(error).__name__, error)
            computed = False
        if not computed:
            self.counts.skipped += not first
            return False
        if not first and not hit.restarts:
            self.counts.audited[hit.source] += 1
        if mismatch is not None:
            self._report(hit, mismatch)
            return False
        self._adopt(hit, first, stop)
        hit.compared = stop
        return stop < len(hit.keys)

    def _compare(self, hit: _Hit, first: int, stop: int) -> Mismatch | None:
        """The first of these blocks that is wrong."""
        assert hit.table is not None
        for number, (found, computed) in enumerate(zip(hit.groups, hit.table.groups, strict=True)):
            wanted = [i for i in range(first, stop) if found[i] != HOLE]
            if not wanted:
                continue
            layers = self._runner.group_layers(number)
            pairs = [found[i] for i in wanted], [computed[i] for i in wanted]
            worst = block_distances(layers.values(), *pairs).amax((0, 1)).tolist()
            for block, distance in zip(wanted, worst, strict=True):
                self.counts.blocks += 1
                self.counts.exact += distance == 0.0
                if distance > self.tolerance and (mismatch := self._confirmed(hit, number, block)) is not None:
                    return mismatch
                self.counts.largest = max(self.counts.largest, distance)
        return None

    def _confirmed(self, hit: _Hit, number: int, block: int) -> Mismatch | None:
        """Compute a block that differs once more, alone. None if the two computations differ as much, or the second one does
        not differ from what was cached."""
        assert hit.table is not None
        layers = self._runner.group_layers(number)
        found, computed = hit.groups[number][block], hit.table.groups[number][block]
        before = [copy_block(layer, computed) for layer in layers.values()]
        self._run(hit, hit.table, block, block + 1)
        figures = block_distances(layers.values(), [found], [computed])[:, :, 0]
        pairs = zip(layers.values(), before, strict=True)
        noise = torch.stack([distances(layer, [computed], copy)[:, 0] for layer, copy in pairs])
        limit = torch.clamp(_NOISE_FACTOR * noise, min=self.tolerance)
        if not bool((figures > limit).any()):
            return None
        keys, size = hit.keys[: block + 1], self._cache.block_size
        source = self._origins.get(keys[-1], DEVICE)
        root = self._cache.root(PUBLIC) if is_public(keys[-1]) else hit.root
        return Mismatch(
            hit.tokens[: len(keys) * size], root, keys, number, source, tuple(layers), figures.tolist(),
            noise.tolist(), self.tolerance, block_bytes(layers, found),
        )  # fmt: skip

    def _compute(self, hit: _Hit, first: int, stop: int) -> bool:
        """Compute blocks of the hit into the table's own blocks. False if too few are free."""
        size, table = self._cache.block_size, hit.table
        assert table is not None
        if self._cache.windows:
            self._cache.trim(table, first * size)
        if not self._cache.advance(table, stop * size, publish=False):
            return False
        self._run(hit, table, first, stop)
        return True

    def _run(self, hit: _Hit, table: BlockTable, first: int, stop: int) -> None:
        size = self._cache.block_size
        sequence = SequenceState(Request("audit", (), SamplingParams(max_tokens=0)), table, 0, len(hit.tokens))
        chunk = Chunk(sequence, first * size, (stop - first) * size, first * size, False, first)
        written, self._runner.on_written = self._runner.on_written, None
        try:
            self._runner.run(Step((chunk,)), {})
        finally:
            self._runner.on_written = written

    def _adopt(self, hit: _Hit, first: int, stop: int) -> None:
        """Go on with the cached blocks of full attention, which were compared, and free the computed ones."""
        assert hit.table is not None
        for number, blocks in enumerate(hit.table.groups):
            if self._cache.groups[number].whole:
                cached = hit.groups[number][first:stop]
                self._cache.pool.share(cached)
                self._cache.pool.release(blocks[first:stop])
                blocks[first:stop] = cached

    # Quarantine

    def _report(self, hit: _Hit, mismatch: Mismatch) -> None:
        self.counts.different[hit.source] += 1
        log.error(
            "audit: the cached KV of block %d of a chain of %d tokens, from %s, differs from the computation; the chain %s is "
            "in quarantine", mismatch.block, len(mismatch.tokens), mismatch.source, mismatch.keys[-1].hex(),
        )  # fmt: skip
        self._on_mismatch(mismatch)
        self.apply_quarantine()

    def apply_quarantine(self) -> None:
        """The quarantine has changed, also that of an engine without audits. Drop all blocks of the tenants of new chains from
        the device: which of them continue a bad block is not known."""
        keys, known = self._quarantine.keys, self._applied
        self._applied = self._cache.quarantined = keys
        if not keys <= known:
            for root in self._quarantine.roots:
                self._cache.drop(root)
        self._cache.disabled = self._quarantine.device
