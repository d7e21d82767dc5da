"""What the tiers hold, as vLLM's KV events: the worker's side notes what stores take and lose, the scheduler's side tells it in
the block hashes of vLLM's own events, so that one subscriber joins the tiers with the device.

`medium` is CPU for `memory://` and STORAGE for all others, `ownership` the tier's label, `locality` REMOTE for stores over a
network. A block counts as stored once every rank has stored its part.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)

from foreword.blocks.layout import FINGERPRINT_BYTES
from foreword.integrations.vllm.step_messages import TierChange
from foreword.store.base import Name
from foreword.store.tiered import TieredStore

# About 60 MB and 70 MB of the scheduler's memory where blocks have 32 tokens.
_EXPECTED = 1 << 16
_KNOWN = 1 << 18
_LOCAL = ("memory", "disk", "unix")


# The worker's side


class TierWatch:
    """Collects what changes in the tiers of one rank's store, on whatever thread it happens."""

    def __init__(self, store: TieredStore, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._changes: list[TierChange] = []
        store.subscribe(self._note)

    def _note(self, tier: int, stored: bool, names: Sequence[Name]) -> None:
        keys = tuple(name[FINGERPRINT_BYTES:] for name in names)
        with self._lock:
            self._changes.append(TierChange(self._rank, tier, stored, keys))

    @property
    def pending(self) -> bool:
        return bool(self._changes)

    def take(self) -> list[TierChange]:
        with self._lock:
            found, self._changes = self._changes, []
        return found


# The scheduler's side


@dataclass(frozen=True, slots=True)
class _Block:
    """What a BlockStored event says of one block."""

    hash: Any
    parent: Any
    tokens: list[int]
    extra: Any


@dataclass(slots=True)
class _Known:
    """A block that a tier has. `ranks`: per tier one bit for each rank that has its part."""

    hash: Any
    ranks: dict[int, int] = field(default_factory=dict)


class Announcer:
    """Turns changes in the tiers into vLLM's events.

    It knows the last 65,536 blocks that were asked for or computed, and of the last 262,144 that it announced where they are.
    What is older is not announced any more when it moves or goes.

    Args:
        tiers: scheme of the URL and label of each.

    Attributes:
        hash_size: tokens per hash of vLLM's, which may be a part of a block.
    """

    def __init__(self, tiers: Sequence[tuple[str, str]], ranks: int, block_size: int) -> None:
        self._tiers = tiers
        self._all = (1 << ranks) - 1
        self._block_size = block_size
        self.hash_size = block_size
        self._expected: OrderedDict[bytes, _Block] = OrderedDict()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._events: list[KVCacheEvent] = []

    def expect(self, request: Any, keys: Sequence[bytes], first: int) -> None:
        """Blocks of a request, from number `first` on, that a tier may soon have. vLLM hashes none where it caches none."""
        hashes = resolve_block_hashes(request.block_hashes, self.hash_size, self._block_size)
        size = self._block_size
        for number, key in enumerate(keys, start=first):
            if number >= len(hashes):
                return
            tokens = list(request.all_token_ids[number * size : (number + 1) * size])
            extra, _ = generate_block_hash_extra_keys(request, number * size, (number + 1) * size, 0)
            parent = maybe_convert_block_hash(hashes[number - 1]) if number else None
            self._expected[key] = _Block(maybe_convert_block_hash(hashes[number]), parent, tokens, extra)
            self._expected.move_to_end(key)
        while len(self._expected) > _EXPECTED:
            self._expected.popitem(last=False)

    def changed(self, changes: Iterable[TierChange]) -> None:
        for change in changes:
            turn = self._stored if change.stored else self._removed
            self._tell(change.tier, change.stored, [key for key in change.keys if turn(change, key)])

    def missing(self, key: bytes) -> None:
        """A search has not found this block in any tier: whoever evicted it was not here to tell."""
        known = self._known.pop(key, None)
        for tier, ranks in (known.ranks if known is not None else {}).items():
            if known is not None and ranks == self._all:
                self._events.append(self._removal(tier, [known.hash]))

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def _stored(self, change: TierChange, key: bytes) -> bool:
        """Whether this change makes the tier whole."""
        known = self._known.get(key)
        if known is None:
            block = self._expected.get(key)
            if block is None:
                return False
            known = self._known[key] = _Known(block.hash)
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        before = known.ranks.get(change.tier, 0)
        known.ranks[change.tier] = before | 1 << change.rank
        return before != self._all and known.ranks[change.tier] == self._all

    def _removed(self, change: TierChange, key: bytes) -> bool:
        """Whether the tier was whole until this change."""
        known = self._known.get(key)
        if known is None:
            return False
        before = known.ranks.get(change.tier, 0)
        known.ranks[change.tier] = before & ~(1 << change.rank)
        return before == self._all

    def _tell(self, tier: int, stored: bool, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        if not stored:
            self._events.append(self._removal(tier, [self._known[key].hash for key in keys]))
            return
        run: list[_Block] = []
        for key in keys:
            block = self._expected.get(key)
            if block is None:  # it moved up after it was forgotten
                continue
            if run and run[-1].hash != block.parent:
                self._events.append(self._storage(tier, run))
                run = []
            run.append(block)
        if run:
            self._events.append(self._storage(tier, run))

    def _storage(self, tier: int, run: Sequence[_Block]) -> KVCacheEvent:
        return BlockStored(
            block_hashes=[block.hash for block in run],
            parent_block_hash=run[0].parent,
            token_ids=[token for block in run for token in block.tokens],
            block_size=self._block_size,
            lora_id=None,
            lora_name=None,
            extra_keys=to_event_extra_keys([block.extra for block in run]),
            **self._where(tier),
        )

    def _removal(self, tier: int, hashes: list[Any]) -> KVCacheEvent:
        return BlockRemoved(block_hashes=hashes, **self._where(tier))

    def _where(self, tier: int) -> dict[str, Any]:
        scheme, label = self._tiers[tier]
        return {
            "medium": MEDIUM_CPU if scheme == "memory" else MEDIUM_STORAGE,
            "group_idx": 0,
            "locality": "LOCAL" if scheme in _LOCAL else "REMOTE",
            "ownership": label,
        }
